"""FedHeNN, client half: the task's loss plus eta(t) times a distance of representations (Makhija et al., ICML 2022)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.client import Client, ClientHalf, LostState
from fedhet.errors import ModelError
from fedhet.exchange import Exchange
from fedhet.randomness import numpy_generator
from fedhet.representations import Alignment, RandomStream, isolated, represent
from fedhet.representations.targets import compress, mean_rbf_blocks, pack, unpack, unpack_blocks
from fedhet.training import LossTerm, Step
from fedhet.wire import Arrays, Payload, to_tensor


class FedHeNN(ClientHalf):
    """Local training of equation 5 (homogeneous) or 6 (heterogeneous)."""

    personal = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._term: AlignmentTerm | None = None

    def exchange(self) -> Exchange:
        """All weights where the server averages them or computes representations from them; else nothing."""
        own = self.parameters
        if own.setting == "homogeneous":
            return super().exchange()
        # The server cannot represent anything without BatchNorm's statistics, which nobody averages here.
        return Exchange("all" if own.representations == "server" else "nothing")

    @property
    def starts_together(self) -> bool:
        """Heterogeneous clients start from weights of their own, even where the server is told them."""
        return self.parameters.setting == "homogeneous"

    def greet(self, payload: Payload) -> Payload:
        """Keep the pool, and tell what some of it looks like before training."""
        pool = self.client.data.shared
        if "pool" in payload.arrays:
            pool = to_tensor(payload.arrays["pool"]["inputs"])
            self.client.keep_pool(pool)
        return self._probe(pool)

    def finish(self, payload: Payload) -> Payload:
        """Tell what it looks like after training."""
        digest = payload.values.get("pool")
        try:
            return self._probe(self.client.pool(digest)) if digest else Payload()
        except LostState:  # the evaluation counts without it
            return Payload()

    def answer(self, question: str, payload: Payload) -> Payload:
        """The representation of the rows asked for."""
        return Payload({"features": self._representation(payload)})

    def terms(self, payload: Payload) -> tuple[LossTerm, ...]:
        """eta(t) d(Phi_i(X(t)), target); none in the first round, or where there is no target yet."""
        own, client, eta = self.parameters, self.client, payload.values.get("eta", 0.0)
        if not eta:
            return ()
        rad = client.pool(payload.values["pool"])[to_tensor(payload.arrays["rad"]["rows"]).long()]
        alignment = Alignment(
            own.kernel,
            self._target(payload, rad),
            batch=own.rad_batch,
            generator=client.generator("rad rows"),
            threshold=own.rbf_threshold,
        )
        self._term = AlignmentTerm(client, rad, alignment, eta, own.rad_every, own.rad_source == "train-union")
        return (self._term,)

    def reply(self, payload: Payload) -> Payload:
        """What travels of the model, the representation of X(t+1), and how far from the target the model was."""
        reply = super().reply(payload)
        if "next-rad" in payload.arrays:
            reply.arrays["features"] = self._representation(payload)
        if self._term is not None and self._term.count:
            reply.values["distance"] = float(self._term.total) / self._term.count
        return reply

    def _target(self, payload: Payload, rad: Tensor) -> Tensor | Sequence[Tensor]:
        own = self.parameters
        if own.setting == "homogeneous":  # the global model's, W(t-1), which is what was just received
            features = self._features(rad)
            if own.kernel != "rbf":
                return features
            return mean_rbf_blocks([features], [1.0], own.rad_batch, threshold=own.rbf_threshold)
        sent = payload.arrays["target"]
        if own.kernel == "rbf":
            return [block.to(rad.device) for block in unpack_blocks(sent)]
        return unpack(sent).values.to(rad.device)

    def _representation(self, payload: Payload) -> Arrays:
        own = self.parameters
        rows = to_tensor(payload.arrays["next-rad"]["rows"]).long()
        features = self._features(self.client.pool(payload.values["pool"])[rows])
        if not features.isfinite().all():
            raise ModelError("its representation has values that are not finite: has training diverged?")
        return pack(compress(features, error=own.target_error), own.target_dtype)

    def _probe(self, pool: Tensor | None) -> Payload:
        if pool is None or not self.parameters.probe or not self.parameters.eta0:
            return Payload()
        order = numpy_generator(self.client.config.seed, "probe").permutation(len(pool))[: self.parameters.probe]
        features = self._features(pool[torch.from_numpy(order)].to(self.client.device))
        return Payload({"probe": pack(compress(features))} if features.isfinite().all() else {})

    def _features(self, inputs: Tensor) -> Tensor:
        """Phi of raw inputs, (n, d), in evaluation mode.

        Raises:
            ModelError: the head's input is no (n, d).
        """
        try:
            return represent(self.client.representation, inputs, self.client.transform)
        except ValueError as error:
            raise ModelError(str(error)) from error


class AlignmentTerm:
    """eta d(Phi(rad), target), taken on some rows of the RAD in each step (or every k-th, k times as heavy).

    The forward pass leaves no trace: BatchNorm's statistics and the task's random stream are as without it.
    """

    def __init__(
        self, client: Client, rad: Tensor, alignment: Alignment, eta: float, every: int, augmented: bool
    ) -> None:
        self._client, self._rad, self._alignment = client, rad, alignment
        self._eta, self._every = eta, every
        self._stream = RandomStream(client.seed("rad dropout"))
        self._augmentation = client.generator("rad augmentation") if augmented else None
        self._step = 0
        self.total, self.count = torch.zeros((), device=client.device), 0

    def __call__(self, step: Step) -> Tensor | None:
        """The term of this step, None in steps that leave it out."""
        self._step += 1
        if (self._step - 1) % self._every:
            return None
        rows, client = self._alignment.rows(), self._client
        inputs = self._rad[rows]
        inputs = client.transform(inputs) if self._augmentation is None else client.prepare(inputs, self._augmentation)
        with isolated(client.model, self._stream):
            distance = self._alignment.distance(client.representation(inputs), rows)
        self.total += distance.detach()
        self.count += 1
        return self._eta * self._every * distance
