import numpy as np
import pytest

from fedhet.algorithms.matching import estimate_variances, match_layer

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
