"""Pack targets as arrays to send: float16 in units of one power of two.

Unpacking accepts only what packing makes: a ValueError names an array that is missing, unexpected, of another dtype,
of a shape that does not fit, or not finite.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import check_features
from fedhet.errors import ModelError

DTYPE = "float16"
"""Floating dtype of packed values."""

Array = npt.NDArray[Any]
Packed = dict[str, Array]


EXPONENTS = (-163, 113)
"""The exponents that scale the smallest and the largest float32 numbers to near float16's largest."""

LARGEST = 1e6
"""Features beyond this are as good as infinite: CKA squares their inner products, in float32."""


def check_finite_features(features: Tensor, name: str) -> None:
    """Raise a ValueError unless features are (n, d), and a ModelError unless they are finite."""
    if not torch.isfinite(check_features(features, name)).all():
        raise ModelError(f"{name} must be finite, got NaN or infinity: has training diverged?")


def check_received_features(features: Tensor, name: str) -> None:
    """Raise a ValueError unless received features are (n, d), finite and no larger than `LARGEST`."""
    check_finite_features(features, name)
    if features.numel() and float(largest := features.abs().max()) > LARGEST:
        raise ValueError(f"{name} must be of numbers up to {LARGEST:.0e}, got {largest:.1e}: has training diverged?")


def pack(values: Tensor) -> Packed:
    """Pack values (n, d): `values` is float16, in units of 2^`exponent`, which is int16 and 0-d."""
    scaled, exponent = _scaled(values.detach().cpu().float().numpy())
    return {"values": scaled, "exponent": exponent}


def unpack(packed: Packed) -> Tensor:
    """Return the values that `pack` packed, in float32; raises a ValueError for anything else."""
    values, exponent = _arrays(packed, values=DTYPE, exponent="int16")
    unpacked = torch.from_numpy(_unscaled(values, exponent))
    check_finite_features(unpacked, "packed values")
    return unpacked


def pack_blocks(kernels: Sequence[Tensor]) -> Packed:
    """Pack symmetric diagonal blocks (b_i, b_i).

    `triangles` is float16, the upper triangles row by row, one after the other, in units of 2^`exponent`, int16, 0-d;
    `sizes` int32, the b_i.
    """
    upper = [kernel.detach().cpu().float().numpy()[np.triu_indices(len(kernel))] for kernel in kernels]
    triangles, exponent = _scaled(np.concatenate(upper))
    sizes = np.array([len(kernel) for kernel in kernels], np.int32)
    return {"triangles": triangles, "sizes": sizes, "exponent": exponent}


def unpack_blocks(packed: Packed) -> list[Tensor]:
    """Return the blocks that `pack_blocks` packed, in float32; raises a ValueError for anything else."""
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


def pack_all(parts: Sequence[Tensor]) -> Packed:
    """Pack several parts as one group of arrays, in their order."""
    return {f"{place}/{key}": array for place, part in enumerate(parts) for key, array in pack(part).items()}


def unpack_all(group: Packed, count: int) -> list[Tensor]:
    """Return the `count` parts that `pack_all` packed, in float32; raises a ValueError for anything else."""
    parts: dict[str, Packed] = {str(place): {} for place in range(count)}
    for name, array in group.items():
        place, _, key = name.partition("/")
        if place not in parts:
            raise ValueError(f"there must be {count} packed parts, and {name[:50]!r} is of none of them")
        parts[place][key] = array
    return [unpack(part) for part in parts.values()]


def _scaled(values: npt.NDArray[np.float32]) -> tuple[Array, Array]:
    """Return `values` / 2^exponent and the exponent, which scales the largest value to near float16's largest."""
    largest = float(np.abs(values).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest > 0 else 0
    return np.ldexp(values, -exponent).astype(DTYPE), np.array(exponent, np.int16)


def _unscaled(values: Array, exponent: Array) -> npt.NDArray[np.float32]:
    """Undo `_scaled`; raises a ValueError for an exponent that it cannot have returned."""
    least, most = EXPONENTS
    if exponent.shape != () or not least <= int(exponent) <= most:
        shown = int(exponent) if exponent.shape == () else f"of shape {exponent.shape}"
        raise ValueError(f"a packed target's exponent is {shown}, must be a number from {least} to {most}")
    with np.errstate(over="ignore"):  # callers check for infinities
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
