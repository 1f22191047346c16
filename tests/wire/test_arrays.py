import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fedhet.wire import (
    STYPE,
    Encoder,
    Payload,
    WireError,
    cast,
    check,
    decode,
    decode_arrays,
    encode_arrays,
    to_arrays,
    to_tensor,
)

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")


@given(
    arrays_of.arrays(
        st.sampled_from(DTYPES).map(np.dtype), arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    )
)
def test_arrays_come_back_as_they_were(array):
    back = decode_arrays(encode_arrays({"a": array}))["a"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


def test_arrays_that_are_not_contiguous_come_back_in_order():
    array = np.arange(12.0).reshape(3, 4).T[::2]
    assert np.array_equal(decode_arrays(encode_arrays({"a": array}))["a"], array)


def test_a_payload_comes_back_with_its_values_and_groups():
    payload = Payload(
        {"model": {"w": np.ones((2, 3), np.float32), "n": np.array(7)}, "empty": {"x": np.zeros((0, 4), np.float16)}},
        {"eta": 0.1, "name": "a", "flag": True, "raw": b"\x00\xff", "list": [1, 2]},
    )
    back = decode(Encoder()(payload))
    assert back.values == payload.values
    assert back.arrays.keys() == payload.arrays.keys()
    for group, arrays in payload.arrays.items():
        for name, array in arrays.items():
            assert back.arrays[group][name].dtype == array.dtype
            assert np.array_equal(back.arrays[group][name], array)
    assert back.nbytes == payload.nbytes == 6 * 4 + 8
    assert decode(Encoder()(Payload())) == Payload()


def test_one_encoder_turns_a_group_into_bytes_once():
    encoder, group = Encoder(), {"w": np.ones(3)}
    one, other = encoder(Payload({"model": group})), encoder(Payload({"model": group}, {"eta": 1.0}))
    assert one["model"] is other["model"]


def test_decoded_arrays_cannot_be_written():
    back = decode_arrays(encode_arrays({"a": np.ones(3)}))["a"]
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 2


def test_flowers_own_arrays_are_read_as_well():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    back = decode_arrays(ArrayRecord(module.state_dict()))
    for name, tensor in module.state_dict().items():
        assert torch.equal(to_tensor(back[name].copy()), tensor)
        assert back[name].shape == tuple(tensor.shape)


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (2, 2), STYPE, b"\0" * 12),
        Array("float32", (2, 2), STYPE, b""),
        Array("float32", (3,), STYPE, b"\0" * 5),
        Array("no-such-type", (1,), STYPE, b"\0"),
        Array("object", (1,), STYPE, b"\0" * 8),
        Array("float32", (1,), "pickle", b"\0" * 4),
        Array("float32", (1,), "numpy.ndarray", b""),
        Array("float32", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00"),
        Array("float32", (1,), "numpy.ndarray", b"\x80\x04K\x01."),
    ],
)
def test_bytes_that_are_no_such_array_are_refused(array):
    with pytest.raises(WireError, match="arrays cannot be read"):
        decode_arrays(ArrayRecord({"a": array}))


def test_check_names_the_first_array_that_is_wrong():
    spec = {"w": ((2, 3), "float32"), "n": ((), "int64")}
    good = {"w": np.ones((2, 3), np.float32), "n": np.array(1)}
    check(good, spec, "its model")
    for change, message in (
        ({"w": np.ones((3, 2), np.float32)}, r"its model: w is float32\[3, 2\], expected float32\[2, 3\]"),
        ({"w": np.ones((2, 3))}, r"w is float64\[2, 3\], expected float32\[2, 3\]"),
        ({"n": np.array(1.0)}, r"n is float64\[\], expected int64\[\]"),
        ({"v": np.ones(1)}, r"missing \[\], unexpected \['v'\]"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, "w has values that are not finite"),
        ({"w": np.full((2, 3), -np.inf, np.float32)}, "w has values that are not finite"),
    ):
        with pytest.raises(WireError, match=message):
            check(good | change, spec, "its model")
    with pytest.raises(WireError, match=r"missing \['n'\]"):
        check({"w": good["w"]}, spec, "its model")
    check(good | {"v": np.ones(1)}, spec, "its model", exact=False)


def test_finite_values_whose_sum_is_not_are_finite():
    check({"w": np.full(4, 6e4, np.float16)}, {"w": ((4,), "float16")}, "its model")


def test_values_beyond_all_training_are_as_good_as_infinite():
    with pytest.raises(
        WireError, match=r"its model: w has values up to 3.0e\+30, beyond 1e\+09: has training diverged"
    ):
        check({"w": np.full(4, 3e30, np.float32)}, {"w": ((4,), "float32")}, "its model")


def test_only_floating_arrays_are_cast():
    tensors = {"w": torch.ones(2), "n": torch.tensor(3), "half": torch.ones(1, dtype=torch.float16)}
    assert {name: array.dtype.name for name, array in to_arrays(tensors, "float16").items()} == {
        "w": "float16",
        "n": "int64",
        "half": "float16",
    }
    own = to_arrays(tensors)
    assert cast(own, "float32")["w"] is own["w"]


@pytest.mark.parametrize("name", ["values", "metrics", "report", "request"])
def test_a_group_of_arrays_cannot_take_the_place_of_another_record(name):
    with pytest.raises(ValueError, match=f"cannot be called {name}"):
        Encoder()(Payload({name: {"w": np.ones(2)}}))
