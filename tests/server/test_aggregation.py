"""Averages of what clients send."""

import numpy as np

from fedhet.server import weighted_average


def test_weighted_average():
    rng = np.random.default_rng(0)
    spec = {"w": ((3,), "float32"), "n": ((), "int64")}
    groups = [{"w": rng.normal(size=3).astype(np.float32), "n": np.array(n)} for n in (2, 3, 7)]
    average = weighted_average(groups, [1, 2, 4], spec)
    expected = np.average([group["w"].astype(np.float64) for group in groups], axis=0, weights=[1, 2, 4])
    np.testing.assert_allclose(average["w"], expected, rtol=0, atol=3 * 2**-24 * np.abs(groups[0]["w"]).max() * 4)
    wide = [{"w": group["w"].astype(np.float64), "n": group["n"]} for group in groups]
    exact = weighted_average(wide, [1, 2, 4], {"w": ((3,), "float64"), "n": ((), "int64")})
    np.testing.assert_allclose(exact["w"], expected, rtol=1e-14)
    assert (average["n"], average["n"].dtype) == (5, np.int64)
    half = [{"w": group["w"].astype(np.float16), "n": group["n"]} for group in groups]
    assert weighted_average(half, [1, 1, 1], spec)["w"].dtype == np.float32
    same = weighted_average([groups[0]] * 3, [0.1, 0.2, 0.3], spec)
    np.testing.assert_allclose(same["w"], groups[0]["w"], rtol=2**-22)
