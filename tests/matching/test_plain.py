"""BBP-MAP against its plain form, neuron by neuron."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from fedhet.algorithms.matching import match_layer


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
