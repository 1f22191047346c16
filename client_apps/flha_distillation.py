"""FLHA-distillation, client side: train a shared teacher, then distil it into the client's own network (the student).

The student's loss is (1 - alpha) CE + alpha 2 T^2 KL(teacher || student) on the client's own examples (appendix E of
the FLHA-GHN paper). The usual factor is T^2; the paper has twice this factor.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedhet.messages import Payload
from fedhet.methods.included.distillation import FLHADistillationOptions
from fedhet.training import Loss, Optimisation, Phase, Step, Term

from .fml import AuxiliaryModel

ALPHA, TEMPERATURE = 0.7, 20.0
"""The paper's weight of the distillation and temperature T, by which logits are divided."""


class FLHADistillation(AuxiliaryModel[FLHADistillationOptions]):
    """Trains and sends the teacher; the client's own network and the final teacher stay on the client."""

    remembers = True
    key, reason = "teacher", "which students learn from a teacher"

    @property
    def teaching(self) -> bool:
        """Whether this round trains the teacher."""
        return self.client.request.round <= self.options.teaching(self.client.config.rounds)

    def begin(self, payload: Payload) -> None:
        """Load the received teacher or, in later rounds, the final teacher that the client has kept."""
        super().begin(payload)
        if not self.teaching:
            if "model" in payload.arrays:
                self.client.memory |= self.auxiliary.state_dict()
            elif self.client.memory:
                self.auxiliary.load_state_dict(self.client.memory)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase, which trains the teacher or, in later rounds, the client's own network."""
        if self.teaching:
            return [Phase(self.client.request.epochs, self._optimisation(), module=self.auxiliary)]
        phase = Phase(self.client.request.epochs, self._optimisation(), terms=self.terms(payload))
        return [replace(phase, task_weight=1 - ALPHA) if phase.terms else phase]

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        if not self.client.memory:
            return ()
        self.auxiliary.eval()
        return (Term(distance, teacher=self.auxiliary),)

    def end(self, payload: Payload) -> Payload:
        return super().end(payload) if self.teaching else Payload()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        return self.auxiliary.eval() if self.teaching else self.client.model

    def _optimisation(self) -> Optimisation:
        """Return the configured optimiser, with separate learning rate schedules for teacher and students."""
        client, config = self.client, self.client.config
        teaching = self.options.teaching(config.rounds)
        first, rounds = (0, teaching) if self.teaching else (teaching, config.rounds - teaching)
        request = replace(client.request, round=client.request.round - first)
        rate = config.learning_rate
        if not self.teaching:
            rate = self.options.student_learning_rate or 0.1 * rate
        return replace(client, config=config.replace(rounds=rounds, learning_rate=rate), request=request).optimisation()


def distance(step: Step, teacher: nn.Module) -> Tensor:
    """Return the weighted divergence from the teacher's outputs."""
    with torch.no_grad():
        wanted = teacher(step.inputs)
    return ALPHA * 2 * TEMPERATURE**2 * step.divergence(step.outputs, wanted, TEMPERATURE)
