"""The floating dtype in which a network computes, and tensors in that dtype."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def precision(model: nn.Module) -> torch.dtype | None:
    """The dtype of a model's first floating parameter; None without one."""
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), None)


def in_precision(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in a floating dtype, if that is given and the tensor is a floating one; else the same object."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def fitted(transform: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """A transformation to float32 whose results are what a network of this precision takes."""
    if dtype is None or dtype == torch.float32:
        return transform
    return lambda inputs: in_precision(transform(inputs), dtype)
