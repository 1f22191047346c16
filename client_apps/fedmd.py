"""Client sides of FedMD (Li and Wang, 2019) and FedDF (Lin et al., 2020): clients share class scores of public data."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from fedhet.algorithms.alignment.targets import pack, unpack
from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.messages import Arrays, Payload
from fedhet.methods.included.distillation import FedDFOptions, FedMDOptions, ScoresOptions
from fedhet.training import BATCH, Phase, Step, Term, soft_divergence

from .fedhenn import public_rows

Q = TypeVar("Q", bound=ScoresOptions)


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
        numbers, labels = client.task.outputs.meaning == "numbers", client.data.train.labels
        client.check_size("scores", scores, lambda: labels if numbers else client.scores(rows[:BATCH], "logits"))
        examples = Examples(rows, scores)
        terms = (Term(match, distance=self.distance),)
        how = client.optimisation()
        return [Phase(epochs, how, examples=examples, public=True, terms=terms, task_weight=0.0)]

    def _rows(self, arrays: Arrays) -> Tensor:
        return public_rows(arrays, self.client.public.inputs)


def match(step: Step, distance: Callable[[Step, Tensor], Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return as loss the `distance` of the network's class scores to the step's targets, and {"distance": loss}."""
    apart = distance(step, step.task.outputs.scores(step.outputs))
    return apart, {"distance": apart}


class FedMD(Scores[FedMDOptions]):
    """Client side of FedMD: trains once on public labels; in each round on mean class scores, then private examples."""

    remembers = True  # whether the client has been trained

    @staticmethod
    def distance(step: Step, outputs: Tensor) -> Tensor:
        return l1_loss(outputs, step.labels)

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("of which it exchanges means", numbers=True)
        return Payload()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        settings, client = self.options, self.client
        begins = "begun" not in client.memory
        client.memory["begun"] = torch.ones(1, dtype=torch.uint8)
        phases = []
        if begins and settings.public_epochs:
            assert client.public.labels is not None  # as the traits say
            public = Examples(client.public.inputs, client.public.labels)
            phases.append(Phase(settings.public_epochs, client.optimisation(), examples=public, public=True))
        phases += self.digest(payload, settings.digest_epochs)
        phases.append(Phase((begins and settings.private_epochs) or client.request.epochs, client.optimisation()))
        return self.in_turn(phases)


class FedDF(Scores[FedDFOptions]):
    """Client side of FedDF: distils received mean class scores for an epoch, then trains on the client's examples."""

    @staticmethod
    def distance(step: Step, outputs: Tensor) -> Tensor:
        many_labels = step.task.outputs.meaning == "labels"
        return soft_divergence(outputs, step.labels.to(outputs.dtype), 1.0, many_labels=many_labels)

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("from whose mean the server learns")
        return Payload()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        private = Phase(self.client.request.epochs, self.client.optimisation())
        return self.in_turn([*self.digest(payload), private])
