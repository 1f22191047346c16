import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fedhet.errors import FedhetError
from fedhet.flower.messages import STYPE, Encoder, decode, decode_arrays, encode_arrays
from fedhet.messages import Payload, WireError, to_tensor

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


def test_non_contiguous_arrays_round_trip():
    array = np.arange(12.0).reshape(3, 4).T[::2]
    assert np.array_equal(decode_arrays(encode_arrays({"a": array}))["a"], array)


def test_payloads_round_trip():
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
        Array("float32", (2**40, 0), STYPE, b""),
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
    with pytest.raises(WireError, match="array 'a' cannot be read"):
        decode_arrays(ArrayRecord({"a": array}))


@pytest.mark.parametrize("name", ["values", "metrics", "report", "request"])
def test_reserved_names_are_refused(name):
    with pytest.raises(ValueError, match=f"rename the arrays {name}"):
        Encoder()(Payload({name: {"w": np.ones(2)}}))


@pytest.mark.parametrize("group", [np.ones(2), {"a": torch.ones(2)}])
def test_a_group_that_is_no_dict_of_arrays_is_named(group):
    with pytest.raises(FedhetError, match=r"arrays\['temperature'\] of a payload must be a dict of NumPy arrays"):
        Encoder()(Payload({"temperature": group}))
