"""FedRep, server side: clients' networks without their heads (bodies) are averaged (Collins et al., ICML 2021)."""

from collections.abc import Mapping

from fedhet.messages import Reply
from fedhet.methods.included import fedrep
from fedhet.server import FederatedStrategy, State


class FedRep(FederatedStrategy[fedrep.FedRepOptions, State]):
    """Averages like FedAvg, but only the body: all arrays except the head."""

    method = fedrep.method

    def check_reply(self, reply: Reply) -> None:
        """Check that the reply has a body (the network without its head); the closing round trains heads only."""
        if not self.run.round.closing:
            super().check_reply(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the clients' bodies (networks without heads); the closing round does not change them."""
        return {} if self.run.round.closing else super().aggregate_fit(round, replies)
