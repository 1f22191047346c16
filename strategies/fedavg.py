"""FedAvg, server side: the mean of the clients' models (McMahan et al., AISTATS 2017, algorithm 1).

    W(t) = sum_i n_i / n W_i(t),    n = sum_i n_i

over the clients i of round t, which trained W_i(t) from W(t-1) on n_i examples: the defaults of `fedhet.server.Hooks`.
"""

from fedhet.methods.included import fedavg
from fedhet.methods.options import Options
from fedhet.server import FederatedStrategy, State


class FedAvg(FederatedStrategy[Options, State]):
    """Sends W(t-1) to the clients of the round (`payload_for`) and averages what they return (`aggregate_fit`)."""

    method = fedavg.method
