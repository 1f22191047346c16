"""FedProx (Li et al., MLSys 2020): FedAvg whose clients stay close to the network that they received.

Client i computes w_i(t) = argmin_w L_i(w) + mu / 2 ||w - w(t-1)||^2, from w(t-1); the server averages as in FedAvg.
"""

from dataclasses import dataclass

from fedhet.server import Options, method, option

from .fedavg import FedAvg


@dataclass(frozen=True)
class Keys(Options):
    mu: float = option(0.1, "weight of the proximal term mu / 2 ||W - W(t-1)||^2", at_least=0)


@method("fedprox", FedAvg.method.traits, Keys, client="fedhet.client_apps.fedprox:FedProx")
class FedProx(FedAvg):
    """FedProx: the average of clients' networks, whose distance to the last one is penalised in training."""
