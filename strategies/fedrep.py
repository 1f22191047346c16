"""FedRep, server side: the clients' bodies are averaged (Collins et al., ICML 2021)."""

from collections.abc import Mapping

from fedhet.messages import Reply
from fedhet.methods.included import fedrep
from fedhet.server import FederatedStrategy, State


class FedRep(FederatedStrategy[fedrep.FedRepParameters, State]):
    """Averages like FedAvg, but only the shared arrays: all except the head."""

    method = fedrep.method

    def check_reply(self, reply: Reply) -> None:
        """Check that the reply has a body, except in the closing round, which trains heads only."""
        if not self.run.round.closing:
            super().check_reply(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the bodies; the closing round does not change them."""
        return {} if self.run.round.closing else super().aggregate_fit(round, replies)
