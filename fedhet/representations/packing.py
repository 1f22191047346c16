"""Targets as arrays to send: float16 scaled by one power of two, int8 for columns that matter little."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedhet.representations.cka import check_features

WireDtype = Literal["float16", "float32"]
RowDtype = Literal["float16", "float32", "int8"]
Packed = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Factor:
    """A kernel K = values @ values.T of centred features.

    Attributes:
        values: `(L, r)`, columns in falling order of their weight unless `whole`.
        coarse: how many of the last columns may travel in one byte an entry.
        error: relative error of the gradient of 1 - CKA that cutting the rank is estimated to cause.
        whole: whether these are the features themselves, since no lower rank was good enough.
    """

    values: Tensor
    coarse: int = 0
    error: float = 0.0
    whole: bool = True


def column_steps(columns: Tensor) -> Tensor:
    """The step of each column's one-byte rounding, (r,), positive: its largest entry is 127 steps."""
    return columns.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny) / 127


LARGEST = 1e6
"""Features beyond this are as good as infinite: CKA squares their inner products, in float32."""


def check_finite_features(features: Tensor, name: str) -> None:
    """Check that features are (n, d) and finite.

    Raises:
        ValueError: they are not.
    """
    if not torch.isfinite(check_features(features, name)).all():
        raise ValueError(f"{name} must be finite, got NaN or infinity")


def check_told_features(features: Tensor, name: str) -> None:
    """Check what somebody else told: (n, d), finite, and of a size that kernels can be made of (`LARGEST`).

    Raises:
        ValueError: it is not.
    """
    check_finite_features(features, name)
    if features.numel() and float(largest := features.abs().max()) > LARGEST:
        raise ValueError(f"{name} must be of numbers up to {LARGEST:.0e}, got {largest:.1e}: has training diverged?")


def pack(factor: Factor, dtype: WireDtype = "float16") -> Packed:
    """A factor as arrays to send.

    Args:
        factor: what to send.
        dtype: `"float32"` for all of it, or `"float16"`, scaled by one power of two, with `factor.coarse` columns in
            int8.

    Returns:
        `fine` `(L, r - coarse)`, in units of 2^`exponent`; `coarse` int8 `(L, coarse)`, in units of `steps` float32
        `(coarse,)`; `exponent` int16, 0-d.
    """
    values = factor.values.detach().cpu().float()
    coarse = factor.coarse if dtype == "float16" else 0
    head, tail = values.tensor_split([values.shape[1] - coarse], 1)
    fine, exponent = _scaled(head.numpy(), dtype)
    steps = column_steps(tail) if coarse else tail.new_zeros(0)
    return {
        "fine": fine,
        "coarse": (tail / steps).round().to(torch.int8).numpy(),
        "steps": steps.numpy(),
        "exponent": np.array(exponent, np.int16),
    }


def unpack(packed: Mapping[str, npt.NDArray[np.generic]]) -> Factor:
    """The factor that `pack` made these of, in float32, without what was known of how it came about.

    Raises:
        ValueError: if an entry is missing, the arrays do not fit together or are not finite.
    """
    fine, coarse, steps = (_array(packed, key, "f" if key != "coarse" else "i") for key in ("fine", "coarse", "steps"))
    if fine.ndim != 2 or coarse.ndim != 2 or len(fine) != len(coarse) or steps.shape != coarse.shape[1:]:
        raise ValueError(f"a packed factor's arrays do not fit: {fine.shape}, {coarse.shape} and {steps.shape}")
    values = np.concatenate(
        [_unscaled(fine, _number(packed, "exponent")), coarse.astype(np.float32) * steps.astype(np.float32)], 1
    )
    check_finite_features(torch.from_numpy(values), "a packed factor")
    return Factor(torch.from_numpy(values), coarse.shape[1])


def pack_blocks(kernels: Sequence[Tensor], dtype: WireDtype = "float16") -> Packed:
    """Symmetric diagonal blocks as arrays to send.

    Args:
        kernels: symmetric `(b_i, b_i)`.
        dtype: `"float16"`, scaled by one power of two, or `"float32"`.

    Returns:
        `triangles`, the upper triangles row by row, one after the other, in units of 2^`exponent`; `sizes` int32, the
        b_i; `exponent` int16, 0-d.
    """
    upper = [kernel.detach().cpu().float().numpy()[np.triu_indices(len(kernel))] for kernel in kernels]
    triangles, exponent = _scaled(np.concatenate(upper), dtype)
    sizes = np.array([len(kernel) for kernel in kernels], np.int32)
    return {"triangles": triangles, "sizes": sizes, "exponent": np.array(exponent, np.int16)}


def unpack_blocks(packed: Mapping[str, npt.NDArray[np.generic]]) -> list[Tensor]:
    """The blocks that `pack_blocks` made these of, in float32.

    Raises:
        ValueError: if an entry is missing, the arrays do not fit together or are not finite.
    """
    triangles, sizes = _array(packed, "triangles", "f"), _array(packed, "sizes", "i").astype(np.int64)
    lengths = sizes * (sizes + 1) // 2
    if triangles.ndim != 1 or lengths.sum() != len(triangles):
        raise ValueError(f"packed blocks of {sizes.tolist()} rows need {lengths.sum()} entries, got {triangles.shape}")
    values = _unscaled(triangles, _number(packed, "exponent"))
    if not np.isfinite(values).all():
        raise ValueError("packed blocks must be finite, got NaN or infinity")
    kernels = []
    for size, part in zip(sizes.tolist(), np.split(values, lengths.cumsum()[:-1]), strict=True):
        kernel = np.zeros((size, size), np.float32)
        kernel[np.triu_indices(size)] = part
        kernels.append(torch.from_numpy(kernel + np.triu(kernel, 1).T))
    return kernels


def pack_rows(values: Tensor, dtype: RowDtype = "float16") -> Packed:
    """Vectors of which only the directions matter, as arrays to send.

    Args:
        values: `(n, k)`, a vector an example.
        dtype: `"float32"`, `"float16"` scaled by one power of two, or `"int8"`.

    Returns:
        `rows` `(n, k)`; with it `exponent` int16, 0-d, whose power of two is the unit, or for int8 `steps` float32
        `(n,)`, the unit of each row, whose largest entry is 127 steps.
    """
    own = values.detach().cpu().float()
    if dtype == "int8":
        steps = column_steps(own.T)
        return {"rows": (own / steps[:, None]).round().to(torch.int8).numpy(), "steps": steps.numpy()}
    rows, exponent = _scaled(own.numpy(), dtype)
    return {"rows": rows, "exponent": np.array(exponent, np.int16)}


def unpack_rows(packed: Mapping[str, npt.NDArray[np.generic]]) -> Tensor:
    """The vectors that `pack_rows` made these of, `(n, k)` float32.

    Raises:
        ValueError: if an entry is missing, the arrays do not fit together or are not finite.
    """
    rows = _array(packed, "rows", "fi")
    if rows.dtype.kind == "f":
        found = torch.from_numpy(_unscaled(rows, _number(packed, "exponent")))
    else:
        steps = _array(packed, "steps", "f")
        if steps.shape != rows.shape[:1]:
            raise ValueError(f"packed rows do not fit: {rows.shape} with steps {steps.shape}")
        found = torch.from_numpy(rows.astype(np.float32) * steps.astype(np.float32)[:, None])
    check_finite_features(found, "packed rows")
    return found


def pack_all(parts: Sequence[Factor | Tensor], dtype: RowDtype = "float16") -> Packed:
    """Factors and vectors as one group of arrays, in their order; int8 is for vectors, factors are float16 then."""
    of_factors: WireDtype = "float16" if dtype == "int8" else dtype
    packed = [pack_rows(part, dtype) if isinstance(part, Tensor) else pack(part, of_factors) for part in parts]
    return {f"{place}/{key}": array for place, part in enumerate(packed) for key, array in part.items()}


def unpack_all(group: Mapping[str, npt.NDArray[np.generic]], count: int) -> list[Tensor]:
    """The values of the factors and vectors that `pack_all` made these of, in float32.

    Raises:
        ValueError: there are not as many as `count`, or one cannot be read.
    """
    parts: list[Packed] = [{} for _ in range(count)]
    for name, array in group.items():
        place, _, key = name.partition("/")
        if not place.isdecimal() or int(place) >= count:
            raise ValueError(f"there must be {count} packed parts, and {name!r} is of none of them")
        parts[int(place)][key] = array
    return [unpack(part).values if "fine" in part else unpack_rows(part) for part in parts]


def _scaled(values: npt.NDArray[np.float32], dtype: WireDtype) -> tuple[npt.NDArray[np.generic], int]:
    """`values` / 2^exponent in `dtype`, and the exponent that puts the largest near float16's largest."""
    if dtype == "float32":
        return np.ascontiguousarray(values), 0
    if dtype != "float16":
        raise ValueError(f"dtype must be 'float16' or 'float32', got {dtype!r}")
    largest = float(np.abs(values).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest > 0 else 0
    return np.ldexp(values, -exponent).astype(np.float16), exponent


def _unscaled(values: npt.NDArray[np.generic], exponent: float) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what overflows is found by who looks for infinities
        return np.ldexp(values.astype(np.float32), int(exponent))


def _array(packed: Mapping[str, npt.NDArray[np.generic]], key: str, kinds: str) -> npt.NDArray[np.generic]:
    """The array of this name, its dtype of one of these kinds (of `np.dtype.kind`)."""
    value = packed.get(key)
    if not isinstance(value, np.ndarray):
        raise ValueError(f"a packed target needs an array {key!r}, got {type(value).__name__}")
    if value.dtype.kind not in kinds:
        raise ValueError(f"a packed target's {key!r} cannot be of dtype {value.dtype}")
    return value


def _number(packed: Mapping[str, npt.NDArray[np.generic]], key: str) -> float:
    value = _array(packed, key, "fib")
    if value.shape != () or not np.isfinite(value):
        raise ValueError(f"a packed target needs a number {key!r}, got an array of shape {value.shape}")
    return float(value)
