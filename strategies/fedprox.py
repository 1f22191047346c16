"""FedProx, server half: FedAvg's (Li et al., MLSys 2020)."""

from dataclasses import dataclass

from fedhet.config import option
from fedhet.server import FederatedStrategy


@dataclass(frozen=True)
class Parameters:
    """FedProx's own keys."""

    mu: float = option(0.1, "weight of the proximal term mu/2 ||W - W(t-1)||^2", at_least=0)


class FedProx(FederatedStrategy):
    """Averages as FedAvg does; what differs is the clients' loss."""

    name = "fedprox"
    Parameters = Parameters
    equal_architectures = True
    global_model = True
