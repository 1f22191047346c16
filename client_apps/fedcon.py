"""Client side of FedCon: trains the encoder to predict what a second, slower network returns for another view."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedhet.algorithms.contrast import negative_cosine
from fedhet.client import Loss, Payload, Step, Term
from fedhet.models.representation import Representation
from fedhet.strategies.fedcon import Keys, follow

from .families.contrast import TwoViews


class FedCon(TwoViews[Keys]):
    remembers = True

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_classes(outputs=True)
        return super().handshake(payload)

    @classmethod
    def modules(cls, inputs: int, keys: Keys, dtype: torch.dtype) -> Mapping[str, nn.Module]:
        first = nn.Linear(inputs, keys.width, dtype=dtype)
        last = nn.Linear(keys.width, inputs, dtype=dtype)
        norm = nn.BatchNorm1d(keys.width, dtype=dtype)
        return {"projector": nn.Sequential(first, norm, nn.ReLU(), last)}

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        client = self.client
        phi = client.representation
        before = client.memory
        parameters = dict(client.model.named_parameters())
        encoder = [name for name in parameters if not name.startswith(client.head.removesuffix("head"))]
        self.second = {name: before.get(name, parameters[name]).detach().clone() for name in encoder}
        constants = {"second": self.second, "decay": self.options.decay}
        return (Term(distance_to_second, captures={"phi": phi}, phi=phi, **constants),)

    def end(self, payload: Payload) -> Payload:
        if self.client.trained.work.steps:
            follow(self.second, dict(self.client.model.named_parameters()), self.options.decay)
        self.client.memory = self.second
        return super().end(payload)


def distance_to_second(step: Step, phi: Representation, second: Mapping[str, Tensor], decay: float) -> Tensor:
    """Return minus the mean cosine of each view's projection and the other view's representation by another network.

    `second` has the parameters of that network's encoder, which follow those of the step with `decay`.
    """
    if step.number:
        follow(second, step.parameters, decay)
    predictions = step.beside("projector", phi, step.captured["phi"])
    targets = step.by(second, phi)
    return negative_cosine(predictions, targets.roll(len(targets) // 2, 0))
