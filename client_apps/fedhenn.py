"""Client side of FedHeNN: adds eta(t) (1 - CKA) of its kernel of X(t) and the target to the loss (equation 5)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.algorithms.alignment.cka import distance_to
from fedhet.algorithms.alignment.targets import compress, pack, unpack
from fedhet.algorithms.contrast import info_nce
from fedhet.messages import Arrays, Payload
from fedhet.models.representation import ROWS_AT_ONCE, RandomStream, Representation
from fedhet.strategies.fedhenn import Keys
from fedhet.training import Loss, Step, Term
from fedhet.utils.machine import brought
from fedhet.utils.randomness import torch_generator

from .families.by_class import SameWidth
from .families.scores import public_rows

TEMPERATURE = 0.2
"""T of `target = contrast`."""

Distance = Callable[[Tensor, Tensor], Tensor]
"""Function of representations (n, d) and the target of the same n examples, which returns a scalar."""


class FedHeNN(SameWidth[Keys]):
    def handshake(self, payload: Payload) -> Payload:
        if self.options.sent == "posteriors":
            self.client.check_scores(
                "whose posteriors the spectral target compares (fedhenn.target = kernel compares representations)"
            )
        if self.options.target != "contrast":
            return Payload()
        return Payload(values={"width": self.represent(self.client.data.train.inputs[:2]).shape[1]})

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        if "eta" not in payload.values:
            return ()
        client = self.client
        keys = self.options
        rad = self.rad(payload.arrays["rad"], client.request.round)
        target = self.target(payload, rad)
        # The Procrustes distance has no estimate on mini-batches.
        in_batches = keys.kernel != "procrustes" and 0 < keys.rad_batch < len(target)
        generator = client.generator("rad rows")
        distance: Distance = partial(distance_to, kind=(keys.kernel, in_batches))
        if keys.target == "contrast":
            distance = partial(info_nce, temperature=TEMPERATURE)

        def draw(step: int, _examples: int) -> Mapping[str, Any] | None:
            if step % keys.rad_every:
                return None
            rows: slice | Tensor = slice(None)
            if in_batches:
                rows = brought(torch.randperm(len(target), generator=generator)[: keys.rad_batch], client.device)
            return {"inputs": client.transform(rad[rows]), "target": target[rows]}

        constants = {
            "eta": payload.values["eta"] * keys.rad_every,
            "phi": client.representation,
            "stream": RandomStream(client.seed("rad dropout")),
            "distance": distance,
        }
        return (Term(misalignment, draw=draw, weighted=True, public=True, **constants),)

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        if "next-rad" in payload.arrays:
            rad = self.rad(payload.arrays["next-rad"], self.client.request.round + 1)
            reply.arrays[self.options.sent] = pack(self.values(rad))
        return reply

    def rad(self, arrays: Arrays, round: int) -> Tensor:
        """Return the alignment examples (L, ...) of a round; augmented ones are the same for all clients."""
        rad = public_rows(arrays, self.client.public.inputs)
        if self.client.augment and self.options.makes_public_dataset:
            return self.client.augment(rad, torch_generator(self.client.config.seed, "rad augmentation", round))
        return rad

    def target(self, payload: Payload, rad: Tensor) -> Tensor:
        """Return the received target (L, r) or, without one, Phi (L, d) of the global model W(t - 1)."""
        if "target" not in payload.arrays:
            return self.represent(rad)
        return self.client.to_device(unpack(payload.arrays["target"]))

    def values(self, rad: Tensor) -> Tensor:
        """Return what the server makes targets of: posteriors (L, C), or representations (L, r)."""
        if self.options.target == "spectral":
            return self.client.scores(rad, "probabilities")
        features = self.represent(rad)
        return F.normalize(features) if self.options.target == "contrast" else compress(features)

    def represent(self, rad: Tensor) -> Tensor:
        return self.client.read(rad, until=self.client.representation, rows=ROWS_AT_ONCE)


def misalignment(
    step: Step,
    inputs: Tensor,
    target: Tensor,
    eta: float,
    phi: Representation,
    stream: RandomStream,
    distance: Distance,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return `eta` times the `distance` of Phi (n, d) of public `inputs` from the `target`, and {"distance": ...}.

    Dropout is drawn from `stream`.
    """
    apart = distance(step.represent(inputs, phi, stream), target)
    return eta * apart, {"distance": apart}
