"""FedHeNN, server half: clients align what their networks represent (Makhija et al., ICML 2022).

Heterogeneous clients (algorithm 2): the server makes the mean kernel K-bar(t-1) = sum_j w_j K_j of the peers'
representations of the RAD X(t), and each client is pulled towards it. Homogeneous clients (algorithm 1): weights are
averaged as in FedAvg, and each client is pulled towards the representation of the global model, which it computes.

One exchange a round: a client of round t receives the target on X(t), and returns its representation of X(t+1).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedhet import population
from fedhet.application import pool_digest
from fedhet.config import Value, option
from fedhet.errors import ConfigError, FedhetError
from fedhet.exchange import load_into
from fedhet.randomness import numpy_generator
from fedhet.replies import Reply
from fedhet.representations import Representation, linear_cka, represent
from fedhet.representations.targets import mean_rbf_blocks, mean_target, pack, pack_blocks, unpack
from fedhet.server import FederatedStrategy
from fedhet.wire import Arrays, Payload, WireError, to_arrays

LEAST_ROWS = 8
"""Rows on which similarity can be estimated: RBF blocks of at most as many have at least the four that HSIC_1 needs."""


@dataclass(frozen=True)
class Parameters:
    """FedHeNN's own keys, with the paper's values."""

    setting: str = option(
        "heterogeneous",
        "heterogeneous: personal models, kernels are shared; homogeneous: weights are averaged as well",
        choices=("heterogeneous", "homogeneous"),
    )
    eta0: float = option(0.001, "weight of the proximal term, eta(t) = eta0 f(t)", at_least=0)
    schedule: str = option("sqrt", "f(t), t = 0 in the first round", choices=("sqrt", "linear", "constant"))
    rad_size: int = option(5000, "rows of the pool in a round's RAD (at most the pool's)", at_least=LEAST_ROWS)
    rad_source: str = option(
        "held-out",
        "pool that the RAD is drawn from: held out of all training data, or the union of the clients' (the paper's)",
        choices=("held-out", "train-union"),
    )
    rad_batch: int = option(128, "rows of the RAD in a training step (8 or more); 0: all, as in the paper", at_least=0)
    rad_every: int = option(1, "take the term every so many steps, that much heavier", at_least=1)
    kernel: str = option(
        "linear",
        "kernel of CKA; procrustes: orthogonal Procrustes distance instead (homogeneous only)",
        choices=("linear", "rbf", "procrustes"),
    )
    rbf_threshold: float = option(0.5, "bandwidth of the RBF kernel in median distances", above=0)
    kernel_norm: str = option(
        "raw", "scale of each peer's kernel in the mean: raw, or divided by its norm", choices=("raw", "frobenius")
    )
    peers: str = option(
        "selected", "whose kernels are averaged: the last round's clients, or all", choices=("selected", "all")
    )
    peer_weights: str = option("uniform", "w_j: uniform, examples, or a comma-separated number for each client")
    representations: str = option(
        "clients",
        "who computes the peers' representations: clients send theirs and keep their models, or the server does from "
        "models that they send (the paper)",
        choices=("clients", "server"),
    )
    target_error: float = option(
        0.002, "error of the alignment's gradient that compression may cause; 0: features travel whole", at_least=0
    )
    target_dtype: str = option("float16", "dtype of kernels on the wire", choices=("float16", "float32"))
    probe: int = option(256, "pool rows for the report's CKA between clients before and after; 0: none", at_least=0)

    def __post_init__(self) -> None:
        """Check what goes together.

        Raises:
            ConfigError: what does not.
        """
        if self.kernel == "procrustes" and self.setting != "homogeneous":
            raise ConfigError(
                "fedhenn.kernel = 'procrustes' compares equally wide representations of one global model: it needs "
                "fedhenn.setting = 'homogeneous'"
            )
        if 0 < self.rad_batch < LEAST_ROWS:
            raise ConfigError(f"fedhenn.rad-batch = {self.rad_batch}: must be 0 (all rows) or at least {LEAST_ROWS}")
        if self.peer_weights not in ("uniform", "examples"):
            _listed(self.peer_weights)

    def eta(self, round: int) -> float:
        """The weight of the term in a round (from 1): eta0 f(t) with t = round - 1."""
        return self.eta0 * {"sqrt": (round - 1) ** 0.5, "linear": round - 1, "constant": 1.0}[self.schedule]


class FedHeNN(FederatedStrategy):
    """Equations 5 and 6: F(W_i) + eta(t) d_CKA(K_i, K-bar(t-1))."""

    name = "fedhenn"
    Parameters = Parameters
    common: ClassVar[Mapping[str, Value]] = {
        "rounds": 200,
        "fraction-train": 0.1,
        "local-epochs": 20,
        "batch-size": 10,
        "learning-rate": 0.01,
        "momentum": 0.5,
        "weight-decay": 1e-4,
        "closing-epochs": 10,
    }

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.homogeneous = self.parameters.setting == "homogeneous"
        self.equal_architectures = self.global_model = self.homogeneous

    # ---- greeting: the pool, once

    def greeting(self) -> Payload:
        """The pool that all RADs are drawn from."""
        if self.parameters.rad_source == "train-union":
            self.shared = population.training_union(self.config)
        if self.shared is None or not self.parameters.eta0:
            return Payload()
        return Payload({"pool": to_arrays({"inputs": self.shared})})

    def welcome(self, client: str, reply: Reply) -> None:
        """All clients must have the same pool; their representations of some of it are kept for the report."""
        values, said = self.state.values, reply.payload.values
        if not self.parameters.eta0:
            return
        if self.shared is not None:
            if "pool" not in values:
                values["pool"], values["pool-size"] = pool_digest(self.shared), len(self.shared)
        elif "pool" not in said:
            raise FedhetError(
                "there is no pool to align on: set shared-samples, or give make_server_app(shared=...), or have the "
                "clients' data function return it as `shared`"
            )
        elif values.setdefault("pool", said["pool"]) != said["pool"]:
            raise FedhetError("its shared pool is not the first client's: all must have the same examples in one order")
        else:
            values["pool-size"] = said["pool-size"]
        if values["pool-size"] < LEAST_ROWS:
            raise FedhetError(f"the pool has {values['pool-size']} examples: at least {LEAST_ROWS} are needed to align")
        if "probe" in reply.arrays:
            self.state.arrays[f"before-{client}"] = reply.arrays["probe"]

    # ---- a round

    def received_by_all(self) -> Payload:
        """The global model if there is one, and which pool is meant."""
        payload = super().received_by_all()
        if self.parameters.eta0:
            payload.values["pool"] = self.state.values["pool"]
        return payload

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """The target on X(t) and eta(t); the rows of X(t+1), on which the next target will be.

        There is no term in the first round, whose clients have learnt nothing yet.
        """
        payload = self.received_by_all()
        if not self.parameters.eta0:
            return dict.fromkeys(clients, payload)
        self._weights(clients)
        eta = self.parameters.eta(round) if round > 1 else 0.0
        target = None if self.homogeneous or not eta else self._target(round)
        if eta and (self.homogeneous or target):
            payload.values["eta"] = eta
            payload.arrays["rad"] = {"rows": self.rad(round)}
            if target:
                payload.arrays["target"] = target
        if self._told_in_replies:
            payload.arrays["next-rad"] = {"rows": self.rad(round + 1)}
        return dict.fromkeys(clients, payload)

    def check_reply(self, reply: Reply) -> None:
        """Representations must be there, and of the rows that were asked for."""
        super().check_reply(reply)
        if not math.isfinite(reply.payload.values.get("distance", 0.0)):
            raise WireError("its distance from the target is not finite")
        if "features" not in reply.arrays and self._told_in_replies:
            raise WireError("its representation is missing")
        if "features" in reply.arrays:
            try:
                rows = len(unpack(reply.arrays["features"]).values)
            except ValueError as error:
                raise WireError(f"its representation cannot be read: {error}") from error
            if rows != len(self.rad(1)):
                raise WireError(f"its representation has {rows} rows, the RAD {len(self.rad(1))}")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average weights (homogeneous), make the next target (heterogeneous), or keep the models to make it of."""
        if self.homogeneous:
            super().aggregate_fit(round, replies)
        elif self.parameters.representations == "server":
            sent = {f"peer-{c}": reply.arrays["model"] for c, reply in replies.items() if "model" in reply.arrays}
            self.state.values["peers"] = list(replies)
            self.state.arrays |= sent
        elif target := self._mean(_features(replies)):
            self.state.arrays["target"] = target
            self.state.values["target-round"] = round + 1
        distances = [r.payload.values["distance"] for r in replies.values() if "distance" in r.payload.values]
        return {"alignment": 1 - float(np.mean(distances))} if distances else {}

    def rad(self, round: int) -> np.ndarray[Any, Any]:
        """The pool's rows that are X(t), (L,) int32, drawn from the seed."""
        size = int(self.state.values["pool-size"])
        order = numpy_generator(self.config.seed, "rad", round).permutation(size)
        return order[: self.parameters.rad_size].astype(np.int32)

    @property
    def _told_in_replies(self) -> bool:
        """Whether clients send their representation of the next round's RAD with their training reply."""
        own = self.parameters
        return bool(own.eta0) and not self.homogeneous and own.representations == "clients" and own.peers == "selected"

    def _target(self, round: int) -> Arrays | None:
        """The mean kernel on X(t), as it travels; None as long as there is nobody to take it of."""
        if self.parameters.representations == "server":
            peers = [c for c in self.in_order(self.state.clients) if f"peer-{c}" in self.state.arrays]
            if self.parameters.peers == "selected":
                peers = [client for client in peers if client in self.state.values["peers"]]
            return self._mean({client: self._represent(client, round) for client in peers})
        if self.parameters.peers == "all":
            asked = {"next-rad": {"rows": self.rad(round)}}
            question = Payload(asked, {"pool": self.state.values["pool"]})
            return self._mean(_features(self.ask("features", dict.fromkeys(self.present, question))))
        # After a round that did not count, the last target is of other rows than this round's.
        return self.state.arrays["target"] if self.state.values.get("target-round") == round else None

    def _represent(self, client: str, round: int) -> Tensor:
        """A stored client model's representation of X(t)."""
        assert self.shared is not None
        model = self.network_of(client)
        load_into(model.state_dict(), self.state.arrays[f"peer-{client}"])
        rad = self.shared[torch.from_numpy(self.rad(round)).long()]
        return represent(Representation(model, self.config.head), rad, self.transform)

    def _mean(self, features: Mapping[str, Tensor]) -> Arrays | None:
        """K-bar = sum_j w_j K_j: a factor of it, or for the RBF kernel the diagonal blocks that batches use.

        None where there is nobody, or nobody with a weight.
        """
        own, peers, weights = self.parameters, list(features.values()), self._weights(list(features))
        if not any(weights):
            return None
        if own.kernel == "rbf":
            blocks = mean_rbf_blocks(
                peers, weights, own.rad_batch, threshold=own.rbf_threshold, normalise=own.kernel_norm
            )
            return pack_blocks(blocks, own.target_dtype)
        factor = mean_target(peers, weights, normalise=own.kernel_norm, error=own.target_error)
        return pack(factor, own.target_dtype)

    def _weights(self, clients: Sequence[str]) -> list[float]:
        if self.parameters.peer_weights == "uniform":
            return [1 / max(len(clients), 1)] * len(clients)
        if self.parameters.peer_weights == "examples":
            examples = [self.state.clients[client].examples for client in clients]
            return [count / sum(examples) for count in examples]
        listed = _listed(self.parameters.peer_weights)
        if len(listed) < len(self.state.clients):
            raise ConfigError(f"fedhenn.peer-weights has {len(listed)} numbers for {len(self.state.clients)} clients")
        order = {client: index for index, client in enumerate(self.in_order(self.state.clients))}
        return [listed[order[client]] for client in clients]

    # ---- report

    def conclude(self, replies: Mapping[str, Reply]) -> None:
        """Keep the representations after training beside those before."""
        for client, reply in replies.items():
            if "probe" in reply.arrays:
                self.state.arrays[f"after-{client}"] = reply.arrays["probe"]

    def matrices(self) -> dict[str, Any]:
        """Pairwise CKA between clients on rows of the pool, before and after training."""
        arrays = self.state.arrays
        clients = [c for c in self.in_order(self.state.clients) if f"before-{c}" in arrays and f"after-{c}" in arrays]
        if not clients:
            return {}
        names = [self.state.clients[client].architecture for client in clients]
        pairwise = {when: _pairwise([arrays[f"{when}-{client}"] for client in clients]) for when in ("before", "after")}
        return {"cka": {"clients": clients, "architectures": names, **pairwise}}


def _features(replies: Mapping[str, Reply]) -> dict[str, Tensor]:
    """The representations of the clients that sent one."""
    return {c: unpack(reply.arrays["features"]).values for c, reply in replies.items() if "features" in reply.arrays}


def _pairwise(probes: Sequence[Arrays]) -> list[list[float]]:
    features = [unpack(probe).values for probe in probes]
    return [[float(linear_cka(one, other)) for other in features] for one in features]


def _listed(text: str) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = [-1.0]
    if not all(np.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ConfigError(
            f"fedhenn.peer-weights = {text!r}: must be uniform, examples, or numbers separated by commas, none negative"
        )
    return weights
