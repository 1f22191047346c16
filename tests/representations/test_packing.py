"""Descriptors as arrays to send: what rounding costs, and what cannot be read."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhet.algorithms.alignment.targets import pack, pack_all, unpack, unpack_all


def descriptors(count: int = 40) -> Tensor:
    """Activations as they are: mostly small, some large, each image of its own scale."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 300, generator=generator).relu() * torch.logspace(-3, 5, count)[:, None]


def test_several_parts() -> None:
    values, features = descriptors(), torch.randn(40, 5)
    group = pack_all([values, features, values[:, :7]])
    assert all(name.split("/")[0] in "012" for name in group)
    found = unpack_all(group, 3)
    for mine, expected in zip(found, (values, features, values[:, :7]), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2**-11, atol=2**-11 * float(expected.max()) * 2**-13)


VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "bool")
ARRAYS = st.builds(
    lambda shape, dtype, value: np.full(shape, value).astype(dtype),
    st.sampled_from([(), (0,), (1,), (6,), (27,), (6, 0), (0, 4), (6, 2), (6, 4), (2, 3, 4)]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1.0, -1.0, 3.0, 113.0, 127.0, -163.0, 6e4]),
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.integers(0, 9), ARRAYS, min_size=1, max_size=3))
def test_random_arrays(changes: dict[int, np.ndarray[Any, Any]]) -> None:
    packed = pack(VALUES)
    names = [*packed, "more"]
    try:
        found = unpack(packed | {names[pick % len(names)]: array for pick, array in changes.items()})
    except ValueError:
        return
    assert found.dtype == torch.float32
    assert found.ndim == 2
    assert found.isfinite().all()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.floats(-44, 5))
def test_exponents(power: float) -> None:
    """The smallest number that float32 has, and the largest that may be sent."""
    values = (VALUES * torch.tensor(10.0, dtype=torch.float64) ** power).float()
    unpack(pack(values))
