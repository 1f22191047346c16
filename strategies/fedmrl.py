"""FedMRL, server side: FedAvg of the small network that all clients share (Yi et al., NeurIPS 2024, algorithm 1)."""

from fedhet.methods.included import fedmrl
from fedhet.server import FederatedStrategy, State


class FedMRL(FederatedStrategy[fedmrl.FedMRLParameters, State]):
    """Averages the shared network; clients' own networks and projectors stay with them."""

    method = fedmrl.method
