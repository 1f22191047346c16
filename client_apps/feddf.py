"""Client side of FedDF: distils received mean class scores for an epoch, then trains on the client's examples."""

from collections.abc import Sequence

from torch import Tensor

from fedhet.client import Payload, Phase, Step
from fedhet.strategies.feddf import Keys

from .families.scores import Scores


class FedDF(Scores[Keys]):
    takes_estimators = True

    @staticmethod
    def distance(step: Step, outputs: Tensor) -> Tensor:
        return step.divergence(outputs, step.labels.to(outputs.dtype))

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("from whose mean the server learns")
        return Payload()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        private = Phase(self.client.request.epochs, self.client.optimisation())
        return self.in_turn([*self.digest(payload), private])
