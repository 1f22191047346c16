"""FedDF, client side: trains, and sends class scores of public examples; the server may teach it (Lin et al., 2020)."""

from collections.abc import Sequence

from torch import Tensor

from fedhet.messages import Payload
from fedhet.methods.included.feddf import FedDFParameters
from fedhet.training import Phase, soft_divergence

from .fedmd import Scores  # noqa: TID251 - this folder is fedhet.client_apps


class FedDF(Scores[FedDFParameters]):
    """Trains on its own examples, after an epoch on the server's scores if they are there."""

    def distance(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """Return KL(server || client)."""
        many_labels = self.client.task.outputs.meaning == "labels"
        return soft_divergence(outputs, wanted.to(outputs.dtype), 1.0, many_labels=many_labels)

    def handshake(self, payload: Payload) -> Payload:
        """Return the number of scores; raises DataError if they are not of classes, one vector an example."""
        self.client.check_scores("from whose mean the server learns")
        return super().handshake(payload)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return phases on the server's scores (if any) and on private examples."""
        private = Phase(self.client.request.epochs, self.client.optimisation())
        return self.in_turn([*self.digest(payload), private])
