"""FedAvg (McMahan et al., AISTATS 2017): the server averages the clients' networks.

    client i:  w_i(t) = argmin_w  L_i(w), from w(t-1)
    server:    w(t) = sum_i n_i w_i(t) / sum_i n_i

L_i is the loss of client i's n_i examples.
"""

from fedhet.methods.sharing import EVERYTHING
from fedhet.server import FederatedStrategy, Options, State, Traits, method


@method("fedavg", Traits(networks="equal", shares=EVERYTHING, common_init=True, inside=""))
class FedAvg(FederatedStrategy[Options, State]):
    """FedAvg: the average of clients' networks weighted by numbers of examples (McMahan et al., AISTATS 2017)."""
