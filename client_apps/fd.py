"""FD, client side: distillation from mean logits of an example's class (Jeong et al., 2018, algorithm 1)."""

import torch.nn.functional as F
from torch import Tensor

from fedhet.messages import Payload
from fedhet.methods.included.prototypes import FDOptions
from fedhet.training import Loss, Step, Term

from ._prototypes import ByClass  # noqa: TID251 - this folder is fedhet.client_apps


class FD(ByClass[FDOptions]):
    """Adds a loss: the cross entropy between the global prediction for an example's class and the network's own."""

    of_phi = False

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return a term with the mean cross entropy over the examples whose class has global logits."""
        if not len(self.classes):
            return ()
        teacher = self.prototypes.softmax(1)
        return (Term(distillation, row_of=self.rows(), teacher=teacher, weight=self.options.weight),)


def distillation(step: Step, row_of: Tensor, teacher: Tensor, weight: float) -> Tensor:
    """Return the mean cross entropy from the rows of `teacher`, over examples of classes that have a row."""
    rows = row_of[step.labels]
    known = (rows >= 0).to(step.outputs.dtype)
    entropies = -(teacher[rows] * F.log_softmax(step.task.outputs.scores(step.outputs), 1)).sum(1) * known
    return weight * entropies.sum() / known.sum().clamp(min=1)
