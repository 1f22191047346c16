"""Conversion of alignment targets to float16 arrays for messages, scaled by a power of two.

Unpacking accepts only the results of packing. It raises a ValueError that names an array that is missing, unexpected or
not finite, or that has a wrong dtype or shape.
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
"""The exponents that scale the smallest and the largest float32 numbers to near the largest float16 number."""

LARGEST = 1e6
"""Largest magnitude of received features: CKA squares their inner products in float32, which could overflow."""


def check_finite_features(features: Tensor, name: str) -> None:
    """Raise a ValueError unless features are (n, d), and a ModelError unless they are finite."""
    if not torch.isfinite(check_features(features, name)).all():
        raise ModelError(f"{name} must be finite, got NaN or infinity: has training diverged?")


def check_received_features(features: Tensor, name: str) -> None:
    """Check received features: raise a ValueError if not (n, d) or above `LARGEST`, a ModelError if not finite."""
    check_finite_features(features, name)
    if features.numel() and float(largest := features.abs().max()) > LARGEST:
        raise ValueError(f"{name} must not exceed {LARGEST:.0e}, got {largest:.1e}: has training diverged?")


def pack(values: Tensor) -> Packed:
    """Pack values (n, d) as `values` (float16) and `exponent` (int16 scalar): they are `values` * 2^`exponent`."""
    scaled, exponent = _scaled(values.detach().cpu().float().numpy())
    return {"values": scaled, "exponent": exponent}


def unpack(packed: Packed) -> Tensor:
    """Return the values that `pack` packed, in float32; raise a ValueError if `packed` is not valid."""
    values, exponent = _arrays(packed, values=DTYPE, exponent="int16")
    unpacked = torch.from_numpy(_unscaled(values, exponent))
    check_finite_features(unpacked, "packed values")
    return unpacked


def pack_blocks(kernels: Sequence[Tensor]) -> Packed:
    """Pack symmetric diagonal blocks (b_i, b_i) as the arrays `triangles`, `sizes` and `exponent`.

    `triangles` (float16) has the upper triangles in row-major order, divided by 2^`exponent`; `sizes` (int32) has the
    b_i.
    """
    upper = [kernel.detach().cpu().float().numpy()[np.triu_indices(len(kernel))] for kernel in kernels]
    triangles, exponent = _scaled(np.concatenate(upper))
    sizes = np.array([len(kernel) for kernel in kernels], np.int32)
    return {"triangles": triangles, "sizes": sizes, "exponent": exponent}


def unpack_blocks(packed: Packed) -> list[Tensor]:
    """Return the blocks that `pack_blocks` packed, in float32; raise a ValueError if `packed` is not valid."""
    triangles, sizes, exponent = _arrays(packed, triangles=DTYPE, sizes="int32", exponent="int16")
    sizes = sizes.astype(np.int64)
    if triangles.ndim != 1 or sizes.ndim != 1 or sizes.min(initial=1) < 1 or len(sizes) > len(triangles):
        raise ValueError(
            f"arrays of packed blocks do not fit: triangles has shape {triangles.shape}, and sizes {sizes.shape}; both "
            "must be vectors, and sizes positive"
        )
    lengths = sizes * (sizes + 1) // 2
    if (total := lengths.sum(dtype=float)) != len(triangles):
        raise ValueError(
            f"triangles of packed blocks of {sizes[:9].tolist()} rows must have {total:g} entries, got {len(triangles)}"
        )
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
    """Pack several tensors in one dict, with the keys of `pack` prefixed by the tensor's index (`0/values`)."""
    return {f"{place}/{key}": array for place, part in enumerate(parts) for key, array in pack(part).items()}


def unpack_all(group: Packed, count: int) -> list[Tensor]:
    """Return the `count` tensors that `pack_all` packed, in float32; raise a ValueError if `group` is not valid."""
    parts: dict[str, Packed] = {str(place): {} for place in range(count)}
    for name, array in group.items():
        place, _, key = name.partition("/")
        if place not in parts:
            raise ValueError(f"expected {count} packed parts (0/..., 1/..., ...), got the array {name[:50]!r}")
        parts[place][key] = array
    return [unpack(part) for part in parts.values()]


def _scaled(values: npt.NDArray[np.float32]) -> tuple[Array, Array]:
    """Return `values` / 2^exponent in float16, and the exponent that uses the range of float16 best."""
    largest = float(np.abs(values).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest > 0 else 0
    return np.ldexp(values, -exponent).astype(DTYPE), np.array(exponent, np.int16)


def _unscaled(values: Array, exponent: Array) -> npt.NDArray[np.float32]:
    least, most = EXPONENTS
    if exponent.shape != () or not least <= int(exponent) <= most:
        shown = int(exponent) if exponent.shape == () else f"an array of shape {exponent.shape}"
        raise ValueError(f"a packed target's exponent must be a number from {least} to {most}, got {shown}")
    with np.errstate(over="ignore"):  # callers check for infinities
        return np.asarray(np.ldexp(values.astype(np.float32), int(exponent)))


def _arrays(packed: Packed, **dtypes: str) -> list[Array]:
    if wrong := sorted(packed.keys() - dtypes.keys()):
        raise ValueError(f"a packed target must have the arrays {', '.join(dtypes)}, got the array {wrong[0][:50]!r}")
    for key, dtype in dtypes.items():
        value = packed.get(key)
        if not isinstance(value, np.ndarray):
            raise ValueError(f"a packed target needs an array {key!r}, got {type(value).__name__}")
        if value.dtype != dtype:
            raise ValueError(f"a packed target's array {key!r} must have dtype {dtype}, got {value.dtype}")
    return [packed[key] for key in dtypes]
