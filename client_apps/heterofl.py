"""HeteroFL, client side: train a part of the network, with a scaler and a masked loss (Diao et al., ICLR 2021).

scaler         a layer's outputs are divided by the width r of the client's part
masked loss    outputs for classes without an example on the client are set to 0
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedhet.client import ClientSide
from fedhet.client.submodel import Submodel
from fedhet.messages import Payload
from fedhet.methods.included.submodels import SizedOptions
from fedhet.models.copies import tied_names
from fedhet.training import Phase, Step, Term


class Scaled(Submodel):
    """A part of a network whose layers with hidden units divide their outputs by the part's width."""

    def cut(self, model: nn.Module) -> nn.Module:
        """Return the part of a newly built network, with a scaler after each layer with hidden units."""
        part = super().cut(model)
        slots = [slot for group in self.groups for slot in group.rows + group.completes]
        for name in {slot.parameter.rpartition(".")[0]: None for slot in slots if self.width < 1}:
            module = part.get_submodule(name)
            if isinstance(module, nn.Linear | _ConvNd | nn.Embedding):
                module.register_forward_hook(partial(_divided, self.width))
        return part


class HeteroFL(ClientSide[SizedOptions]):
    """Trains the client's part of the network with the masked loss."""

    parts = Scaled

    @cached_property
    def absent(self) -> Tensor | None:
        """Whether each class has no example, (classes,) bool; None if all have some, or outputs are not classes."""
        labels = self.client.data.train.labels
        if self.client.task.outputs.meaning != "classes":
            return None
        absent = torch.ones(self.client.outputs, dtype=torch.bool, device=labels.device)
        absent[labels[labels >= 0].long().unique()] = False  # negative labels are ignored
        return absent if bool(absent.any()) and self._by_class(len(absent)) else None

    def _by_class(self, classes: int) -> list[str]:
        """Return the names of the head's arrays with one row per class that are not tied to another layer."""
        tied = tied_names(self.client.model)
        names = [name for name in self.shared_names() if name.startswith(f"{self.client.head}.") and name not in tied]
        return [name for name in names if self.client.tensors[name].shape[:1] == (classes,)]

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase, with the masked loss if the client has no example of some class."""
        phases = super().phases(payload)
        if self.absent is None:
            return phases
        masked = Term(masked_loss, absent=self.absent)
        return [replace(phase, task_weight=0.0, terms=(masked, *phase.terms)) for phase in phases]

    def end(self, payload: Payload) -> Payload:
        """Return the shared arrays and, with the masked loss, the row numbers of the client's classes in the head."""
        reply = super().end(payload)
        if self.absent is not None:
            rows = torch.nonzero(~self.absent).flatten().cpu().numpy()
            reply.arrays["rows"] = dict.fromkeys(self._by_class(len(self.absent)), rows)
        return reply


def masked_loss(step: Step, absent: Tensor) -> Tensor:
    """Return the loss with the outputs for absent classes set to 0."""
    if step.task.outputs.places == "pixels":  # whose classes are the first axis of an example
        absent = absent.reshape(-1, *(1 for _ in step.outputs.shape[2:]))
    return step.loss(step.outputs.masked_fill(absent, 0))


def _divided(width: float, module: nn.Module, inputs: object, outputs: Tensor) -> Tensor:
    return outputs / width
