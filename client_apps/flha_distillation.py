"""Client side of FLHA-distillation: trains and sends a teacher; later trains its own network, and sends nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from torch import Tensor

from fedhet.messages import Payload
from fedhet.models.representation import Output
from fedhet.strategies.flha_distillation import Keys
from fedhet.training import Optimisation, Phase, Step, Term

from .families.small_network import SMALL, AuxiliaryModel, Pair

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
        phase = Phase(self.client.request.epochs, self._optimisation(), module=self.auxiliary)
        if self.teaching:
            return [phase]
        self.auxiliary.load_state_dict(self.client.remembered)
        taught = Taught(self.client.model, self.auxiliary)
        term = Term(distance, captures={SMALL: Output(taught, SMALL)}, weighted=True)
        learning = replace(
            phase,
            module=taught,
            trains=lambda name: name.startswith("own."),
            terms=(term,),
            task_weight=1 - ALPHA,
        )
        return [learning]

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


class Taught(Pair):
    """The client's network `own`, and its teacher `small`, which remains in evaluation mode."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.small.eval()
        return self


def distance(step: Step) -> Tensor:
    """Return alpha 2 T^2 KL(teacher || network) at temperature T = 20, for a step's inputs, where alpha is `ALPHA`."""
    return ALPHA * 2 * TEMPERATURE**2 * step.divergence(step.outputs, step.captured[SMALL], TEMPERATURE)
