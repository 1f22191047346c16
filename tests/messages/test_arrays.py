import numpy as np
import pytest

from fedhet.messages import WireError, as_declared, check


def test_check_names_the_first_array_that_is_wrong():
    spec = {"w": ((2, 3), "float32"), "n": ((), "int64")}
    good = {"w": np.ones((2, 3), np.float32), "n": np.array(1)}
    check(good, spec, "its model")
    for change, message in (
        ({"w": np.ones((3, 2), np.float32)}, r"its model: w is float32\[3, 2\], not float32\[2, 3\]"),
        ({"w": np.ones((2, 3))}, r"w is float64\[2, 3\], not float32\[2, 3\]"),
        ({"n": np.array(1.0)}, r"n is float64\[\], not int64\[\]"),
        ({"v": np.ones(1)}, r"missing arrays \[\], unexpected arrays \['v'\]"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, "w has values that are not finite"),
        ({"w": np.full((2, 3), -np.inf, np.float32)}, "w has values that are not finite"),
    ):
        with pytest.raises(WireError, match=message):
            check(good | change, spec, "its model")
    with pytest.raises(WireError, match=r"missing arrays \['n'\]"):
        check({"w": good["w"]}, spec, "its model")


def test_finite_values_whose_sum_is_not_are_finite():
    check({"w": np.full(4, 6e4, np.float16)}, {"w": ((4,), "float16")}, "its model")


def test_huge_values_are_refused():
    with pytest.raises(
        WireError, match=r"its model: w has values up to 3.0e\+30, beyond 1e\+09: has training diverged"
    ):
        check({"w": np.full(4, 3e30, np.float32)}, {"w": ((4,), "float32")}, "its model")


def test_arrays_get_the_declared_dtypes():
    specs = [{"w": ((2,), "float32"), "n": ((), "int64")}]
    cast = as_declared({"w": np.ones(2), "n": np.float64(2.6), "other": np.ones(1)}, specs)
    assert {name: (array.dtype.name, array.shape) for name, array in cast.items()} == {
        "w": ("float32", (2,)),
        "n": ("int64", ()),
        "other": ("float64", (1,)),
    }
    assert cast["n"] == 3
    with pytest.raises(WireError, match="w has dtype complex128, which cannot be cast to the clients' float32"):
        as_declared({"w": np.ones(2, complex)}, specs)
