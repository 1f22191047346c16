"""Names, shapes and dtypes of a group of arrays, and arrays into a model by name."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedhet.errors import ModelError
from fedhet.wire.arrays import DTYPES, Arrays, as_read

Spec = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every array of a group, by name."""


def spec_of(tensors: Mapping[str, Tensor]) -> Spec:
    """Shape and dtype of every tensor, as it travels: bfloat16, which NumPy has not, as float32.

    Raises:
        ModelError: one is of a dtype that cannot travel, such as complex numbers.
    """
    return {name: (tuple(tensor.shape), _dtype(name, tensor)) for name, tensor in tensors.items()}


def _dtype(name: str, tensor: Tensor) -> str:
    dtype = "float32" if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"{name} is {dtype}, which cannot be shared: arrays must be of {', '.join(DTYPES)}")
    return dtype


def narrowed(spec: Spec, dtype: str) -> Spec:
    """The same with floating arrays in the dtype in which they travel."""
    return {name: (shape, dtype if np.dtype(own).kind == "f" else own) for name, (shape, own) in spec.items()}


def without_widths(spec: Spec) -> Spec:
    """The same with all sizes of axes 0: equal for models that differ in their widths only."""
    return {name: ((0,) * len(shape), dtype) for name, (shape, dtype) in spec.items()}


def difference(spec: Spec, other: Spec) -> str:
    """The first thing in which two models differ, in words; of models without widths the number of axes."""
    for name in [*spec, *other]:
        if spec.get(name) != other.get(name):
            own = "is missing"
            if name in spec:
                shape = spec[name][0]
                own = f"has {len(shape)} axes" if shape and not any(shape) else f"has shape {list(shape)}"
            return f"{name} {own},"
    return "order of arrays is"


def load_into(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Copy arrays into a model's parameters and buffers, by name.

    Args:
        tensors: the model's state dict, which shares its memory.
        arrays: what to copy.

    Raises:
        ModelError: a name is not the model's, or a shape differs.
    """
    for name, array in arrays.items():
        if name not in tensors or tuple(tensors[name].shape) != array.shape:
            own = list(tensors[name].shape) if name in tensors else "no such tensor"
            raise ModelError(f"{name} arrived with shape {list(array.shape)}; the model has {own}")
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(as_read(array))
