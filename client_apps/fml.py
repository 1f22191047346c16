"""Client side of FML: trains the client's network and the shared network by mutual distillation."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fedhet.client import Loss, Payload, Phase, Step, Term
from fedhet.strategies.fml import Keys

from .families.small_network import SMALL, Mutual


class FML(Mutual[Keys]):
    def phases(self, payload: Payload) -> Sequence[Phase]:
        return [replace(phase, task_weight=self.options.alpha) for phase in super().phases(payload)]

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        return (Term(mutual, captures=self.captures, weighted=True, alpha=self.options.alpha, beta=self.options.beta),)


def mutual(step: Step, alpha: float, beta: float) -> Tensor:
    """Return (1 - alpha) KL(shared || own) + (1 - beta) KL(own || shared) + beta L(shared), for task loss L.

    `own` and `shared` are outputs of the client's and the shared network. FML's loss also has the term alpha L(own).
    """
    shared = step.captured[SMALL].to(step.outputs.dtype)
    learnt = (1 - alpha) * step.divergence(step.outputs, shared)
    taught = (1 - beta) * step.divergence(shared, step.outputs)
    return learnt + taught + beta * step.loss(shared)
