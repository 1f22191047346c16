"""FedAvg and methods that average a part of the network in the same way, server side.

    W(t) = sum_i n_i / n W_i(t),    n = sum_i n_i

over the clients i of round t, which trained W_i(t) from W(t-1) on n_i examples (McMahan et al., AISTATS 2017, algorithm
1): the defaults of `fedhet.server.Hooks`.
"""

from collections.abc import Mapping

from fedhet.messages import Reply
from fedhet.methods.included.averaging import FedRepOptions, fedavg, fedrep, lg_fedavg
from fedhet.methods.options import Options
from fedhet.server import FederatedStrategy, State


class FedAvg(FederatedStrategy[Options, State]):
    """Sends W(t-1) to the clients of the round (`payload_for`) and averages what they return (`aggregate_fit`)."""

    method = fedavg


class LGFedAvg(FederatedStrategy[Options, State]):
    """Averages like FedAvg, but only the heads (Liang et al., 2020)."""

    method = lg_fedavg


class FedRep(FederatedStrategy[FedRepOptions, State]):
    """Averages like FedAvg, but only the body, all arrays except the head (Collins et al., ICML 2021).

    The closing round trains heads only and averages nothing.
    """

    method = fedrep

    def check_reply(self, reply: Reply) -> None:
        if not self.run.round.closing:
            super().check_reply(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        return {} if self.run.round.closing else super().aggregate_fit(round, replies)
