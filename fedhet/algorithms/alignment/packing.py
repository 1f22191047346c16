"""Conversion of alignment targets to float16 arrays for messages, scaled by a power of two.

Unpacking raises a ValueError that names an array that is missing, unexpected or not valid.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import check_features
from fedhet.errors import ModelError

DTYPES = {"values": "float16", "exponent": "int16"}
"""The arrays of packed values, and their dtypes."""

Packed = dict[str, np.ndarray[Any, Any]]

EXPONENTS = (-163, 113)
"""The exponents that scale the smallest and the largest float32 numbers to near the largest float16 number."""

LARGEST = 1e6
"""Largest magnitude of features: CKA squares their inner products in float32, which could overflow."""


def check_finite_features(features: Tensor, name: str) -> None:
    """Raise a ValueError unless features are (n, d), and a ModelError unless they are finite and at most `LARGEST`."""
    largest = float(check_features(features, name).abs().max())
    if not largest <= LARGEST:
        raise ModelError(f"{name} must be finite and at most {LARGEST:.0e}, got {largest:.1e}: has training diverged?")


def pack(values: Tensor) -> Packed:
    """Pack values (n, d) as float16 `values` and a scalar int16 `exponent`, which mean `values` * 2^`exponent`."""
    array = values.detach().cpu().float().numpy()
    largest = float(np.abs(array).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest > 0 else 0  # which uses the range of float16 best
    return {"values": np.ldexp(array, -exponent).astype(DTYPES["values"]), "exponent": np.array(exponent, np.int16)}


def unpack(packed: Packed) -> Tensor:
    """Return the values that `pack` packed, in float32; raise a ValueError if `packed` is not valid."""
    if (dtypes := {name: array.dtype.name for name, array in packed.items()}) != DTYPES:
        raise ValueError(f"a packed target must have the arrays {DTYPES}, got {str(dtypes)[:200]}")
    values, exponent, (least, most) = packed["values"], packed["exponent"], EXPONENTS
    if exponent.shape != () or not least <= int(exponent) <= most:
        shown = int(exponent) if exponent.shape == () else f"an array of shape {exponent.shape}"
        raise ValueError(f"a packed target's exponent must be a number from {least} to {most}, got {shown}")
    with np.errstate(over="ignore"):  # infinities are refused below
        unpacked = torch.from_numpy(np.asarray(np.ldexp(values.astype(np.float32), int(exponent))))
    check_finite_features(unpacked, "packed values")
    return unpacked


def pack_all(parts: Sequence[Tensor]) -> Packed:
    """Pack several tensors in one dict, with the keys of `pack` prefixed by the tensor's index (`0/values`)."""
    return {f"{place}/{key}": array for place, part in enumerate(parts) for key, array in pack(part).items()}


def unpack_all(group: Packed, count: int) -> list[Tensor]:
    """Return the `count` tensors that `pack_all` packed, in float32; raise a ValueError if `group` is not valid."""
    parts: dict[str, Packed] = {str(place): {} for place in range(count)}
    for name, array in group.items():
        place, _, key = name.partition("/")
        if place not in parts:
            raise ValueError(f"names of packed arrays must start with 0/ to {count - 1}/, got {name[:50]!r}")
        parts[place][key] = array
    return [unpack(part) for part in parts.values()]
