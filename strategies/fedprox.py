"""FedProx, server side: FedAvg's (Li et al., MLSys 2020)."""

from fedhet.methods.included import fedprox
from fedhet.server import FederatedStrategy, State


class FedProx(FederatedStrategy[fedprox.FedProxParameters, State]):
    """Averages as FedAvg does; what differs is the clients' loss."""

    method = fedprox.method
