"""FedProx, server side: the same aggregation as in FedAvg (Li et al., MLSys 2020)."""

from fedhet.methods.included import fedprox
from fedhet.server import FederatedStrategy, State


class FedProx(FederatedStrategy[fedprox.FedProxOptions, State]):
    """Averages like FedAvg; only the clients' loss differs."""

    method = fedprox.method
