r"""FML, client side: the client's own network and a shared network learn from each other (Shen et al., 2020).

    L_own    = alpha CE(own, y)  + (1 - alpha) KL(shared || own)
    L_shared = beta CE(shared, y) + (1 - beta)  KL(own || shared)

where the target of each KL is a constant. One step trains both networks.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fedhet.messages import Payload
from fedhet.methods.included.distillation import FMLOptions
from fedhet.training import Loss, Phase, Step, Term

from ._auxiliary import SMALL, Mutual  # noqa: TID251 - this folder is fedhet.client_apps


class FML(Mutual[FMLOptions]):
    """Trains the client's own network and the shared network by mutual distillation."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase that trains both networks; the task's loss is the loss of the client's own network."""
        return [replace(phase, task_weight=self.options.alpha) for phase in super().phases(payload)]

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return a term with the shared network's loss and the distillation between both networks."""
        return (Term(mutual, alpha=self.options.alpha, beta=self.options.beta),)


def mutual(step: Step, alpha: float, beta: float) -> Tensor:
    """Return the shared network's loss, and the distillation between both networks."""
    shared = step.captured[SMALL].to(step.outputs.dtype)
    learnt = (1 - alpha) * step.divergence(step.outputs, shared)
    taught = (1 - beta) * step.divergence(shared, step.outputs)
    return learnt + taught + beta * step.loss(shared)
