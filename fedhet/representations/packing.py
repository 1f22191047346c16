"""Targets as arrays to send: float16 scaled by one power of two, int8 for columns that matter little.

What is unpacked must be exactly what packing makes: a ValueError says which array is missing or one too many, is of
another dtype, does not fit the others or is not finite.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedhet.errors import ModelError
from fedhet.representations.cka import check_features

DTYPE = "float16"
"""Of what does not travel in one byte."""

Array = npt.NDArray[Any]
Packed = dict[str, Array]


@dataclass(frozen=True)
class Factor:
    """Vectors of the same examples; of centred features a factor of their kernel, values @ values.T.

    Attributes:
        values: `(L, r)`.
        coarse: how many of the last columns travel in one byte an entry.
        error: relative error of the gradient of 1 - CKA that cutting the rank is estimated to cause.
    """

    values: Tensor
    coarse: int = 0
    error: float = 0.0


def column_steps(columns: Tensor) -> Tensor:
    """The step of each column's one-byte rounding, (r,), positive: its largest entry is 127 steps."""
    return columns.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny) / 127


EXPONENTS = (-163, 113)
"""Those by which float32 numbers, the smallest and the largest, come near float16's largest."""

LARGEST = 1e6
"""Features beyond this are as good as infinite: CKA squares their inner products, in float32."""


def check_finite_features(features: Tensor, name: str) -> None:
    """Raise a ValueError (a ModelError of values) unless features are (n, d) and finite."""
    if not torch.isfinite(check_features(features, name)).all():
        raise ModelError(f"{name} must be finite, got NaN or infinity: has training diverged?")


def check_received_features(features: Tensor, name: str) -> None:
    """Raise a ValueError unless what somebody else sent is (n, d), finite and no larger than `LARGEST`."""
    check_finite_features(features, name)
    if features.numel() and float(largest := features.abs().max()) > LARGEST:
        raise ValueError(f"{name} must be of numbers up to {LARGEST:.0e}, got {largest:.1e}: has training diverged?")


def pack(factor: Factor) -> Packed:
    """A factor as arrays to send.

    `fine` is float16 `(L, r - coarse)`, in units of 2^`exponent`; `coarse` int8 `(L, coarse)`, in units of `steps`,
    float32 `(coarse,)`; `exponent` int16, 0-d.
    """
    values = factor.values.detach().cpu().float()
    head, tail = values.tensor_split([values.shape[1] - factor.coarse], 1)
    fine, exponent = _scaled(head.numpy())
    steps = column_steps(tail) if factor.coarse else tail.new_zeros(0)
    return {
        "fine": fine,
        "coarse": (tail / steps).round().to(torch.int8).numpy(),
        "steps": steps.numpy(),
        "exponent": exponent,
    }


def unpack(packed: Packed) -> Factor:
    """The factor that `pack` made these of, in float32; or a ValueError."""
    fine, coarse, steps, exponent = _arrays(packed, fine=DTYPE, coarse="int8", steps="float32", exponent="int16")
    if not (np.isfinite(steps) & (steps > 0)).all():
        raise ValueError("a packed target's steps must be positive and finite")
    if fine.ndim != 2 or coarse.ndim != 2 or len(fine) != len(coarse) or steps.shape != coarse.shape[1:]:
        raise ValueError(f"a packed factor's arrays do not fit: {fine.shape}, {coarse.shape} and {steps.shape}")
    values = np.concatenate([_unscaled(fine, exponent), coarse.astype(np.float32) * steps], 1)
    check_finite_features(torch.from_numpy(values), "a packed factor")
    return Factor(torch.from_numpy(values), coarse.shape[1])


def pack_blocks(kernels: Sequence[Tensor]) -> Packed:
    """Symmetric diagonal blocks `(b_i, b_i)` as arrays to send.

    `triangles` is float16, the upper triangles row by row, one after the other, in units of 2^`exponent`, int16, 0-d;
    `sizes` int32, the b_i.
    """
    upper = [kernel.detach().cpu().float().numpy()[np.triu_indices(len(kernel))] for kernel in kernels]
    triangles, exponent = _scaled(np.concatenate(upper))
    sizes = np.array([len(kernel) for kernel in kernels], np.int32)
    return {"triangles": triangles, "sizes": sizes, "exponent": exponent}


def unpack_blocks(packed: Packed) -> list[Tensor]:
    """The blocks that `pack_blocks` made these of, in float32; or a ValueError."""
    triangles, sizes, exponent = _arrays(packed, triangles=DTYPE, sizes="int32", exponent="int16")
    sizes = sizes.astype(np.int64)
    if triangles.ndim != 1 or sizes.ndim != 1 or sizes.min(initial=1) < 1 or len(sizes) > len(triangles):
        raise ValueError(f"packed blocks do not fit: triangles of shape {triangles.shape} and sizes {sizes.shape}")
    lengths = sizes * (sizes + 1) // 2
    if (total := lengths.sum(dtype=float)) != len(triangles):
        raise ValueError(f"packed blocks of {sizes[:9].tolist()} rows need {total:g} entries, got {len(triangles)}")
    values = _unscaled(triangles, exponent)
    if not np.isfinite(values).all():
        raise ValueError("packed blocks must be finite, got NaN or infinity")
    kernels = []
    for size, part in zip(sizes.tolist(), np.split(values, lengths.cumsum()[:-1]), strict=True):
        kernel = np.zeros((size, size), np.float32)
        kernel[np.triu_indices(size)] = part
        kernels.append(torch.from_numpy(kernel + np.triu(kernel, 1).T))
    return kernels


def pack_all(parts: Sequence[Factor]) -> Packed:
    """Factors as one group of arrays, in their order."""
    return {f"{place}/{key}": array for place, part in enumerate(parts) for key, array in pack(part).items()}


def unpack_all(group: Packed, count: int) -> list[Tensor]:
    """The values of the `count` factors that `pack_all` made these of, in float32; or a ValueError."""
    parts: dict[str, Packed] = {str(place): {} for place in range(count)}
    for name, array in group.items():
        place, _, key = name.partition("/")
        if place not in parts:
            raise ValueError(f"there must be {count} packed parts, and {name[:50]!r} is of none of them")
        parts[place][key] = array
    return [unpack(part).values for part in parts.values()]


def _scaled(values: npt.NDArray[np.float32]) -> tuple[Array, Array]:
    """`values` / 2^exponent, and the exponent that puts the largest near float16's largest, int16, 0-d."""
    largest = float(np.abs(values).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest > 0 else 0
    return np.ldexp(values, -exponent).astype(DTYPE), np.array(exponent, np.int16)


def _unscaled(values: Array, exponent: Array) -> npt.NDArray[np.float32]:
    """Undo `_scaled`; an exponent that it cannot have given is an error."""
    least, most = EXPONENTS
    if exponent.shape != () or not least <= int(exponent) <= most:
        shown = int(exponent) if exponent.shape == () else f"of shape {exponent.shape}"
        raise ValueError(f"a packed target's exponent is {shown}, must be a number from {least} to {most}")
    with np.errstate(over="ignore"):  # what overflows is found by who looks for infinities
        return np.asarray(np.ldexp(values.astype(np.float32), int(exponent)))


def _arrays(packed: Packed, **dtypes: str) -> list[Array]:
    """Return the arrays of these names, after a check of names and dtypes."""
    if wrong := sorted(packed.keys() - dtypes.keys()):
        raise ValueError(f"a packed target has the arrays {', '.join(dtypes)}, and not {wrong[0][:50]!r}")
    for key, dtype in dtypes.items():
        value = packed.get(key)
        if not isinstance(value, np.ndarray):
            raise ValueError(f"a packed target needs an array {key!r}, got {type(value).__name__}")
        if value.dtype != dtype:
            raise ValueError(f"a packed target's {key!r} cannot be of dtype {value.dtype}, only of {dtype}")
    return [packed[key] for key in dtypes]
