"""FedHARM, client side: networks learn to describe shared images alike (Kastellos et al., 2024, algorithm 1).

A message begins with the shared phase that closes the round before, towards the target that came with it, and goes on
with its own private phase; descriptors for the next target go up with the reply.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.graphs import UnsupportedArchitecture, blocks
from fedhet.learning import Loss, Phase, Step, reestimate
from fedhet.methods import fedharm
from fedhet.representations import Capturing, Output
from fedhet.representations.descriptors import channel_means, describe, gathered, summarised
from fedhet.representations.packing import Factor, pack_all, unpack_all
from fedhet.representations.shared_images import distance_of
from fedhet.representations.targets import compress
from fedhet.wire import Payload

from ._received import check_rows, reading_request  # noqa: TID251 - this folder is fedhet.client_apps


class FedHARM(ClientSide[fedharm.FedHARMParameters]):
    """Private phase: CE; shared phase: alpha CE + (1 - alpha) L_cos, the distance from the global descriptors."""

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Names of the modules that end the network's blocks; raises ModelError where there are too few."""
        client, own = self.client, self.parameters
        try:
            example = client.transform(client.data.train.inputs[:2])
            return blocks(client.model, example, chosen=own.blocks, count=len(own.lengths))
        except UnsupportedArchitecture as error:
            raise ModelError(f"fedharm.blocks = {own.blocks!r}: {error}") from error

    def handshake(self, payload: Payload) -> Payload:
        """Return how many of the slots each block fills; raises DataError where examples have no single class."""
        client = self.client
        client.check_classes(outputs=True)
        if not self.parameters.aligns_blocks:
            return Payload()
        filled = summarised(client.model, self.blocks, client.data.train.inputs[:1], client.transform, self.filled)
        return Payload(values={"slots": [part.shape[1] for part in filled]})

    # ---- training

    def phases(self, payload: Payload) -> list[Phase]:
        """The shared phase of the round before, then this round's private one; one Adam serves both."""
        phases = self._on_shared(payload) if "shared" in payload.values else []
        if not self.client.request.closing:
            phases.append(Phase(self.client.request.epochs, self.client.optimisation(0, 2), continues=True))
        return phases

    def _on_shared(self, payload: Payload) -> list[Phase]:
        """One phase, if there is anything to train on."""
        client, own, request = self.client, self.parameters, self.client.request
        target = self.target(payload) if own.aligns else None
        if target is None and not own.task_weight:
            return []
        inputs, labels = client.public.inputs, client.public.labels
        if labels is None:
            labels = torch.zeros(len(inputs), dtype=torch.long, device=client.device)
        captures, terms = ({}, ()) if target is None else self._towards(target)
        phase = Phase(
            request.epochs,
            # It is the second half of its round, which is the one before unless it closes the run.
            client.optimisation(1 if request.closing else -1, 2),
            steps=own.public_steps,
            examples=Examples(inputs, labels),
            terms=terms,
            task_weight=own.task_weight,
            captures=captures,
            continues=True,
            measured="" if request.closing else fedharm.BETWEEN,
        )
        return [phase]

    def _towards(self, target: Sequence[Tensor]) -> tuple[Mapping[str, Capturing], tuple[Loss, ...]]:
        """The values captured of the network in training mode, and the term of their distance to the target."""
        own, client, distance_from = self.parameters, self.client, distance_of(self.parameters.align)
        places = self._described()[1] if self.chooses else None
        captures: dict[str, Capturing] = {"phi": client.representation}
        if own.align != "spectral":
            captures = {name: Output(client.model, name) for name in self.blocks}

        def distance(step: Step) -> tuple[Tensor, Mapping[str, Tensor]]:
            features = [step.captured[name] for name in captures]
            if places is not None:
                features = [gathered(f, place[step.rows]) for f, place in zip(features, places, strict=True)]
            elif own.align != "spectral":
                features = [self.summary(block, feature) for block, feature in enumerate(features)]
            value = distance_from(features, [part[step.rows] for part in target])
            return own.weight * value, {"distance": value}

        return captures, (distance,)

    def target(self, payload: Payload) -> list[Tensor] | None:
        """The target that came, part by part; None where there is none."""
        client = self.client
        if "target" not in payload.arrays:
            return None
        with reading_request("target"):
            parts = unpack_all(payload.arrays["target"], self.parameters.parts)
            for part in parts:
                check_rows(part, len(client.public))
            return [client.beside(part) for part in parts]

    # ---- descriptors

    def end(self, payload: Payload) -> Payload:
        """Return descriptors for the next target, and the mean distance to the last one."""
        client = self.client
        if client.config.batch_norm == "re-estimate":
            inputs = client.public.inputs if client.request.closing else client.data.train.inputs
            reestimate(client.model, inputs, client.transform)
        reply = super().end(payload)
        if "tell" in payload.values:
            reply.arrays["sent"] = pack_all(self.sent())
        return reply

    def sent(self) -> list[Factor]:
        """Descriptors, outputs of blocks, or posteriors of the shared images, in evaluation mode."""
        own, client, inputs = self.parameters, self.client, self.client.public.inputs
        if own.align == "spectral":
            return [Factor(client.scores(inputs, "probabilities"))]
        if self.chooses:
            return [Factor(part) for part in self._described()[0]]
        found = summarised(client.model, self.blocks, inputs, client.transform, self.summary)
        return [compress(part, error=fedharm.ERROR) if own.align == "cka" else Factor(part) for part in found]

    def _described(self) -> tuple[list[Tensor], list[Tensor]]:
        """Descriptors of the shared images, and the places of their activations."""
        client, public, own = self.client, self.client.public, self.parameters
        return describe(client.model, self.blocks, public.inputs, public.labels, own.lengths, client.transform)

    @property
    def chooses(self) -> bool:
        """Whether places of activations are chosen by their gradients."""
        return self.parameters.align == "cosine"

    def filled(self, block: int, output: Tensor) -> Tensor:
        """The first numbers (n, k) of a block's output (n, ...), as many as its part of a descriptor has."""
        return output.flatten(1)[:, : self.parameters.lengths[block]]

    def summary(self, block: int, output: Tensor) -> Tensor:
        """The values (n, k) of a block's output (n, ...) that are aligned where no places are chosen: channel means."""
        return channel_means(output)

    # ---- evaluation

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """The network; BatchNorm's statistics after the shared phase are those of its images, if taken anew."""
        if when == fedharm.BETWEEN and self.client.config.batch_norm == "re-estimate":
            reestimate(self.client.model, self.client.public.inputs, self.client.transform)
        return super().evaluate(when)
