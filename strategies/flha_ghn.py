"""FLHA-GHN (Litany et al., 2022, algorithm 1): a graph hypernetwork H generates the weights of clients' networks.

    client i:  theta_i = argmin_theta  L_i(H_theta(G_i)), from theta(t-1)
    server:    theta(t) = mean_i theta_i

G_i is the graph of client i's network, which may have any architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Literal

from fedhet.algorithms.hypernets.design import start
from fedhet.messages import Arrays, Reply, Spec, WireError, to_arrays
from fedhet.methods.options import Options, Value, option
from fedhet.server import Common, FederatedStrategy, State, Traits, method


@dataclass(frozen=True)
class Keys(Options):
    without = ("start-from",)  # The hypernetwork generates the weights.

    head: Literal["base-lowrank", "dense", "tiled"] = option(
        "base-lowrank", "head that generates weights: one per layer type (dense is the paper's), or tiled for any type"
    )
    normalise: bool = option(
        True,
        "normalise embeddings so that initial weights have Kaiming's scale; false: the paper's initialization",
        needs={"head": ("dense",)},
    )
    refine: Literal["head", "none"] = option("head", "trained an epoch before evaluation: head (the paper's) or none")

    @property
    def uses(self) -> tuple[str, ...]:  # type: ignore[override]
        """Keys that have an effect even with a user's own models: `architectures`, or none if `head = tiled`."""
        return () if self.head == "tiled" else ("architectures",)

    def suited(self) -> dict[str, tuple[Value, str]]:
        """Return defaults for a user's own models, {key: (value, reason)}: `head = tiled` and its `learning-rate`."""
        suited: dict[str, tuple[Value, str]] = {"learning-rate": (0.0003, "since tiles learn at small rates only")}
        if self.head != "tiled":
            suited["head"] = ("tiled", "which writes layers of any type, for models of your own")
        return suited


@method(
    "flha-ghn",
    lambda keys: Traits(sends={"model": "hypernetwork"}, inside="" if keys.refine == "none" else "head"),
    Keys,
    client="fedhet.client_apps.flha_ghn:FLHAGHN",
    common={
        "rounds": 1000,
        "local-epochs": 1,
        "batch-size": 64,
        "learning-rate": 0.009,
        "lr-schedule": "cosine",
        "momentum": 0.9,
        "weight-decay": 5e-4,
        "batch-norm": "re-estimate",
        "disclose-architecture": False,
    },
    trains="a hypernetwork",
    own={"rounds": 60, "flha-ghn.refine": "none"},
)
class FLHAGHN(FederatedStrategy[Keys, State]):
    """FLHA-GHN: the unweighted mean of clients' hypernetworks, unless another aggregation rule is configured."""

    copies = 4  # The state, the sum, and a message are in memory.

    def common(self, reply: Reply) -> Mapping[str, Common]:
        digest = sha256(repr(sorted(reply.report.spec.items())).encode()).hexdigest()[:12]
        return {"digest of the hypernetwork's arrays": Common(digest, "all clients need the same version of fedhet")}

    def first_arrays(self, missing: Spec) -> Arrays:
        try:
            drawn = partial(start, seed=self.config.seed, normalise=self.options.normalise)
            return to_arrays({key: drawn(key, shape) for key, (shape, _) in missing.items()})
        except ValueError as error:
            raise WireError(str(error)) from error

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        self.state.model = self.state.model | self.aggregator.average(models)
        return {}
