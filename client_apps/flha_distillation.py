"""Client side of FLHA-distillation: trains and sends a teacher; later trains its own network, and sends nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedhet.messages import Payload
from fedhet.strategies.flha_distillation import Keys
from fedhet.training import Optimisation, Phase, Step, Term

from .families.small_network import AuxiliaryModel

ALPHA = 0.7
"""Weight of the distillation loss."""

TEMPERATURE = 20.0
"""Divisor T of logits in the distillation loss."""


class FLHADistillation(AuxiliaryModel[Keys]):
    remembers = True
    key = "teacher"
    reason = "which students learn from a teacher"

    @property
    def teaching(self) -> bool:
        return self.client.request.round <= self.options.teaching(self.client.config.rounds)

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        if not self.teaching and "model" in payload.arrays:
            self.client.memory |= self.auxiliary.state_dict()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        if not self.teaching:
            self.auxiliary.load_state_dict(self.client.remembered)
        module = self.auxiliary if self.teaching else None
        phase = Phase(self.client.request.epochs, self._optimisation(), module=module)
        if self.teaching:
            return [phase]
        return [replace(phase, terms=(Term(distance, teacher=self.auxiliary.eval()),), task_weight=1 - ALPHA)]

    def end(self, payload: Payload) -> Payload:
        return super().end(payload) if self.teaching else Payload()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        return self.auxiliary.eval() if self.teaching else self.client.model

    def _optimisation(self) -> Optimisation:
        client = self.client
        config = client.config
        request = client.request
        rounds = self.options.teaching(config.rounds)
        rate = config.learning_rate
        if not self.teaching:
            request = replace(request, round=request.round - rounds)
            rounds = config.rounds - rounds
            rate = self.options.student_learning_rate or 0.1 * rate
        return replace(client, config=config.replace(rounds=rounds, learning_rate=rate), request=request).optimisation()


def distance(step: Step, teacher: nn.Module) -> Tensor:
    """Return alpha 2 T^2 KL(teacher || network) at temperature T = 20, for a step's inputs, where alpha is `ALPHA`."""
    with torch.no_grad():
        wanted = teacher(step.inputs)
    return ALPHA * 2 * TEMPERATURE**2 * step.divergence(step.outputs, wanted, TEMPERATURE)
