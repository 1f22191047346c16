"""FedHeNN, client side: training with a penalty on the distance of representations (Makhija et al., ICML 2022).

The penalty is eta(t) (1 - CKA). CKA compares the kernel of the client's representations of X(t) with a target kernel,
where X(t) are the round's alignment examples (RAD, see `fedhet.algorithms.alignment.targets`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedhet.algorithms.alignment import Alignment, distance_to
from fedhet.algorithms.alignment.cka import Kernel
from fedhet.algorithms.alignment.targets import compress, pack, unpack
from fedhet.client import ClientSide
from fedhet.errors import DataError, ModelError
from fedhet.messages import Arrays, Payload, WireError, to_tensor
from fedhet.methods.included.fedhenn import AUGMENTATION, FedHeNNOptions
from fedhet.models.representation import ROWS_AT_ONCE, RandomStream, Representation
from fedhet.training import Loss, Step, Term, of_tokens
from fedhet.utils.randomness import torch_generator


@dataclass(frozen=True)
class PublicRows:
    """Rows of the public dataset; a row is an example, or one token of an example.

    `inputs` (n, ...) has the raw example of each row, and `tokens` (n,) int64 the position of its token.
    """

    inputs: Tensor
    tokens: Tensor | None = None


def public_rows(rows: Tensor, of: Tensor, tokens: int) -> PublicRows:
    """Return the rows with numbers `rows` (n,) of examples `of`; row r is token r % tokens of example r // tokens."""
    rows = rows.long().to(of.device)
    if not ((rows >= 0) & (rows < len(of) * tokens)).all():
        raise WireError("the server's request has rows that are not in the public dataset: use one version of fedhet")
    return PublicRows(of[rows]) if tokens == 1 else PublicRows(of[rows // tokens], rows % tokens)


def finite(outputs: Tensor, what: str) -> Tensor:
    """Return the client's `outputs` for public examples; raises a ModelError if they are not finite."""
    if not outputs.isfinite().all():
        raise ModelError(f"the client's {what} are not finite: training may have diverged, try a lower learning-rate")
    return outputs


class FedHeNN(ClientSide[FedHeNNOptions]):
    """Trains with a penalty on the distance of representations to a target (Makhija et al., 2022, equations 5, 6)."""

    def handshake(self, payload: Payload) -> Payload:
        settings = self.options
        if settings.eta0 and settings.rad_source == "train-union" and self.client.own_data:
            raise DataError(
                f"client {self.client.name}: fedhenn.rad-source = 'train-union' is the union of the configured data "
                "set's training parts, but this client has its own data: let its data function return a public "
                "dataset as `public`, and set rad-source = held-out"
            )
        if settings.sent == "posteriors":
            self.client.check_scores(
                "whose posteriors the spectral target compares (fedhenn.target = kernel compares representations)",
                tokens=True,
            )
        tokens = self.client.tokens
        return Payload(values={"tokens": tokens} if settings.eta0 and tokens > 1 else {})

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the term eta(t) d(Phi_i(X(t)), target) on batches of the alignment examples X(t) (RAD).

        With `rad-every` = k, the term is added in every k-th step, with k times the weight.
        """
        settings, client, eta = self.options, self.client, payload.values.get("eta", 0.0)
        if not eta:
            return ()
        rad = self._rad(payload.arrays["rad"], client.request.round)
        target, generator = self.target(payload, rad), client.generator("rad rows")
        alignment = Alignment(settings.kernel, target, batch=settings.rad_batch, generator=generator)
        stream = RandomStream(client.seed("rad dropout"))

        def drawn(number: int, _examples: int) -> Mapping[str, Any] | None:
            if number % settings.rad_every:
                return None
            rows = alignment.rows()
            tokens = None if rad.tokens is None else rad.tokens[rows]
            return {"inputs": client.transform(rad.inputs[rows]), "tokens": tokens, "target": alignment.target(rows)}

        weight, phi = eta * settings.rad_every, client.representation
        own = {"weight": weight, "representation": phi, "stream": stream, "kind": alignment.kind}
        return (Term(on_rad, draw=drawn, weighted=True, public=True, **own),)

    def end(self, payload: Payload) -> Payload:
        """Return shared weights, the mean distance to the target, and outputs for the next alignment examples."""
        reply = super().end(payload)
        if "next-rad" in payload.arrays:
            rad = self._rad(payload.arrays["next-rad"], self.client.request.round + 1)
            reply.arrays[self.options.sent] = self._part_of_target(rad)
        return reply

    def _rad(self, arrays: Arrays, round: int) -> PublicRows:
        """Return the representation alignment dataset (RAD); clients augment its training images identically."""
        client, config = self.client, self.client.config
        rad = public_rows(to_tensor(arrays["rows"]), client.public.inputs, client.tokens)
        if client.augment and config.augment and self.options.makes_public_dataset:
            stream = torch_generator(config.seed, AUGMENTATION, round)
            return replace(rad, inputs=client.augment(rad.inputs, stream))
        return rad

    def target(self, payload: Payload, rad: PublicRows) -> Tensor:
        """Return the received target, or compute it with the client's network before this round's training."""
        if "target" not in payload.arrays:  # homogeneous: by the global model W(t-1), which was just received
            return self.represent(rad)
        return self.client.to_device(unpack(payload.arrays["target"]))

    def posteriors(self, rad: PublicRows) -> Tensor:
        """Return the class probabilities (n, C) of the alignment examples (RAD), in evaluation mode."""
        return self.client.scores(rad.inputs, "probabilities", rad.tokens)

    def _part_of_target(self, rad: PublicRows) -> Arrays:
        """Return the posteriors or representations of the RAD from which the server computes the next target."""
        what = "outputs for the alignment examples (RAD)"
        if self.options.sent == "posteriors":
            return pack(finite(self.posteriors(rad), what))
        return pack(compress(finite(self.represent(rad), what)))

    def represent(self, rows: PublicRows) -> Tensor:
        """Return the representations Phi (n, d) of rows of the public dataset, in evaluation mode."""
        client = self.client
        return client.read(rows.inputs, until=client.representation, rows=ROWS_AT_ONCE, tokens=rows.tokens)


def on_rad(
    step: Step,
    inputs: Tensor,
    tokens: Tensor | None,
    target: Tensor,
    weight: float,
    representation: Representation,
    stream: RandomStream,
    kind: tuple[Kernel, bool],
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the distance between representations of `inputs` and their `target`, times `weight` and unweighted."""
    phi = step.represent(inputs, representation, stream)
    distance = distance_to(phi if tokens is None else of_tokens(phi, tokens), target, kind=kind)
    return weight * distance, {"distance": distance}
