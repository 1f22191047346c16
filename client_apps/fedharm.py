"""Client side of FedHARM: trains on public images towards the mean descriptors, then on private examples."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedhet.algorithms.alignment.targets import Kind, describe, distance_to_target, gathered, pack_all, unpack_all
from fedhet.algorithms.graphs import UnsupportedArchitecture, blocks
from fedhet.client import ClientSide, Payload
from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.models.representation import Capturing, Output
from fedhet.strategies.fedharm import Keys
from fedhet.training import Phase, Step, Term, reestimate
from fedhet.utils.inputs import for_each


class FedHARM(ClientSide[Keys]):
    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Names of the last modules of the network's blocks; raises a ModelError if there are too few blocks."""
        keys = self.options
        example = self.client.transform(self.client.data.train.inputs[:2])
        try:
            return blocks(self.client.model, example, chosen=keys.blocks, count=len(keys.lengths))
        except UnsupportedArchitecture as error:
            raise ModelError(f"fedharm.blocks = {keys.blocks!r}: {error}") from error

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_classes(outputs=True)
        if self.options.alpha < 1 and self.options.align == "cosine":
            example = self.client.data.train.inputs[:1]
            # Under `dp-noise`, a refusal must not depend on the example.
            self._described(for_each(example, torch.zeros_like) if self.client.privacy else example, None)
        return Payload()

    def phases(self, payload: Payload) -> list[Phase]:
        """Return up to two phases: on public images, with the target that the server sent, then on private examples."""
        phases = self._on_shared(payload) if "shared" in payload.values else []
        if not self.client.request.closing:
            phases.append(Phase(self.client.request.epochs, self.client.optimisation(0, 2), continues=True))
        return phases

    def _on_shared(self, payload: Payload) -> list[Phase]:
        client = self.client
        keys = self.options
        target = self.target(payload) if keys.alpha < 1 else None
        if target is None and not keys.alpha:
            return []
        inputs = client.public.inputs
        labels = client.public.labels
        if labels is None:
            labels = torch.zeros(len(inputs), dtype=torch.long, device=client.device)
        phase = Phase(
            client.request.epochs,
            # It is the second half of the previous round, or of this one if it closes the run.
            client.optimisation(1 if client.request.closing else -1, 2),
            steps=keys.public_steps,
            examples=Examples(inputs, labels),
            public=True,
            terms=() if target is None else (self._towards(target),),
            task_weight=1.0 if keys.divide else keys.alpha,
            continues=True,
        )
        return [phase]

    def _towards(self, target: Sequence[Tensor]) -> Term:
        kind = self.options.align
        public = self.client.public
        places = None
        captures: dict[str, Capturing] = {"phi": self.client.representation}
        if kind == "cosine":
            captures = {name: Output(self.client.model, name) for name in self.blocks}
            places = self._described(public.inputs, public.labels)[1]
        weight = (1 - self.options.alpha) / (self.options.alpha if self.options.divide else 1.0)
        constants = {"kind": kind, "weight": weight, "target": target, "places": places}
        # CKA compares images with each other.
        return Term(distance, captures=captures, weighted=kind == "cosine", **constants)

    def target(self, payload: Payload) -> list[Tensor] | None:
        if "target" not in payload.arrays:
            return None
        return [self.client.to_device(part) for part in unpack_all(payload.arrays["target"], self.options.parts)]

    def end(self, payload: Payload) -> Payload:
        client = self.client
        if client.config.batch_norm == "re-estimate":
            inputs = client.public.inputs if client.request.closing else client.data.train.inputs
            reestimate(client.model, inputs, client.transform)
        reply = super().end(payload)
        if "tell" in payload.values:
            reply.arrays["sent"] = pack_all(self.sent())
        return reply

    def sent(self) -> list[Tensor]:
        public = self.client.public
        if self.options.align == "spectral":
            return [self.client.scores(public.inputs, "probabilities")]
        return self._described(public.inputs, public.labels)[0]

    def _described(self, inputs: Tensor, labels: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        return describe(self.client.model, self.blocks, inputs, labels, self.options.lengths, self.client.transform)


def distance(
    step: Step, kind: Kind, weight: float, target: Sequence[Tensor], places: Sequence[Tensor] | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return `weight` times the distance of a step's captured activations from `target`, and {"distance": distance}.

    For `kind` `cosine`, the distance is 1 - cosine between the activations at the positions `places` (n, k) in the
    outputs of each captured block, and `target` (n, width) for the block. For `spectral`, it is 1 - CKA of the captured
    representations and the only tensor in `target`, and `places` is None. Rows belong to n public images.
    """
    features = [*step.captured.values()]
    if places is not None:
        features = [gathered(f, place[step.rows]) for f, place in zip(features, places, strict=True)]
    value = distance_to_target(kind, features, [part[step.rows] for part in target], step.mean)
    return weight * value, {"distance": value}
