"""FedHeNN (Makhija et al., ICML 2022): clients align the representations Phi of common public examples.

In round t of algorithm 2 (heterogeneous clients), X(t) are the alignment examples, in the paper called RAD:

    client i:  w_i(t) = argmin_w  L_i(w) + eta(t) (1 - CKA(K(Phi_w(X(t))), K(t)))                        (equation 5)
    client i:  sends A_i = Phi_(w_i(t))(X(t + 1))
    server:    K(t + 1) = mean_i A_i A_i^T, kept as F F^T

In algorithm 1 (homogeneous clients), the server averages weights as in FedAvg, and K(t) = K(Phi_W(X(t))) for the global
model W(t - 1). With `target = spectral`, an extension, clients send class probabilities, and F clusters the examples.
With `contrast`, the pairwise form of FedMuscle's loss (Setayesh et al., ICLR 2026), clients send Phi / |Phi|, and the
distance is the InfoNCE loss against the vectors of each other client (`fedhet.algorithms.alignment.cka.info_nce`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedhet.algorithms.alignment.targets import cluster_rows, mean_target, pack, unpack
from fedhet.errors import ConfigError
from fedhet.messages import Arrays, to_tensor
from fedhet.server import METRICS, STRUCTURE, Common, FederatedStrategy, Payload, Reply, State, Traits, method, option
from fedhet.utils.randomness import torch_generator
from fedhet.utils.text import log

from .families.by_class import WIDTH, WidthKeys, common_width, width_option
from .families.scores import distance_metric, packed_rows, public_rows
from .fedavg import FedAvg


@dataclass(frozen=True)
class Keys(WidthKeys):
    least_public = 8  # The similarity (CKA) of representations has no estimate on fewer examples.
    # The defaults are the paper's, except for target and rad-batch.
    setting: Literal["heterogeneous", "homogeneous"] = option("heterogeneous", "homogeneous: weights are averaged, too")
    target: Literal["kernel", "spectral", "contrast"] = option(
        "spectral", "spectral (this project's), the peers' mean kernel (the paper's), or contrast with each peer"
    )
    width: int = width_option(needs={"target": ("contrast",)})
    eta0: float = option(-1.0, "proximal weight eta0 f(t); negative: 3 (spectral), 0.001 (kernel) or 1 (contrast)")
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
    rad_size: int = option(5000, "maximum number of examples in the RAD of a round", at_least=least_public)
    rad_batch: int = option(
        128, "number of RAD examples per step; 0: all", at_least=8, or_zero=True, needs={"kernel": ("linear", "rbf")}
    )
    rad_every: int = option(1, "add the proximal term in every k-th step, with k times its weight", at_least=1)

    def __post_init__(self) -> None:
        if self.eta0 < 0:
            object.__setattr__(self, "eta0", {"spectral": 3.0, "kernel": 0.001, "contrast": 1.0}[self.target])
        if self.schedule == "auto":
            object.__setattr__(self, "schedule", "sqrt" if self.target == "kernel" else "constant")
        if self.target == "kernel" and self.kernel != "linear" and self.setting == "heterogeneous":
            raise ConfigError(f"fedhenn.kernel = {self.kernel!r} needs fedhenn.setting = 'homogeneous', or use linear")

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
    def public_union(self) -> str:  # type: ignore[override]
        return "rad-source = train-union" if self.rad_source == "train-union" and self.eta0 else ""


def traits(keys: Keys) -> Traits:
    """Return what FedHeNN needs and exchanges for these keys; homogeneous clients share networks as in FedAvg."""
    sends = {"distance": METRICS} | ({keys.sent: keys.sent} if keys.sent else {})
    if keys.target == "contrast":
        sends["width"] = STRUCTURE
    return replace(
        FedAvg.method.traits_of(keys) if keys.setting == "homogeneous" else Traits(),
        keeps="model",
        public="inputs" if keys.eta0 else "none",
        # Posteriors and representations of length 1 have a given norm.
        other_arrays="whole" if keys.sent == "features" and keys.target != "contrast" else "",
        sends=sends,
    )


@dataclass
class Target(State):
    """The state of FedHeNN: the next round's `target`, as of `next_target`; empty after a round that did not count."""

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

    def common(self, reply: Reply) -> Mapping[str, Common]:
        return common_width(reply, "fedhenn") if self.options.target == "contrast" else {}

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        payloads = super().configure_fit(round, clients)
        rad = {"rows": self.rad(round)}
        next_rad = {"rows": self.rad(round + 1)}
        if round > 1 and self.options.sent and not self.state.target:
            log.warning("round %d has no target: the last round did not count, or ended an earlier run", round)
        for client, payload in payloads.items():
            target = self.target_for(client)
            if target or (round > 1 and self.options.eta0 and not self.options.sent):
                payload.values["eta"] = self.options.eta(round)
                payload.arrays |= {"rad": rad} | target
            if self.sends_in(round):
                payload.arrays["next-rad"] = next_rad
        # If this round does not count, the next one has other rows and no target for them.
        self.state.target = {}
        return payloads

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        reply.values.number("distance", default=0.0)
        if self.sends_in(self.state.round + 1):
            packed_rows(reply, self.options.sent, len(self.rad(1)), self.state.common.get(WIDTH))

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        super().aggregate_fit(round, replies)
        if self.sends_in(round):
            sent = {client: unpack(reply.arrays[self.options.sent]) for client, reply in replies.items()}
            self.state.target = self.next_target(sent, round + 1)
        return distance_metric(replies.values(), "alignment")

    def rad(self, round: int) -> NDArray[np.int32]:
        """Return the indices of a round's alignment examples in the public dataset, drawn at random from the seed."""
        return public_rows(self.config.seed, "rad", round, self.state.public_size, self.options.rad_size)

    def sends_in(self, round: int) -> bool:
        return bool(self.options.sent) and round != self.run.last_round

    def target_for(self, client: str) -> dict[str, Arrays]:
        """Return {"target": target} for a client, or {}; by `contrast`, n peers' representations (L, n width)."""
        target = self.state.target
        if target and self.options.target == "contrast":
            peers = [values for peer, values in target.items() if peer != client]
            target = pack(to_tensor(np.concatenate(peers, 1))) if peers else {}
        return {"target": target} if target else {}

    def next_target(self, sent: Mapping[str, Tensor], round: int) -> Arrays:
        """Return the target F (L, r) of the L alignment examples of `round` in the format of `pack`.

        `sent` has each client's representations A (L, d), and F F^T approximates the mean of the kernels A A^T, or
        class probabilities (L, C). By `contrast`, return what each client sent, (L, width) float16, by its name.
        """
        if self.options.target == "contrast":
            return {client: values.clamp(-1, 1).numpy().astype(np.float16) for client, values in sent.items()}
        if self.options.target == "spectral":
            generator = torch_generator(self.config.seed, "parallel analysis", round)
            return pack(cluster_rows([*sent.values()], generator=generator))
        clipped = self.aggregator.clipped({client: {"features": values.numpy()} for client, values in sent.items()})
        return pack(mean_target([to_tensor(arrays["features"]) for arrays in clipped.values()]))
