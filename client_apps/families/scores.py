"""Base class of client sides that exchange class scores of public examples, and the public examples of a message."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from fedhet.algorithms.alignment.targets import pack, unpack
from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.messages import Arrays, Payload, WireError, to_tensor
from fedhet.strategies.families.scores import ScoresKeys
from fedhet.training import BATCH, Phase, Step, Term

Q = TypeVar("Q", bound=ScoresKeys)


def public_rows(arrays: Arrays, public: Tensor) -> Tensor:
    """Return the rows of `public` inputs with the indices `arrays["rows"]`; raise a WireError if one is invalid."""
    rows = to_tensor(arrays["rows"]).long().to(public.device)
    if not ((rows >= 0) & (rows < len(public))).all():
        raise WireError("the server requests rows that the public dataset lacks: install the server's fedhet version")
    return public[rows]


class Scores(ClientSide[Q]):
    """Base class of client sides that learn received class scores of public examples, train, and send their own."""

    @staticmethod
    @abstractmethod
    def distance(step: Step, outputs: Tensor) -> Tensor:
        """Return the method's mean distance between class scores `outputs` (n, C) and received ones, `step.labels`."""

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        if "next-rows" in payload.arrays:
            scores = self.client.scores(self._rows(payload.arrays["next-rows"]), "logits")
            reply.arrays["scores"] = pack(scores)
        return reply

    def in_turn(self, phases: Sequence[Phase]) -> list[Phase]:
        """Return copies of a round's `phases` with the learning rates that the schedule has at their place in a round.

        Phases on public examples get the batch size `public-batch`.
        """
        stepped = []
        for part, phase in enumerate(phases):
            optimisation = self.client.optimisation(part, len(phases))
            if phase.examples is not None:
                optimisation = replace(optimisation, batch_size=self.options.public_batch)
            stepped.append(replace(phase, optimisation=optimisation))
        return stepped

    def digest(self, payload: Payload, epochs: int = 1) -> list[Phase]:
        """Return a list with a phase that learns received mean scores for `epochs`; empty if none were received."""
        arrays = payload.arrays
        if "mean" not in arrays:
            return []
        rows = self._rows(arrays["rows"])
        scores = unpack(arrays["mean"]).to(rows.device)
        client = self.client
        labels = client.data.train.labels
        numbers = client.task.outputs.meaning == "numbers"
        client.check_size("scores", scores, lambda: labels if numbers else client.scores(rows[:BATCH], "logits"))
        examples = Examples(rows, scores)
        terms = (Term(match, weighted=True, distance=self.distance),)
        optimisation = client.optimisation()
        return [Phase(epochs, optimisation, examples=examples, public=True, terms=terms, task_weight=0.0)]

    def _rows(self, arrays: Arrays) -> Tensor:
        return public_rows(arrays, self.client.public.inputs)


def match(step: Step, distance: Callable[[Step, Tensor], Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return as loss the `distance` of the network's class scores to the step's targets, and {"distance": loss}."""
    apart = distance(step, step.task.outputs.scores(step.outputs))
    return apart, {"distance": apart}
