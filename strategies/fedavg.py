"""FedAvg, server side: the mean of the clients' models (McMahan et al., AISTATS 2017, algorithm 1).

    W(t) = sum_i n_i / n W_i(t),    n = sum_i n_i

over the clients i of round t, which trained W_i(t) from W(t-1) on n_i examples.
"""

from collections.abc import Mapping

from fedhet.methods import fedavg
from fedhet.methods._averages import AveragingParameters
from fedhet.server import FederatedStrategy, State
from fedhet.wire import Reply


class FedAvg(FederatedStrategy[AveragingParameters, State]):
    """Sends W(t-1) to the clients of the round and averages what they return."""

    method = fedavg.method

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """W(t), of each array over those who have it."""
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        examples = {client: float(reply.examples) for client, reply in replies.items()}
        self.state.model = self.state.model | self.aggregator.average(models, examples)
        return {}
