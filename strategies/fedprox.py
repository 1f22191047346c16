"""FedProx, server side: the same as FedAvg's (Li et al., MLSys 2020)."""

from fedhet.methods.included import fedprox
from fedhet.server import FederatedStrategy, State


class FedProx(FederatedStrategy[fedprox.FedProxParameters, State]):
    """Averages like FedAvg; the clients' loss differs."""

    method = fedprox.method
