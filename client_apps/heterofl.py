"""Client side of HeteroFL and FedRolex: trains a part of the network, whose hidden layers' outputs are scaled.

The loss sets the network's outputs for classes without an example on the client to 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedhet.algorithms.graphs import Submodel
from fedhet.client import ClientSide, Payload, Phase, Step, Term
from fedhet.models.copies import multiplies, tied_names
from fedhet.strategies.heterofl import Keys


class Scaled(Submodel):
    """A submodel with a fraction r of the units of each hidden layer; these layers' outputs are divided by r.

    If the network has more than 8 linear and convolutional layers, but no normalisation, they are divided by sqrt(r).
    """

    def cut(self, model: nn.Module) -> nn.Module:
        part = super().cut(model)
        slots = [slot for group in self.groups for slot in group.rows + group.completes]
        names = {slot.parameter.rpartition(".")[0]: None for slot in slots if self.width < 1}
        # Divided by r, outputs would grow with each layer; r^.5 keeps their variance.
        divisor = self.width**0.5 if multiplies(model) else self.width
        for layer in map(part.get_submodule, names):
            if isinstance(layer, nn.Linear | _ConvNd | nn.Embedding):
                layer.register_forward_hook(lambda module, inputs, outputs: outputs / divisor)
        return part


class HeteroFL(ClientSide[Keys]):
    parts = Scaled

    @cached_property
    def absent(self) -> Tensor | None:
        """Mask (classes,) of classes without training examples; None if all have some, or the task has no classes."""
        labels = self.client.data.train.labels
        if self.client.task.outputs.meaning != "classes":
            return None
        absent = torch.ones(self.client.outputs, dtype=torch.bool, device=labels.device)
        # Negative labels are ignored.
        absent[labels[labels >= 0].long().unique()] = False
        return absent if bool(absent.any()) and self._by_class(len(absent)) else None

    def _by_class(self, classes: int) -> list[str]:
        tied = tied_names(self.client.model)
        names = [name for name in self.shared_names() if name.startswith(f"{self.client.head}.") and name not in tied]
        return [name for name in names if self.client.tensors[name].shape[:1] == (classes,)]

    def phases(self, payload: Payload) -> Sequence[Phase]:
        phases = super().phases(payload)
        if self.absent is None:
            return phases
        masked = Term(masked_loss, weighted=True, absent=self.absent)
        return [replace(phase, task_weight=0.0, terms=(masked, *phase.terms)) for phase in phases]

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        if self.absent is not None:
            rows = torch.nonzero(~self.absent).flatten().cpu().numpy()
            reply.arrays["rows"] = dict.fromkeys(self._by_class(len(self.absent)), rows)
        return reply


def masked_loss(step: Step, absent: Tensor) -> Tensor:
    """Return the task's loss with the outputs of the classes in the mask `absent` (classes,) set to 0."""
    if step.task.outputs.places == "pixels":
        # Classes are the first axis of an example.
        absent = absent.reshape(-1, *(1 for _ in step.outputs.shape[2:]))
    return step.loss(step.outputs.masked_fill(absent, 0))
