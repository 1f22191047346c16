"""FML, server side: FedAvg of a network that clients train with their own (Shen et al., 2020, algorithm 1)."""

from fedhet.methods.included import fml
from fedhet.server import FederatedStrategy, State


class FML(FederatedStrategy[fml.FMLParameters, State]):
    """Averages the shared network; clients' own networks stay with them."""

    method = fml.method
