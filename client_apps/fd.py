"""FD, client side: distillation from mean logits of an example's class (Jeong et al., 2018, algorithm 1)."""

import torch.nn.functional as F
from torch import Tensor

from fedhet.messages import Payload
from fedhet.methods.included.prototypes import FDOptions
from fedhet.training import Loss, Step

from ._prototypes import ByClass  # noqa: TID251 - this folder is fedhet.client_apps


class FD(ByClass[FDOptions]):
    """Adds a loss: the cross entropy between the global prediction for an example's class and the network's own."""

    of_phi = False

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return a term with the mean cross entropy over the examples whose class has global logits."""
        if not len(self.classes):
            return ()
        row_of, teacher, scores = self.rows(), self.prototypes.softmax(1), self.client.task.outputs.scores

        def distillation(step: Step) -> Tensor:
            rows = row_of[step.labels]
            known = (rows >= 0).to(step.outputs.dtype)
            entropies = -(teacher[rows] * F.log_softmax(scores(step.outputs), 1)).sum(1) * known
            return self.options.weight * entropies.sum() / known.sum().clamp(min=1)

        return (distillation,)
