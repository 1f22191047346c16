"""Base class of client sides that exchange class scores of public examples, and the public examples of a message."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fedhet.algorithms.alignment.targets import pack, unpack
from fedhet.client import Client, ClientSide
from fedhet.data import Examples
from fedhet.messages import Arrays, Payload, check_places, to_tensor
from fedhet.strategies.families.scores import ScoresKeys
from fedhet.training import BATCH, Phase, Step, Term
from fedhet.utils.machine import brought
from fedhet.utils.randomness import torch_generator

Q = TypeVar("Q", bound=ScoresKeys)


def public_rows(arrays: Arrays, public: Tensor) -> Tensor:
    """Return the rows of `public` inputs with the indices `arrays["rows"]`; raise a WireError if one is invalid."""
    check_places(arrays["rows"], len(public), "rows of the public dataset")
    return public[to_tensor(arrays["rows"]).long().to(public.device)]


def public_examples(client: Client, arrays: Arrays, round: int) -> Tensor:
    """Return the public inputs (n, ...) of a round, which has the indices `arrays["rows"]`.

    If the public dataset has the clients' training inputs (`Options.public_union`), they are augmented, for all clients
    alike.
    """
    examples = public_rows(arrays, client.public.inputs)
    if client.augment and client.config.options.public_union:
        return client.augment(examples, torch_generator(client.config.seed, "rad augmentation", round))
    return examples


def some_rows(
    client: Client, inputs: Tensor, target: Tensor, size: int, every: int, generator: torch.Generator
) -> Callable[[int, int], Mapping[str, Tensor] | None]:
    """Return the argument `draw` of a `Term` about public `inputs` (n, ...) and the `target` (n, ...) for them.

    In every `every`-th step, it draws `size` rows of both by the `generator`; if `size` is 0 or at least n, all rows.
    """

    def draw(step: int, _examples: int) -> Mapping[str, Tensor] | None:
        if step % every:
            return None
        rows: slice | Tensor = slice(None)
        if 0 < size < len(target):
            rows = brought(torch.randperm(len(target), generator=generator)[:size], client.device)
        return {"inputs": client.transform(inputs[rows]), "target": target[rows]}

    return draw


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
