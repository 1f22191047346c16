"""FML, server side: FedAvg of the network that clients train beside their own (Shen et al., 2020, algorithm 1)."""

from fedhet.methods.included import fml
from fedhet.server import FederatedStrategy, State


class FML(FederatedStrategy[fml.FMLParameters, State]):
    """Averages the shared network; clients' own networks stay with them."""

    method = fml.method
