"""Descriptors as arrays to send: what rounding costs, and what cannot be read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhet.algorithms.alignment.packing import Packed, pack, pack_all, pack_blocks, unpack, unpack_all, unpack_blocks


def descriptors(count: int = 40) -> Tensor:
    """Activations as they are: mostly small, some large, each image of its own scale."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 300, generator=generator).relu() * torch.logspace(-3, 6, count)[:, None]


def test_several_parts() -> None:
    values, features = descriptors(), torch.randn(40, 5)
    group = pack_all([values, features, values[:, :7]])
    assert all(name.split("/")[0] in "012" for name in group)
    found = unpack_all(group, 3)
    for mine, expected in zip(found, (values, features, values[:, :7]), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2**-11, atol=2**-11 * float(expected.max()) * 2**-13)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"0/values": None}, "needs an array 'values'"),
        ({"0/exponent": None}, "needs an array 'exponent'"),
        ({"0/values": np.full((3, 4), np.nan, np.float16)}, "must be finite"),
        ({"0/values": np.zeros((3, 4), np.int8)}, "must have dtype float16, got int8"),
        ({"0/values": np.zeros((3, 4), bool)}, "must have dtype float16, got bool"),
        ({"0/values": np.zeros(3, np.float16)}, "must be"),
        ({"2/values": np.zeros((3, 4), np.float16)}, "got the array '2/values'"),
        ({"rows": np.zeros((3, 4), np.float16)}, "got the array 'rows'"),
    ],
)
def test_unreadable_arrays(change: dict[str, object], why: str) -> None:
    group = pack_all([torch.ones(3, 4), torch.ones(3, 2)]) | change
    with pytest.raises(ValueError, match=why):
        unpack_all({name: array for name, array in group.items() if array is not None}, 2)  # type: ignore[misc]


VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
KERNELS = [VALUES @ VALUES.T, VALUES[:3] @ VALUES[:3].T]
FORMATS: dict[str, tuple[Packed, Callable[..., Any]]] = {
    "values": (pack(VALUES), unpack),
    "blocks": (pack_blocks(KERNELS), unpack_blocks),
}
"""Packed forms, and the functions that read them."""


@pytest.mark.parametrize("what", FORMATS)
def test_unexpected_arrays(what: str) -> None:
    """None of another dtype, and none too many."""
    packed, read = FORMATS[what]
    read(packed)
    for key, array in packed.items():
        for other in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "bool"):
            if other != array.dtype:
                with pytest.raises(ValueError, match="must have dtype"):
                    read(packed | {key: array.astype(other)})
    with pytest.raises(ValueError, match="got 'more'"):
        read(packed | {"more": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("what", "key", "value", "why"),
    [
        ("values", "exponent", np.array(114, np.int16), "exponent must be a number from -163 to 113, got 114"),
        ("values", "exponent", np.array(-164, np.int16), "must be a number from -163 to 113"),
        ("values", "exponent", np.array([1], np.int16), r"got an array of shape \(1,\)"),
        ("values", "exponent", np.array(1e308), "'exponent' must have dtype int16, got float64"),
        ("blocks", "sizes", np.array([7, -6], np.int32), "do not fit"),
        ("blocks", "sizes", np.array([[6], [3]], np.int32), "do not fit"),
        ("blocks", "sizes", np.full(27, 0, np.int32), "do not fit"),
        ("blocks", "sizes", np.array([2**31 - 1, 2**31 - 1], np.int32), "entries, got 27"),
    ],
)
def test_numbers_beyond_float16(what: str, key: str, value: Any, why: str) -> None:
    packed, read = FORMATS[what]
    with pytest.raises(ValueError, match=why):
        read(packed | {key: value})


DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool")
ARRAYS = st.builds(
    lambda shape, dtype, value: np.full(shape, value).astype(dtype),
    st.sampled_from([(), (0,), (1,), (6,), (27,), (6, 0), (0, 4), (6, 2), (6, 4), (2, 3, 4)]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1.0, -1.0, 3.0, 113.0, 127.0, -163.0, 6e4]),
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(st.integers(0, 9), ARRAYS, min_size=1, max_size=3))
def test_random_arrays(what: str, changes: dict[int, np.ndarray[Any, Any]]) -> None:
    packed, read = FORMATS[what]
    names = [*packed, "more"]
    try:
        found = read(packed | {names[pick % len(names)]: array for pick, array in changes.items()})
    except ValueError:
        return
    tensors = found if isinstance(found, list) else [found]
    for tensor in tensors:
        assert tensor.dtype == torch.float32
        assert tensor.ndim == 2
        assert tensor.isfinite().all()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.floats(-44, 37))
def test_exponents(power: float) -> None:
    """The smallest and the largest numbers that float32 has."""
    values = (VALUES * torch.tensor(10.0, dtype=torch.float64) ** power).float()
    unpack(pack(values))
