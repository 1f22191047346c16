"""FedProx, client side: FedAvg with a proximal term (Li et al., MLSys 2020, equation 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.client import ClientSide
from fedhet.messages import Payload
from fedhet.methods.included.averaging import FedProxOptions
from fedhet.training import Loss, Step, Term


class FedProx(ClientSide[FedProxOptions]):
    """Adds mu/2 ||W - W(t-1)||^2 to the task's loss, where W(t-1) are the received weights."""

    takes_any_loop = True

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the proximal term."""
        start = [parameter.detach().clone() for parameter in self.client.model.parameters()]
        return (Term(proximal, mu=self.options.mu, start=start),)


def proximal(step: Step, mu: float, start: Sequence[Tensor]) -> Tensor:
    """Return mu/2 ||W - W(t-1)||^2, where `start` are the parameters W(t-1)."""
    distances = [(now - then).square().sum() for now, then in zip(step.parameters.values(), start, strict=True)]
    return mu / 2 * torch.stack(distances).sum()
