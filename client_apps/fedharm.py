"""FedHARM, client side: networks learn similar descriptors of shared images (Kastellos et al., 2024, algorithm 1).

A descriptor is a vector of activations from the blocks of a network for one image. On a training message, a client
first runs the shared phase of the previous round, on the public dataset's images and towards the target in the message,
then the private phase of the current round. The reply has descriptors, from which the server computes the next target.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedhet.algorithms.alignment.descriptors import describe, gathered, summarised
from fedhet.algorithms.alignment.packing import pack_all, unpack_all
from fedhet.algorithms.alignment.targets import Kind, compress, distance_of
from fedhet.algorithms.graphs import UnsupportedArchitecture, architecture_graph, blocks, channel_means, output_features
from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.messages import Payload
from fedhet.methods.included.fedharm import FedHARMOptions
from fedhet.models.representation import Capturing, Output
from fedhet.training import Loss, Phase, Step, Term, reestimate

from .fedhenn import check_rows, reading_request


class FedHARM(ClientSide[FedHARMOptions]):
    """Trains on private examples with cross entropy (CE), then on shared images towards the global descriptors.

    The loss on shared images is alpha CE + (1 - alpha) L_cos, where L_cos is the cosine distance between the client's
    descriptors and the global descriptors.
    """

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Name of the last module in each block of the network; raises a ModelError if there are too few blocks."""
        settings = self.options
        try:
            return blocks(self.client.model, self.example, chosen=settings.blocks, count=len(settings.lengths))
        except UnsupportedArchitecture as error:
            raise ModelError(f"fedharm.blocks = {settings.blocks!r}: {error}") from error

    @cached_property
    def axes(self) -> list[int]:
        """Axis along which the features of each block's output lie."""
        graph = architecture_graph(self.client.model, self.example)
        return [output_features(graph, name).axis for name in self.blocks]

    @property
    def example(self) -> Tensor:
        """Two transformed training examples, with which the network's graph is read."""
        return self.client.transform(self.client.data.train.inputs[:2])

    def handshake(self, payload: Payload) -> Payload:
        client = self.client
        client.check_classes(outputs=True)
        if not self.options.aligns_blocks:
            return Payload()
        filled = summarised(client.model, self.blocks, client.data.train.inputs[:1], client.transform, self.filled)
        return Payload(values={"slots": [part.shape[1] for part in filled]})

    # ---- training

    def phases(self, payload: Payload) -> list[Phase]:
        """Return the previous round's shared phase and this round's private phase, with one Adam optimiser for both."""
        phases = self._on_shared(payload) if "shared" in payload.values else []
        if not self.client.request.closing:
            phases.append(Phase(self.client.request.epochs, self.client.optimisation(0, 2), continues=True))
        return phases

    def _on_shared(self, payload: Payload) -> list[Phase]:
        """Return the phase on shared images; an empty list if there is neither a target nor a task loss."""
        client, settings, request = self.client, self.options, self.client.request
        target = self.target(payload) if settings.aligns else None
        if target is None and not settings.task_weight:
            return []
        inputs, labels = client.public.inputs, client.public.labels
        if labels is None:
            labels = torch.zeros(len(inputs), dtype=torch.long, device=client.device)
        captures, terms = ({}, ()) if target is None else self._towards(target)
        phase = Phase(
            request.epochs,
            # It is the second half of the previous round, or of this one if it closes the run.
            client.optimisation(1 if request.closing else -1, 2),
            steps=settings.public_steps,
            examples=Examples(inputs, labels),
            terms=terms,
            task_weight=settings.task_weight,
            captures=captures,
            continues=True,
        )
        return [phase]

    def _towards(self, target: Sequence[Tensor]) -> tuple[Mapping[str, Capturing], tuple[Loss, ...]]:
        """Return the values to capture in training, and a loss term with their distance to the target."""
        settings, client = self.options, self.client
        places = self._described()[1] if self.chooses else None
        captures: dict[str, Capturing] = {"phi": client.representation}
        if settings.align != "spectral":
            captures = {name: Output(client.model, name) for name in self.blocks}
        summary = None if settings.align == "spectral" else self.summary
        kind, weight = settings.align, settings.weight
        return captures, (Term(distance, kind=kind, weight=weight, target=target, places=places, summary=summary),)

    def target(self, payload: Payload) -> list[Tensor] | None:
        """Return the received target, a tensor for each block or one for class probabilities; None without a target."""
        client = self.client
        if "target" not in payload.arrays:
            return None
        with reading_request("target"):
            parts = unpack_all(payload.arrays["target"], self.options.parts)
            for part in parts:
                check_rows(part, len(client.public))
            return [client.to_device(part) for part in parts]

    # ---- descriptors

    def end(self, payload: Payload) -> Payload:
        """Return descriptors for the next target, and the mean distance to the last target."""
        client = self.client
        if client.config.batch_norm == "re-estimate":
            inputs = client.public.inputs if client.request.closing else client.data.train.inputs
            reestimate(client.model, inputs, client.transform)
        reply = super().end(payload)
        if "tell" in payload.values:
            reply.arrays["sent"] = pack_all(self.sent())
        return reply

    def sent(self) -> list[Tensor]:
        """Return descriptors, block outputs or class probabilities of the shared images, as the key `align` says."""
        settings, client, inputs = self.options, self.client, self.client.public.inputs
        if settings.align == "spectral":
            return [client.scores(inputs, "probabilities")]
        if self.chooses:
            return self._described()[0]
        summaries = summarised(client.model, self.blocks, inputs, client.transform, self.summary)
        return [compress(part) for part in summaries] if settings.align == "cka" else list(summaries)

    def _described(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return descriptors of the shared images, and the positions of the chosen activations."""
        client, public, settings = self.client, self.client.public, self.options
        return describe(client.model, self.blocks, public.inputs, public.labels, settings.lengths, client.transform)

    @property
    def chooses(self) -> bool:
        """Whether the activations in a descriptor are chosen by their gradients."""
        return self.options.align == "cosine"

    def filled(self, block: int, output: Tensor) -> Tensor:
        """Return the first k values (n, k) of a block's output (n, ...), for its k entries in a descriptor."""
        return output.flatten(1)[:, : self.options.lengths[block]]

    def summary(self, block: int, output: Tensor) -> Tensor:
        """Return the channel means (n, k) of a block's output (n, ...), which replace chosen activations."""
        return channel_means(output, self.axes[block])


def distance(
    step: Step,
    kind: Kind,
    weight: float,
    target: Sequence[Tensor],
    places: Sequence[Tensor] | None,
    summary: Callable[[int, Tensor], Tensor] | None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the weighted distance of descriptors (at `places` or by `summary`) to `target`, and the distance alone."""
    features = [*step.captured.values()]
    if places is not None:
        features = [gathered(f, place[step.rows]) for f, place in zip(features, places, strict=True)]
    elif summary is not None:
        features = [summary(block, feature) for block, feature in enumerate(features)]
    value = distance_of(kind)(features, [part[step.rows] for part in target])
    return weight * value, {"distance": value}
