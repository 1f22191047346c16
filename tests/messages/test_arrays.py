import numpy as np
import pytest
import torch

from fedhet.errors import ModelError
from fedhet.messages import WireError, as_declared, check, difference, load_into, spec_of


def test_check_names_the_first_array_that_is_wrong():
    spec = {"w": ((2, 3), "float32"), "n": ((), "int64")}
    good = {"w": np.ones((2, 3), np.float32), "n": np.array(1)}
    check(good, spec, "its model")
    for change, message in (
        ({"w": np.ones((3, 2), np.float32)}, r"its model: array w is float32\[3, 2\], but must be float32\[2, 3\]"),
        ({"w": np.ones((2, 3))}, r"w is float64\[2, 3\], but must be float32\[2, 3\]; convert it"),
        ({"n": np.array(1.0)}, r"n is float64\[\], but must be int64\[\]"),
        ({"v": np.ones(1)}, r"missing \[\], unexpected \['v'\]"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, "w has values that are not finite"),
        ({"w": np.full((2, 3), -np.inf, np.float32)}, "w has values that are not finite"),
    ):
        with pytest.raises(WireError, match=message):
            check(good | change, spec, "its model")
    with pytest.raises(WireError, match=r"missing \['n'\]"):
        check({"w": good["w"]}, spec, "its model")


def test_huge_values_are_refused():
    check({"w": np.full(4, 6e4, np.float16)}, {"w": ((4,), "float16")}, "its model")  # the sum of squares overflows
    with pytest.raises(WireError, match=r"its model: w has values up to 3.0e\+30: training diverged"):
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
    with pytest.raises(ValueError, match="could not convert"):
        as_declared({"w": np.array("text")}, specs)


def test_loading_arrays_into_a_model():
    model = torch.nn.Linear(2, 2)
    arrays = {"weight": np.full((2, 2), 3, np.float16)}
    load_into(model.state_dict(), arrays)
    assert torch.equal(model.weight, torch.full((2, 2), 3.0))
    for bad in ({"weight": np.ones((2, 3))}, {"bias": np.ones(2), "other": np.ones(1)}):
        before = model.bias.clone()
        with pytest.raises(ModelError, match=r"weight was received with shape \[2, 3\]|other was received"):
            load_into(model.state_dict(), bad)
        assert torch.equal(model.bias, before)
    assert spec_of(model.state_dict()) == {"weight": ((2, 2), "float32"), "bias": ((2,), "float32")}


def test_the_first_difference_of_two_models_is_told():
    spec = {"w": ((2,), "float32"), "b": ((3,), "float32")}
    told = "its b is float32[3], the other's is "
    for changed, other in (({"b": ((4,), "float32")}, "float32[4]"), ({"b": ((3,), "float16")}, "float16[3]")):
        assert difference(spec, {**spec, **changed}) == told + other
    assert difference(spec, {"w": spec["w"]}) == told + "missing"
    assert difference(dict(reversed(spec.items())), spec) == "its arrays are in another order"
