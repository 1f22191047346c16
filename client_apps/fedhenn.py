"""Client side of FedHeNN: training with a penalty on the distance of representations (Makhija et al., ICML 2022).

The penalty is eta(t) (1 - CKA), with the weight eta(t) in round t. CKA compares the kernel of the client's
representations of public examples X(t) (the RAD, see `fedhet.algorithms.alignment.targets`) with a target kernel.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import Kernel, distance_to
from fedhet.algorithms.alignment.targets import compress, pack, unpack
from fedhet.client import ClientSide
from fedhet.errors import DataError
from fedhet.messages import Arrays, Payload
from fedhet.methods.included.fedhenn import AUGMENTATION, FedHeNNOptions
from fedhet.models.representation import ROWS_AT_ONCE, RandomStream, Representation
from fedhet.training import Loss, Step, Term
from fedhet.utils.machine import brought
from fedhet.utils.randomness import torch_generator

from .families.scores import public_rows


class FedHeNN(ClientSide[FedHeNNOptions]):
    """Client side of FedHeNN: penalises the distance of representations to a target (Makhija et al., 2022, eq. 5)."""

    def handshake(self, payload: Payload) -> Payload:
        settings = self.options
        if settings.eta0 and settings.rad_source == "train-union" and self.client.own_data:
            raise DataError(
                f"client {self.client.name}: fedhenn.rad-source = 'train-union' takes the public examples from the "
                "training examples of all clients, which the server does not have if clients bring their own data: "
                "set fedhenn.rad-source = held-out, and let the data function return public examples as `public`"
            )
        if settings.sent == "posteriors":
            self.client.check_scores(
                "whose posteriors the spectral target compares (fedhenn.target = kernel compares representations)"
            )
        return Payload()

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the loss term eta(t) (1 - CKA) of representations of the alignment examples X(t) and their target.

        The server's `payload` has the weight eta(t) and the indices of X(t) in the public dataset. With `rad-every` =
        k, the term is added in every k-th step, with k times the weight.
        """
        settings, client, eta = self.options, self.client, payload.values.get("eta", 0.0)
        if not eta:
            return ()
        rad = self._rad(payload.arrays["rad"], client.request.round)
        target, generator = self.target(payload, rad), client.generator("rad rows")
        # The Procrustes distance has no estimate on mini-batches.
        some = settings.kernel != "procrustes" and 0 < settings.rad_batch < len(target)
        stream = RandomStream(client.seed("rad dropout"))

        def drawn(number: int, _examples: int) -> Mapping[str, Any] | None:
            if number % settings.rad_every:
                return None
            rows: slice | Tensor = slice(None)
            if some:
                rows = torch.randperm(len(target), generator=generator)[: settings.rad_batch]
                rows = brought(rows, client.device)
            return {"inputs": client.transform(rad[rows]), "target": target[rows]}

        weight, phi = eta * settings.rad_every, client.representation
        own = {"weight": weight, "representation": phi, "stream": stream, "kind": (settings.kernel, some)}
        return (Term(on_rad, draw=drawn, weighted=True, public=True, **own),)

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        if "next-rad" in payload.arrays:
            rad = self._rad(payload.arrays["next-rad"], self.client.request.round + 1)
            own = self.posteriors(rad) if self.options.sent == "posteriors" else compress(self.represent(rad))
            reply.arrays[self.options.sent] = pack(own)
        return reply

    def _rad(self, arrays: Arrays, round: int) -> Tensor:
        client, config = self.client, self.client.config
        rad = public_rows(arrays, client.public.inputs)
        if client.augment and config.augment and self.options.makes_public_dataset:  # identically on all clients
            return client.augment(rad, torch_generator(config.seed, AUGMENTATION, round))
        return rad

    def target(self, payload: Payload, rad: Tensor) -> Tensor:
        if "target" not in payload.arrays:  # homogeneous: by the global model W(t-1), which was just received
            return self.represent(rad)
        return self.client.to_device(unpack(payload.arrays["target"]))

    def posteriors(self, rad: Tensor) -> Tensor:
        return self.client.scores(rad, "probabilities")

    def represent(self, rad: Tensor) -> Tensor:
        return self.client.read(rad, until=self.client.representation, rows=ROWS_AT_ONCE)


def on_rad(
    step: Step,
    inputs: Tensor,
    target: Tensor,
    weight: float,
    representation: Representation,
    stream: RandomStream,
    kind: tuple[Kernel, bool],
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return `weight` times the distance of representations from FedHeNN's `target`, and {"distance": distance}.

    The client's network computes representations (n, d) of public `inputs` with dropout drawn from `stream`. `kind` is
    a pair: the distance (1 - CKA with a "linear" or "rbf" kernel, or "procrustes"), and whether the inputs are a random
    mini-batch, for which debiased CKA is used.
    """
    distance = distance_to(step.represent(inputs, representation, stream), target, kind=kind)
    return weight * distance, {"distance": distance}
