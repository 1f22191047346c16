"""LG-FedAvg, server side: the clients' heads are averaged (Liang et al., 2020).

The client side is the default.
"""

from fedhet.methods import lg_fedavg
from fedhet.options import Parameters
from fedhet.server import FederatedStrategy, State


class LGFedAvg(FederatedStrategy[Parameters, State]):
    """Averages as FedAvg does, but only what is shared: the heads, whatever they are called."""

    method = lg_fedavg.method
