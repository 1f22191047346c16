"""Properties and faults of BBP-MAP, and of the variances that are estimated for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhet.algorithms.matching.bbp_map import estimate_variances, match_layer

SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def random_layers(seed: int, widths: list[int], columns: int) -> list[np.ndarray]:
    random = np.random.RandomState(seed)
    return [random.randn(width, columns) for width in widths]


def planted_layers(seed: int, clients: int, width: int, columns: int, noise: float):
    """Copies of one layer with their rows in different orders, and where each row came from."""
    random = np.random.RandomState(seed)
    base = random.randn(width, columns)
    orders = [random.permutation(width) for _ in range(clients)]
    return base, [(base + noise * random.randn(width, columns))[order] for order in orders], orders


@settings(max_examples=20, deadline=None)
@given(
    seed=SEEDS,
    widths=WIDTHS,
    columns=st.integers(1, 20),
    sweeps=st.integers(0, 3),
    gamma=st.sampled_from([1e-3, 1.0, 7.0, 1e3]),
    scale=st.sampled_from([0.03, 1.0, 5.0]),
)
def test_assignments_are_injective(seed, widths, columns, sweeps, gamma, scale):
    layers = [scale * rows for rows in random_layers(seed, widths, columns)]
    match = match_layer(layers, gamma=gamma, sweeps=sweeps, seed=seed)
    counts = np.zeros(len(match.counts), dtype=int)
    for rows, assignment in zip(layers, match.assignments, strict=True):
        assert assignment.shape == (len(rows),)
        assert len(np.unique(assignment)) == len(rows)
        counts[assignment] += 1
    np.testing.assert_array_equal(counts, match.counts)
    assert match.counts.min() >= 1
    assert match.weights.shape == (len(counts), columns)
    assert max(widths) <= len(counts) <= sum(widths)


def test_very_unequal_widths():
    # The client of 720 rows is taken out of a layer that others hold at 20; the authors' code opens at most 680 then.
    match = match_layer(random_layers(0, [720, 20], 3), gamma=1e-3, sweeps=1)
    assert [len(np.unique(assignment)) for assignment in match.assignments] == [720, 20]


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, clients=st.integers(2, 8), width=st.integers(1, 20), noise=st.sampled_from([0.0, 0.05]))
def test_planted_permutations(seed, clients, width, noise):
    base, layers, orders = planted_layers(seed, clients, width, 100, noise)
    match = match_layer(layers, gamma=1.0, average="mean")
    assert len(match.counts) == width
    for assignment, order in zip(match.assignments, orders, strict=True):
        # Local rows that stem from one base row share one global row.
        np.testing.assert_array_equal(assignment[np.argsort(order)], match.assignments[0][np.argsort(orders[0])])
    if not noise:
        np.testing.assert_allclose(match.weights[match.assignments[0][np.argsort(orders[0])]], base, atol=1e-12)


def test_averages():
    layers = random_layers(1, [5, 7, 4], 6)
    prior = np.linspace(-1, 1, 6)
    options = {"sigma2": 0.5, "sigma0_2": 2.0, "prior_mean": prior, "seed": 4}
    posterior = match_layer(layers, **options)
    mean = match_layer(layers, average="mean", **options)
    total = np.zeros_like(mean.weights)
    for rows, assignment in zip(layers, mean.assignments, strict=True):
        total[assignment] += rows
    counts = mean.counts[:, None]
    np.testing.assert_allclose(mean.weights, total / counts)
    np.testing.assert_allclose(posterior.weights, (total / 0.5 + prior / 2) / (counts / 0.5 + 1 / 2))


def test_scale_invariance():
    layers = random_layers(2, [9, 6, 9, 8], 5)
    small = match_layer([0.01 * rows for rows in layers], sigma2=1e-4, sigma0_2=1e-4, prior_mean=1e-3)
    large = match_layer(layers, prior_mean=0.1)
    for one, other in zip(small.assignments, large.assignments, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(small.weights, 0.01 * large.weights)


def test_size_budget():
    layers = random_layers(3, [10, 12, 10, 11], 40)
    unbounded = match_layer(layers, sigma2=0.01)
    assert len(unbounded.counts) > 20
    for budget, size in ((20, 20), (1, 12)):
        match = match_layer(layers, sigma2=0.01, max_rows=budget)
        assert len(match.counts) == size
        assert [len(np.unique(assignment)) for assignment in match.assignments] == [10, 12, 10, 11]


COLUMNS = 289


def matched(layers, **options):
    variances = estimate_variances(layers, **options)
    return match_layer(layers, **variances, **options)


@pytest.mark.parametrize(("scale", "gamma", "noise"), [(1.0, 7.0, 0.0), (0.03, 1.0, 0.5)])
def test_shared_rows_merge(scale, gamma, noise):
    random = np.random.RandomState(0)
    base = random.randn(32, COLUMNS)
    layers = [scale * (base + noise * random.randn(32, COLUMNS))[random.permutation(32)] for _ in range(16)]
    match = matched(layers, gamma=gamma)
    assert len(match.counts) == 32
    assert (match.counts == 16).all()


def test_foreign_rows_do_not_merge():
    random = np.random.RandomState(1)
    layers = [0.03 * random.randn(32, COLUMNS) for _ in range(6)]
    assert len(matched(layers).counts) == 6 * 32
    assert len(matched(layers, max_rows=50).counts) == 50


def test_sigma2_follows_the_noise():
    random = np.random.RandomState(3)
    base = random.randn(20, COLUMNS)
    ratios = []
    for noise in (0.05, 0.3, 0.6):
        layers = [base + noise * random.randn(20, COLUMNS) for _ in range(8)]
        sigma2, sigma0_2 = estimate_variances(layers).values()
        assert sigma0_2 == pytest.approx(1 + noise**2, rel=0.05)
        # v (v + e) / (v - e) with v = 1 + noise^2 and e = noise^2
        assert sigma2 == pytest.approx((1 + noise**2) * (1 + 2 * noise**2), rel=0.05)
        ratios.append(sigma2 / sigma0_2)
    assert ratios == sorted(ratios)
