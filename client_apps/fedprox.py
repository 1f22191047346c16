"""Client side of FedProx: adds mu / 2 ||w - w(t-1)||^2 to the loss, where w(t-1) are the received weights."""

import torch

from fedhet.client import ClientSide, Loss, Payload, Step, Term
from fedhet.strategies.fedprox import Keys


class FedProx(ClientSide[Keys]):
    takes_any_loop = True

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        start = [parameter.detach().clone() for parameter in self.client.model.parameters()]
        return (Term(proximal, weighted=True, public=True, mu=self.options.mu, start=start),)


def proximal(step: Step, mu: float, start: list[torch.Tensor]) -> torch.Tensor:
    """Return mu / 2 times the squared distance of a step's parameters to `start`, their values before training."""
    distances = [(now - then).square().sum() for now, then in zip(step.parameters.values(), start, strict=True)]
    return mu / 2 * torch.stack(distances).sum()
