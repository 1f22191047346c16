"""FedProx (Li et al., MLSys 2020): FedAvg with a proximal term in the clients' loss."""

from dataclasses import dataclass

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, option
from fedhet.methods.sharing import EVERYTHING


@dataclass(frozen=True)
class FedProxOptions(Options):
    """FedProx's own configuration key."""

    mu: float = option(0.1, "weight of the proximal term mu / 2 ||W - W(t-1)||^2", at_least=0)


method = Method("fedprox", traits=Traits(networks="equal", shares=EVERYTHING, common_init=True), Options=FedProxOptions)
