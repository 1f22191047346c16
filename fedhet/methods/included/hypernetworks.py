"""Declarations of methods whose hypernetworks generate the weights of the clients' networks."""

from dataclasses import dataclass, replace
from typing import Literal

from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import Options, Value, option
from fedhet.methods.sharing import TRAINED


@dataclass(frozen=True)
class FLHAGHNOptions(Options):
    without = ("start-from",)  # the hypernetwork generates the weights

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
            suited["head"] = ("tiled", "which writes layers of any type: the models are not those of `architectures`")
        return suited


flha_ghn = Method(
    "flha-ghn",
    Traits(keeps="rest", sends={"model": "hypernetwork"}),
    FLHAGHNOptions,
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


@dataclass(frozen=True)
class PFedHNOptions(Options):
    without = ("start-from",)  # the hypernetwork generates the weights

    server_learning_rate: float = option(0.01, "learning rate of the hypernetwork's Adam", above=0)


pfedhn = Method(
    "pfedhn",
    Traits(
        shares=replace(TRAINED, averaged=False, units=None),
        other_arrays="entries",
        sends={"delta": "weights", "starts": STRUCTURE},
    ),
    PFedHNOptions,
    common={
        "learning-rate": 0.005,
        "momentum": 0.9,
        "weight-decay": 5e-5,
        "batch-size": 64,
        "batch-norm": "re-estimate",
    },
)
