"""Averages of what clients send."""

import numpy as np
import pytest

from fedhet.server import average_shared, weighted_average


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


def test_average_over_the_clients_that_share():
    spec = {"all": ((), "float32"), "some": ((), "float32")}
    models = {
        "0": {"all": np.array(1, np.float32)},
        "1": {"all": np.array(5, np.float32), "some": np.array(2, np.float32)},
        "2": {},
    }
    specs = {"0": {"all": spec["all"]}, "1": spec, "2": {"all": spec["all"], "unsent": ((), "float32")}}
    found = average_shared(models, {"0": 3.0, "1": 1.0, "2": 9.0}, specs)
    assert found == pytest.approx({"all": 2.0, "some": 2.0})
