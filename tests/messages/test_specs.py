import numpy as np
import pytest
import torch

from fedhet.errors import ModelError
from fedhet.messages import difference, load_into, spec_of


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
    assert difference(spec, {**spec, "b": ((4,), "float32")}) == "its b has shape [3], not [4]"
    assert difference(spec, {**spec, "b": ((3,), "float16")}) == "its b is float32, not float16"
    assert difference(spec, {"w": spec["w"]}) == "it alone has b"
    assert difference({"w": spec["w"]}, spec) == "it lacks b"
    assert difference(dict(reversed(spec.items())), spec) == "its arrays are in another order"
