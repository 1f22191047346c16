"""Client side of FedHeNN: adds eta(t) (1 - CKA) of its kernel of X(t) and the target to the loss (equation 5)."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from fedhet.algorithms.alignment.cka import Distance, distance_to
from fedhet.algorithms.alignment.targets import compress, pack, unpack
from fedhet.client import Loss, Payload, Step, Term
from fedhet.models.representation import RandomStream, Representation
from fedhet.strategies.fedhenn import Keys

from .families.by_class import SameWidth
from .families.scores import public_examples, some_rows


class FedHeNN(SameWidth[Keys]):
    def handshake(self, payload: Payload) -> Payload:
        if self.options.sent == "posteriors":
            self.client.check_scores("which the spectral target compares (fedhenn.target = kernel compares Phi)")
        width = self.client.represent(self.client.data.train.inputs[:2]).shape[1]
        return Payload(values={"width": width} if self.options.target == "contrast" else {})

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        if "eta" not in payload.values:
            return ()
        client = self.client
        keys = self.options
        rad = public_examples(client, payload.arrays["rad"], client.request.round)
        target = self.target(payload, rad)
        # The Procrustes distance has no estimate on mini-batches.
        size = 0 if keys.kernel == "procrustes" else keys.rad_batch
        draw = some_rows(client, rad, target, size, keys.rad_every, client.generator("rad rows"))
        kind = ("contrast" if keys.target == "contrast" else keys.kernel, 0 < size < len(target))
        eta = payload.values["eta"] * keys.rad_every
        phi = client.representation
        stream = RandomStream(client.seed("rad dropout"))
        return (Term(misalignment, draw=draw, weighted=True, public=True, eta=eta, phi=phi, stream=stream, kind=kind),)

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        if "next-rad" in payload.arrays:
            rad = public_examples(self.client, payload.arrays["next-rad"], self.client.request.round + 1)
            reply.arrays[self.options.sent] = pack(self.values(rad))
        return reply

    def values(self, rad: Tensor) -> Tensor:
        """Return what the server makes targets of: posteriors (L, C), or representations (L, r)."""
        if self.options.target == "spectral":
            return self.client.scores(rad, "probabilities")
        phi = self.client.represent(rad)
        return F.normalize(phi) if self.options.target == "contrast" else compress(phi)

    def target(self, payload: Payload, rad: Tensor) -> Tensor:
        """Return the received target (L, r) or, without one, Phi (L, d) of the global model W(t - 1)."""
        if "target" not in payload.arrays:
            return self.client.represent(rad)
        target = self.client.to_device(unpack(payload.arrays["target"]))
        if self.client.config.compiles and self.options.target == "kernel":
            # Each width is compiled, and the rank changes in every round. Columns of 0 leave the kernel as it is.
            rank = target.shape[1]
            target = F.pad(target, (0, 2 ** (rank - 1).bit_length() - rank))
        return target


def misalignment(
    step: Step, inputs: Tensor, target: Tensor, eta: float, phi: Representation, stream: RandomStream, kind: Distance
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return `eta` times the distance of Phi (n, d) of public `inputs` from the `target`, and {"distance": ...}."""
    distance = distance_to(step.represent(inputs, phi, stream), target, kind=kind)
    return eta * distance, {"distance": distance}
