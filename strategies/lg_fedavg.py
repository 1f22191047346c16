"""LG-FedAvg (Liang et al., 2020): the server averages the networks' heads h, and each client keeps its body phi.

    client i:  h_i, phi_i = argmin  L_i(h, phi), from h(t-1) and its last phi_i
    server:    h(t) = sum_i n_i h_i / sum_i n_i

Bodies may have any architecture.
"""

from fedhet.methods.sharing import HEAD
from fedhet.server import FederatedStrategy, Options, State, Traits, method


@method("lg-fedavg", Traits(shares=HEAD, keeps="model", common_init=True, inside="head"))
class LGFedAvg(FederatedStrategy[Options, State]):
    """LG-FedAvg: the average of the heads of clients' networks (Liang et al., 2020)."""
