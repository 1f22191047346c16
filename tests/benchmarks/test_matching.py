"""Speed and memory of matching, against the assignments that it cannot do without and against its plain form."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits

from fedhet.algorithms.matching import LayerMatch, bbp_map, match_layer

# VGG-9's rows: filters or neurons, inputs and a bias.
VGG9 = {
    "conv1": (32, 28),
    "conv2": (64, 289),
    "conv3": (128, 577),
    "conv4": (128, 1153),
    "conv5": (256, 1153),
    "conv6": (256, 2305),
    "fc7": (512, 4097),
    "fc8": (512, 513),
}


def initial_layers(clients: int, rows: int, columns: int, seed: int = 0) -> list[np.ndarray]:
    """Layers as PyTorch initialises them: uniform within 1 / sqrt(inputs)."""
    random = np.random.default_rng(seed)
    bound = (columns - 1) ** -0.5
    return [random.uniform(-bound, bound, (rows, columns)).astype(np.float32) for _ in range(clients)]


def plain_match(weights, s, s0, gamma, prior, sweeps, seed) -> list[list[int]]:
    """BBP-MAP neuron by neuron, as the papers write it down."""
    clients = len(weights)
    weights = [s * rows.astype(float) for rows in weights]
    shift = s0 * prior
    rows, assignments = [], [[] for _ in range(clients)]  # a global row is [sum, precision, clients]

    def match(j: int) -> None:
        cost = np.empty((len(weights[j]), len(rows) + len(weights[j])), dtype=np.float32)
        for local, row in enumerate(weights[j]):
            for i, (g, precision, count) in enumerate(rows):
                count = min(count, 10)
                value = ((row + g) ** 2).sum() / (s + precision) - (g**2).sum() / precision
                cost[local, i] = -(value + np.log(count / (clients - count)))
            value = ((row + shift) ** 2).sum() / (s + s0) - (shift**2).sum() / s0
            for k in range(1, len(weights[j]) + 1):
                cost[local, len(rows) + k - 1] = -(value - 2 * np.log(k) + 2 * np.log(gamma / clients))
        size = len(rows)
        for row, column in zip(weights[j], linear_sum_assignment(cost)[1], strict=True):
            if column < size:
                g, precision, count = rows[column]
                rows[column] = (g + row, precision + s, count + 1)
                assignments[j].append(int(column))
            else:
                assignments[j].append(len(rows))
                rows.append((shift + row, s0 + s, 1))

    def remove(j: int) -> None:
        for row, i in sorted(zip(weights[j], assignments[j], strict=True), key=lambda pair: -pair[1]):
            g, precision, count = rows[i]
            rows[i] = (g - row, precision - s, count - 1)
            if count == 1:
                del rows[i]
                for other in range(clients):
                    assignments[other] = [a - (a > i) for a in assignments[other]]
        assignments[j] = []

    for j in sorted(range(clients), key=lambda j: -len(weights[j])):
        match(j)
    random = np.random.RandomState(seed)
    for _ in range(sweeps):
        for j in random.permutation(clients):
            remove(j)
            match(j)
    return assignments


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    columns=st.integers(2, 30),
    gamma=st.sampled_from([1e-3, 1.0, 7.0]),
    sigma2=st.sampled_from([0.1, 1.0, 3.0]),
    sigma0_2=st.sampled_from([0.5, 1.0]),
    sweeps=st.integers(0, 3),
)
def test_same_assignments_as_the_plain_form(seed, widths, columns, gamma, sigma2, sigma0_2, sweeps):
    random = np.random.RandomState(seed)
    layers = [random.randn(width, columns).astype(np.float32) for width in widths]
    prior = 0.3 * random.randn(columns)
    plain = plain_match(layers, 1 / sigma2, 1 / sigma0_2, gamma, prior, sweeps, seed)
    options = {"sigma2": sigma2, "sigma0_2": sigma0_2, "gamma": gamma, "prior_mean": prior}
    match = match_layer(layers, sweeps=sweeps, seed=seed, **options)
    assert [assignment.tolist() for assignment in match.assignments] == plain


def timed_match(monkeypatch, layers) -> tuple[float, float, LayerMatch]:
    """Seconds in all, seconds in the solver, and the match."""
    in_solver = 0.0

    def solve(cost):
        nonlocal in_solver
        start = time.perf_counter()
        columns = linear_sum_assignment(cost)[1]
        in_solver += time.perf_counter() - start
        return columns

    with monkeypatch.context() as patch, threadpool_limits(1):  # the solver has no more than one thread
        patch.setattr(bbp_map, "assigned", solve)
        start = time.perf_counter()
        match = match_layer(layers)
        return time.perf_counter() - start, in_solver, match


def assignments_alone(monkeypatch, layers) -> tuple[float, LayerMatch]:
    """Seconds in the solver when it is offered every new row that the method defines, as many as the client has."""
    with monkeypatch.context() as patch:
        patch.setattr(bbp_map, "_FIRST_OFFER", max(map(len, layers)))
        _, in_solver, match = timed_match(monkeypatch, layers)
        return in_solver, match


@pytest.mark.benchmark
def test_vgg9_takes_little_more_than_its_assignments(monkeypatch, capsys):
    """Sixteen clients, five sweeps."""
    lines, totals = [], np.zeros(3)
    for name, (rows, columns) in VGG9.items():
        layers = initial_layers(16, rows, columns)
        seconds, in_solver, match = min((timed_match(monkeypatch, layers) for _ in range(2)), key=lambda run: run[0])
        alone, full = assignments_alone(monkeypatch, layers)
        assert len(match.counts) == rows + 15
        for one, other in zip(match.assignments, full.assignments, strict=True):
            np.testing.assert_array_equal(one, other)
        totals += seconds, in_solver, alone
        lines.append(
            f"{name:6} {rows:4} x {columns:4} -> {len(match.counts):4} {seconds:8.3f} s, {in_solver:6.3f} s of it in "
            f"the solver; assignments alone {alone:6.3f} s"
        )
    ratio = totals[0] / totals[2]
    with capsys.disabled():
        print("", *lines, f"in all {totals[0]:.2f} s, {ratio:.2f} times the assignments alone", sep="\n")
    assert ratio <= 2.5
