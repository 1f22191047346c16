"""Payloads (named groups of arrays, and plain values), and checks of names, shapes and dtypes of arrays.

`fedhet.flower.messages` converts payloads to records of Flower messages and back.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedhet.errors import FedhetError, ModelError
from fedhet.tasks import LARGEST

Arrays = dict[str, np.ndarray[Any, Any]]
_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
DTYPES = {name: np.dtype(name) for name in _NAMES.split()}
"""Dtypes of arrays that can be sent, by name, in this machine's byte order."""

Spec = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every array of a group, by name."""


class WireError(FedhetError):
    """A received message is invalid."""


@dataclass
class Payload:
    """The contents of one message: groups of named arrays, and plain values (text, bytes, numbers, flat lists)."""

    arrays: dict[str, Arrays] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the payload's arrays, by which traffic is measured."""
        return sum(array.nbytes for group in self.arrays.values() for array in group.values())


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Convert tensors to NumPy arrays, without a copy if possible; bfloat16, which NumPy lacks, becomes float32."""
    there = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return {name: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for name, each in there.items()}


def by_position(arrays: Arrays, names: Collection[str]) -> Arrays:
    """Rename arrays to `names`, in order, if they are named `0`, `1`, ..., as Flower names the arrays of a list."""
    listed = [*arrays] == [str(place) for place in range(len(names))]
    return dict(zip(names, arrays.values(), strict=True)) if listed else arrays


def to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with a copy of an array."""
    return torch.from_numpy(np.array(array))


def check(arrays: Arrays, expected: Spec, group: str) -> None:
    """Raise a WireError unless arrays have the expected names, shapes and dtypes, and finite values.

    The message names the `group` ("the client's model"), the first wrong array and what is expected.
    """
    missing, extra = expected.keys() - arrays.keys(), arrays.keys() - expected.keys()
    if missing or extra:
        raise WireError(f"{group}: missing arrays {sorted(missing)[:3]}, unexpected arrays {sorted(extra)[:3]}")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != tuple(shape) or array.dtype != DTYPES[dtype]:
            raise WireError(f"{group}: {name} is {array.dtype.name}{list(array.shape)}, not {dtype}{list(shape)}")
    check_finite(arrays, group)


def check_finite(arrays: Arrays, group: str) -> None:
    """Raise a WireError if an array has NaN, infinity, or a number beyond `LARGEST`; `group` names the arrays."""
    with np.errstate(over="ignore", invalid="ignore"):
        for name, array in arrays.items():
            # A small sum of squares means that all values are small; otherwise each value is checked.
            if array.dtype.kind == "f" and array.size and not float(np.vdot(array, array)) <= LARGEST:
                largest = float(np.abs(array).max())
                if not math.isfinite(largest):
                    raise WireError(f"{group}: {name} has values that are not finite: has training diverged?")
                if largest > LARGEST:
                    raise WireError(
                        f"{group}: {name} has values up to {largest:.1e}, beyond {LARGEST:.0e}: has training diverged?"
                    )


def bytes_of(spec: Spec) -> int:
    """Return the number of bytes of arrays with the given shapes and dtypes."""
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in spec.values())


def spec_of(tensors: Mapping[str, torch.Tensor]) -> Spec:
    """Return the shapes and dtypes with which tensors are sent; raise a ModelError for a dtype such as complex64."""
    spec = {}
    for name, tensor in tensors.items():
        dtype = "float32" if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelError(f"{name} has dtype {dtype}, which cannot be shared: cast it to one of {', '.join(DTYPES)}")
        spec[name] = (tuple(tensor.shape), dtype)
    return spec


def as_declared(arrays: Mapping[str, Any], specs: Iterable[Spec]) -> Arrays:
    """Cast arrays to the dtypes in clients' `specs`, rounding to integers; raise a WireError for text or objects."""
    dtypes = {name: DTYPES[dtype] for spec in specs for name, (_, dtype) in spec.items()}
    declared = {}
    for name, each in arrays.items():
        array = np.asarray(each)
        if (dtype := dtypes.get(name, array.dtype)) != array.dtype:
            if array.dtype.kind not in "biuf":
                raise WireError(
                    f"the aggregated {name} has dtype {array.dtype.name}, which cannot be cast to the clients' "
                    f"{dtype.name}: aggregate numbers only"
                )
            array = np.asarray(np.rint(array) if dtype.kind in "iu" else array, dtype)
        declared[name] = array
    return declared


def difference(spec: Spec, other: Spec) -> str:
    """Describe the first difference between a model's arrays and another's, such as "it lacks fc.bias"."""
    name = next((name for name in [*spec, *other] if spec.get(name) != other.get(name)), None)
    if name is None:
        return "its arrays are in another order"
    if name not in spec or name not in other:
        return f"it lacks {name}" if name not in spec else f"it alone has {name}"
    (shape, dtype), (other_shape, other_dtype) = spec[name], other[name]
    if shape == other_shape:
        return f"its {name} is {dtype}, not {other_dtype}"
    return f"its {name} has shape {list(shape)}, not {list(other_shape)}"


def load_into(tensors: Mapping[str, torch.Tensor], arrays: Arrays) -> None:
    """Copy arrays into a model's state dict in place; raise a ModelError if a name or shape differs."""
    for name, array in arrays.items():
        if name not in tensors or tuple(tensors[name].shape) != array.shape:
            expected = list(tensors[name].shape) if name in tensors else "no such tensor"
            raise ModelError(
                f"{name} was received with shape {list(array.shape)}, but the model has {expected}: use the run's model"
            )
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(array))
