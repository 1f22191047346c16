"""FedHeNN (Makhija et al., ICML 2022): clients align the representations Phi of common public examples.

In round t of algorithm 2 (heterogeneous clients), X(t) are the alignment examples, in the paper called RAD:

    client i:  w_i(t) = argmin_w  L_i(w) + eta(t) (1 - CKA(K(Phi_w(X(t))), K(t)))                        (equation 5)
    client i:  sends A_i = Phi_(w_i(t))(X(t + 1))
    server:    K(t + 1) = mean_i A_i A_i^T, kept as F F^T

In algorithm 1 (homogeneous clients), the server averages weights as in FedAvg, and K(t) = K(Phi_W(X(t))) for the global
model W(t - 1). With `target = spectral`, an extension, clients send class probabilities, and F clusters the examples.

With `target = contrast`, the pairwise form of FedMuscle's loss (Setayesh et al., ICLR 2026), clients send vectors z of
length 1, z = Phi(x) / |Phi(x)|, and the distance is the mean over other clients j and alignment examples k of

    -log( exp(z_k z_jk / T) / sum_l exp(z_k z_jl / T) )
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedhet.algorithms.alignment.targets import check_posteriors, cluster_rows, mean_target, pack, unpack
from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.messages import Arrays, Payload, Reply, to_tensor
from fedhet.methods.options import OWN
from fedhet.methods.sharing import EVERYTHING, NOTHING
from fedhet.server import METRICS, STRUCTURE, Common, FederatedStrategy, State, Traits, method, option
from fedhet.setup import client_setup
from fedhet.utils.randomness import torch_generator

from .families.by_class import WIDTH, WidthKeys, common_width
from .families.scores import distance_metric, packed_rows, public_rows

LEAST_ROWS = 8
"""Smallest number of examples on which the similarity (CKA) of representations is estimated."""

NO_UNION = (
    "fedhenn.rad-source = 'train-union' takes the public examples from the training examples of all clients, which "
    "must be of a configured data set: set fedhenn.rad-source = held-out to use your own data or public dataset"
)
"""Message that the server does not have the clients' training examples, or has another public dataset."""


@dataclass(frozen=True)
class Keys(WidthKeys):
    # The defaults are the paper's, except for target and rad-batch.
    setting: Literal["heterogeneous", "homogeneous"] = option(
        "heterogeneous", "heterogeneous: weights stay at the clients; homogeneous: weights are averaged as well"
    )
    target: Literal["kernel", "spectral", "contrast"] = option(
        "spectral",
        "alignment target: spectral (this project's), the peers' mean kernel (the paper's), or contrast with each peer",
    )
    width: int = option(
        0,
        "width to which a linear layer before the head projects representations; 0: no such layer",
        at_least=0,
        at_most=2**16,
        needs={"target": ("contrast",)},
    )
    eta0: float = option(
        -1.0, "weight of the proximal term, eta0 f(t); negative: 3 (spectral), 0.001 (kernel) or 1 (contrast)"
    )
    schedule: Literal["auto", "sqrt", "linear", "constant"] = option(
        "auto", "f(t), with t = 0 in the first round; auto: sqrt (kernel) or constant"
    )
    kernel: Literal["linear", "rbf", "procrustes"] = option(
        "linear",
        "kernel of CKA, or the orthogonal Procrustes distance; rbf and procrustes in the homogeneous setting only",
        needs={"target": ("kernel",)},
    )
    rad_source: Literal["held-out", "train-union"] = option(
        "held-out", "source of the RAD: examples held out of all training data, or the union of the training data"
    )
    rad_size: int = option(5000, "maximum number of examples in the RAD of a round", at_least=LEAST_ROWS)
    rad_batch: int = option(
        128,
        "number of RAD examples per training step, at least 8; 0: all, as in the paper",
        at_least=0,
        needs={"kernel": ("linear", "rbf")},
    )
    rad_every: int = option(1, "add the proximal term in every k-th step, with k times its weight", at_least=1)

    def __post_init__(self) -> None:
        if self.eta0 < 0:
            object.__setattr__(self, "eta0", {"spectral": 3.0, "kernel": 0.001, "contrast": 1.0}[self.target])
        if self.schedule == "auto":
            object.__setattr__(self, "schedule", "sqrt" if self.target == "kernel" else "constant")
        if self.target == "kernel" and self.kernel != "linear" and self.setting == "heterogeneous":
            raise ConfigError(f"fedhenn.kernel = {self.kernel!r} needs fedhenn.setting = 'homogeneous', or use linear")
        if 0 < self.rad_batch < LEAST_ROWS:
            raise ConfigError(f"fedhenn.rad-batch = {self.rad_batch}: set at least {LEAST_ROWS}, or 0 for all examples")

    def eta(self, round: int) -> float:
        """Return the proximal term's weight, `eta0` f(t) with t = `round` - 1; f is 1, t or sqrt(t) by `schedule`."""
        return self.eta0 * {"sqrt": (round - 1) ** 0.5, "linear": round - 1, "constant": 1.0}[self.schedule]

    @property
    def sent(self) -> str:
        """Kind of the values that clients send for alignment examples: `posteriors`, `features`, or empty for none."""
        if not self.eta0 or (self.setting == "homogeneous" and self.target == "kernel"):
            return ""
        return "posteriors" if self.target == "spectral" else "features"

    @property
    def makes_public_dataset(self) -> bool:  # type: ignore[override]
        """Whether the alignment examples are drawn from the union of the clients' training examples."""
        return self.rad_source == "train-union" and bool(self.eta0)


def traits(keys: Keys) -> Traits:
    """Return what FedHeNN needs and exchanges for these keys."""
    homogeneous = keys.setting == "homogeneous"
    sends = {"distance": METRICS}
    if keys.sent:
        sends[keys.sent] = keys.sent
    if keys.target == "contrast":
        sends["width"] = STRUCTURE
    return Traits(
        networks="equal" if homogeneous else "any",
        shares=EVERYTHING if homogeneous else NOTHING,
        keeps="model",
        common_init=homogeneous,
        public="inputs" if keys.eta0 else "none",
        # Posteriors and representations of length 1 have a given norm.
        other_arrays="whole" if keys.sent == "features" and keys.target != "contrast" else "",
        sends=sends,
    )


@dataclass
class Target(State):
    """The state of FedHeNN: the next round's `target`, made by `pack`; empty after a round that did not count.

    By `contrast`, `target` has the representations of each client, (L, width) float16, by the client's name.
    """

    target: Arrays = field(default_factory=dict)


@method(
    "fedhenn",
    traits,
    Keys,
    client="fedhet.client_apps.fedhenn:FedHeNN",
    common={
        "rounds": 200,
        "fraction-train": 0.1,
        "local-epochs": 20,
        "batch-size": 10,
        "learning-rate": 0.01,
        "momentum": 0.5,
        "weight-decay": 1e-4,
        "closing-epochs": 10,
    },
    own={"fedhenn.eta0": 1.0, "fedhenn.rad-every": 4},
)
class FedHeNN(FederatedStrategy[Keys, Target]):
    """FedHeNN: clients align their representations to a common target; homogeneous clients also average weights."""

    def public_dataset(self) -> PublicDataset | None:
        if not self.options.makes_public_dataset:
            return super().public_dataset()
        passed = self.run.public
        configured = client_setup.public_dataset(self.config)
        other = passed and (configured is None or passed.unlabelled.digest != configured.unlabelled.digest)
        if other or self.config.dataset == OWN:
            raise ConfigError(NO_UNION)
        return client_setup.training_union(self.config)

    def common(self, reply: Reply) -> Mapping[str, Common]:
        return common_width(reply, "fedhenn") if self.options.target == "contrast" else {}

    def admit(self, reply: Reply) -> None:
        if self.options.makes_public_dataset and reply.report.own_data:
            raise FedhetError(NO_UNION)
        if self.options.eta0 and self.state.public_size < LEAST_ROWS:
            raise FedhetError(
                f"the public dataset has {self.state.public_size} examples, but at least {LEAST_ROWS} are "
                "needed: set public-samples higher, or fedhenn.eta0 = 0 for no alignment"
            )

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        payloads = super().configure_fit(round, clients)
        rows = {"rows": self.rad(round)}
        next_rows = {"rows": self.rad(round + 1)}
        for client, payload in payloads.items():
            target = self.target_for(client)
            if round > 1 and self.options.eta0 and (target or not self.options.sent):
                payload.values["eta"] = self.options.eta(round)
                payload.arrays["rad"] = rows
                if target:
                    payload.arrays["target"] = target
            if self.asks_for_next_rad(round):
                payload.arrays["next-rad"] = next_rows
        # If this round does not count, the next one has other rows and no target for them.
        self.state.target = {}
        return payloads

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        reply.values.number("distance", default=0.0)
        if self.asks_for_next_rad(self.state.round + 1):
            width = int(self.state.common[WIDTH]) if self.options.target == "contrast" else None
            packed_rows(reply, self.options.sent, len(self.rad(1)), width, check=self.check_values)

    def check_values(self, values: Tensor) -> None:
        """Check what a client sent for alignment examples, (L, d); raise a ValueError if it is invalid."""
        if self.options.target == "spectral":
            check_posteriors(values)
        if self.options.target == "contrast" and values.norm(dim=1).max() > 1.01:
            raise ValueError("representations must have length 1: divide them by their norms")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        super().aggregate_fit(round, replies)
        if self.asks_for_next_rad(round):
            sent = {client: unpack(reply.arrays[self.options.sent]) for client, reply in replies.items()}
            self.state.target = self.next_target(sent, round + 1)
        return distance_metric(replies.values(), "alignment")

    def rad(self, round: int) -> NDArray[np.int32]:
        """Return the indices of a round's alignment examples in the public dataset, drawn at random from the seed."""
        return public_rows(self.config.seed, "rad", round, self.state.public_size, self.options.rad_size)

    def asks_for_next_rad(self, round: int) -> bool:
        return bool(self.options.sent) and round != self.run.last_round

    def target_for(self, client: str) -> Arrays:
        """Return a client's target, or {}; by `contrast`, the representations of n other clients, (L, n width)."""
        if self.options.target != "contrast":
            return self.state.target
        peers = [values for peer, values in self.state.target.items() if peer != client]
        return pack(to_tensor(np.concatenate(peers, 1))) if peers else {}

    def next_target(self, sent: Mapping[str, Tensor], round: int) -> Arrays:
        """Return the target F (L, r) of the L alignment examples of `round`, as arrays: F = `values` * 2^`exponent`.

        `sent` has each client's representations A (L, d); F F^T approximates the mean of the kernels A A^T. For
        spectral targets, `sent` has class probabilities (L, C), and F has left singular vectors of their concatenation.
        By `contrast`, the arrays are what each client sent.
        """
        if self.options.target == "contrast":
            return {client: values.numpy().astype(np.float16) for client, values in sent.items()}
        if self.options.target == "spectral":
            generator = torch_generator(self.config.seed, "parallel analysis", round)
            return pack(cluster_rows([*sent.values()], generator=generator))
        clipped = self.aggregator.clipped({client: {"features": values.numpy()} for client, values in sent.items()})
        return pack(mean_target([to_tensor(arrays["features"]) for arrays in clipped.values()]))
