"""What of a model travels: the one thing in which FedAvg, FedRep and local training differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedhet.errors import ModelError
from fedhet.wire import Arrays, as_read

Spec = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every array of a group, by name."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Exchange:
    """A selector of a model's parameters and buffers.

    Attributes:
        part: all of the model, everything but the head, the head only, or nothing.
        statistics: whether BatchNorm's running statistics travel as well.
    """

    part: Literal["all", "body", "head", "nothing"] = "all"
    statistics: bool = True

    def select(self, state: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
        """The tensors of a state dict that travel.

        Args:
            state: the model's state dict.
            head: name of the head's module.
        """
        if self.part == "nothing":
            return {}
        return {name: tensor for name, tensor in state.items() if self._travels(name, head)}

    def _travels(self, name: str, head: str) -> bool:
        if not self.statistics and name.rpartition(".")[2] in STATISTICS:
            return False
        return self.part == "all" or (self.part == "head") == name.startswith(f"{head}.")


def spec_of(tensors: Mapping[str, Tensor]) -> Spec:
    """Shape and dtype of every tensor."""
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


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
