"""LG-FedAvg, server side: the clients' heads are averaged (Liang et al., 2020)."""

from fedhet.methods.included import lg_fedavg
from fedhet.methods.options import Options
from fedhet.server import FederatedStrategy, State


class LGFedAvg(FederatedStrategy[Options, State]):
    """Averages like FedAvg, but only the heads."""

    method = lg_fedavg.method
