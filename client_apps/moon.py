"""Client side of MOON: adds mu times the model-contrastive loss, and remembers the trained network."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.algorithms.contrast import contrast
from fedhet.client import Loss, Payload, Step, Term
from fedhet.models.representation import Representation
from fedhet.strategies.moon import Keys

from .families.by_class import SameWidth


class Moon(SameWidth[Keys]):
    remembers = True

    @staticmethod
    def projection(inputs: int, width: int, dtype: torch.dtype) -> nn.Module:
        first, last = nn.Linear(inputs, inputs, dtype=dtype), nn.Linear(inputs, width, dtype=dtype)
        return nn.Sequential(first, nn.ReLU(), last)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        client = self.client
        # Before the client has trained, both networks are the received one, and the loss is constant.
        if not client.memory or not self.options.mu:
            return ()
        received = {name: tensor.clone() for name, tensor in client.tensors.items()}
        constants: dict[str, Any] = {"phi": client.representation, "received": received, "previous": client.memory}
        constants |= {"mu": self.options.mu, "temperature": self.options.temperature}
        captures = {"phi": client.representation}
        return (Term(model_contrast, captures=captures, weighted=True, **constants),)

    def end(self, payload: Payload) -> Payload:
        self.client.memory = self.client.tensors
        return super().end(payload)


def model_contrast(
    step: Step,
    phi: Representation,
    received: Mapping[str, Tensor],
    previous: Mapping[str, Tensor],
    mu: float,
    temperature: float,
) -> Tensor:
    """Return `mu` times the mean model-contrastive loss of a step's examples, compared with two other networks.

    `received` and `previous` are the state dicts of the positive and the negative network.
    """
    positives, negatives = (step.by(arrays, phi) for arrays in (received, previous))
    return mu * step.mean(contrast(step.captured["phi"], positives, negatives, temperature=temperature))
