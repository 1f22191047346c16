"""Client side of FD: distils the peers' mean prediction for each class into the network by a cross-entropy loss."""

import torch.nn.functional as F
from torch import Tensor

from fedhet.client import Loss, Payload, Step, Term
from fedhet.strategies.fd import Keys

from .families.by_class import ByClass


class FD(ByClass[Keys]):
    noisy_sums = False
    of_phi = False

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        if not len(self.classes):
            return ()
        rows = self.rows()
        teacher = self.prototypes.softmax(1)
        weight = self.options.weight
        return (Term(distillation, weighted=True, row_of=rows, teacher=teacher, weight=weight),)


def distillation(step: Step, row_of: Tensor, teacher: Tensor, weight: float) -> Tensor:
    """Return `weight` times the mean cross entropy of a step's outputs to the teacher's predictions for the labels.

    `teacher` (k, C) has the predicted probabilities of C classes for examples of k classes. `row_of` (classes,) has the
    row of each class in it, or -1 for a class without a prediction; its examples are left out of the mean.
    """
    rows = row_of[step.labels]
    in_mean = (rows >= 0).to(step.outputs.dtype)
    entropies = -(teacher[rows] * F.log_softmax(step.task.outputs.scores(step.outputs), 1)).sum(1) * in_mean
    return weight * step.mean(entropies) / step.mean(in_mean).clamp(min=1 / len(rows))
