"""The peers' target: exact when whole, small and good enough when compressed, the same after the wire."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhet.algorithms.alignment import targets
from fedhet.algorithms.alignment.cka import linear_cka
from fedhet.algorithms.alignment.targets import mean_target, pack, pack_all, unpack, unpack_all


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def peers(count: int, rows: int = 600, width: int = 24, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shared = normal(rows, 12, dtype=dtype)
    return [(shared @ normal(12, width, seed=1 + index, dtype=dtype)).relu() for index in range(count)]


def gradient(x: Tensor, factor: Tensor) -> Tensor:
    x = x.double().clone().requires_grad_()
    (result,) = torch.autograd.grad(1 - linear_cka(x, factor.double()), x)
    return result


def gram_gradient(x: Tensor, kernel: Tensor) -> Tensor:
    """Of 1 - CKA with the kernel `(L, L)`, both sides double-centred by matrix products."""
    x = x.double().clone().requires_grad_()
    (result,) = torch.autograd.grad(1 - plain_cka(x @ x.T, kernel), x)
    return result


def plain_cka(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    centre = torch.eye(len(k), dtype=k.dtype) - 1 / len(k)
    k, l = centre @ k @ centre, centre @ l @ centre  # noqa: E741
    return (k * l).sum() / (k.norm() * l.norm())


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def test_gradient_of_the_mean_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    *features, other = peers(4)
    features[1] *= 30
    kernel = torch.zeros(600, 600, dtype=torch.float64)
    for a in features:
        a = a - a.mean(0)
        kernel += a @ a.T / 3
    monkeypatch.setattr(targets, "ERROR", 0.0)
    target = mean_target(features)
    assert target.shape[1] == 72
    torch.testing.assert_close(target @ target.T, kernel)
    assert relative(gradient(other, target), gram_gradient(other, kernel)) < 1e-9


def test_error_of_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    *features, other = peers(7, dtype=torch.float32)
    exact = torch.cat([(a - a.mean(0)).double() / 6**0.5 for a in features], 1)
    ranks = []
    for error in (0.002, 0.02, 0.2):
        monkeypatch.setattr(targets, "ERROR", error)
        received = unpack(pack(mean_target(features))).double()
        ranks.append(received.shape[1])
        assert relative(received @ received.T, exact @ exact.T) <= error + 1e-4
        assert relative(gradient(other, received), gradient(other, exact)) <= 2 * error
    assert 6 * 24 > ranks[0] > ranks[1] > ranks[2]


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
