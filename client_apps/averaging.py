"""Client sides of methods that are close to FedAvg: FedProx, FedRep and local training."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.messages import Payload
from fedhet.methods.included.averaging import FedProxOptions, FedRepOptions, LocalOptions
from fedhet.training import Loss, Phase, Step, Term


class FedProx(ClientSide[FedProxOptions]):
    """Adds mu/2 ||W - W(t-1)||^2 to the task's loss, where W(t-1) are the received weights."""

    takes_any_loop = True

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        start = [parameter.detach().clone() for parameter in self.client.model.parameters()]
        return (Term(proximal, weighted=True, public=True, mu=self.options.mu, start=start),)


def proximal(step: Step, mu: float, start: Sequence[Tensor]) -> Tensor:
    """Return mu/2 ||W - W(t-1)||^2, where `start` are the parameters W(t-1)."""
    distances = [(now - then).square().sum() for now, then in zip(step.parameters.values(), start, strict=True)]
    return mu / 2 * torch.stack(distances).sum()


class FedRep(ClientSide[FedRepOptions]):
    """Trains the head on the received body, then the body with the head frozen; in the closing round only the head."""

    takes_any_loop = True

    def phases(self, payload: Payload) -> Sequence[Phase]:
        request, head = self.client.request, f"{self.client.head}."
        body = 0 if request.closing else min(self.options.body_epochs, request.epochs)
        optimisation = self.client.optimisation()
        return [
            Phase(request.epochs - body, optimisation, trains=lambda name: name.startswith(head)),
            Phase(body, optimisation, trains=lambda name: not name.startswith(head)),
        ]

    def end(self, payload: Payload) -> Payload:
        return Payload() if self.client.request.closing else super().end(payload)


class Local(ClientSide[LocalOptions]):
    """Trains the client's own model and sends nothing."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        phases = super().phases(payload)
        if self.options.public == "unused":
            return phases
        train, public = self.client.data.train, self.client.public
        assert public.labels is not None  # as the traits say
        inputs, labels = train.at(slice(None))
        both = Examples(torch.cat([inputs, public.inputs]), torch.cat([labels, public.labels]))
        return [replace(phase, examples=both, augmented=True) for phase in phases]
