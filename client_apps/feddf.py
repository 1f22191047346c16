"""FedDF, client side: train, and send class scores of public examples for distillation (Lin et al., 2020)."""

from collections.abc import Sequence

from torch import Tensor

from fedhet.messages import Payload
from fedhet.methods.included.distillation import FedDFOptions
from fedhet.training import Phase, Step, soft_divergence

from .fedmd import Scores  # noqa: TID251 - this folder is fedhet.client_apps


class FedDF(Scores[FedDFOptions]):
    """Trains for an epoch on received scores of public examples, if there are any, then on the client's examples."""

    @staticmethod
    def distance(step: Step, outputs: Tensor) -> Tensor:
        """Return the mean KL divergence KL(server || client) between class probabilities."""
        many_labels = step.task.outputs.meaning == "labels"
        return soft_divergence(outputs, step.labels.to(outputs.dtype), 1.0, many_labels=many_labels)

    def handshake(self, payload: Payload) -> Payload:
        """Return the number of scores; raises a DataError unless each example has one vector of class scores."""
        self.client.check_scores("from whose mean the server learns")
        return super().handshake(payload)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return a phase on received scores, if there are any, and a phase on the client's examples."""
        private = Phase(self.client.request.epochs, self.client.optimisation())
        return self.in_turn([*self.digest(payload), private])
