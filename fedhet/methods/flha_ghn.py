"""FLHA-GHN (Litany et al., "Federated Learning with Heterogeneous Architectures using Graph HyperNetworks", 2022).

What the hypernetwork is built of, `fedhet.hypernets.Design` says; these are its keys.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from fedhet.method import STRUCTURE, Drawing, Method, Traits
from fedhet.options import Config, Parameters, option

if TYPE_CHECKING:
    from fedhet.hypernets import Design


@dataclass(frozen=True)
class FLHAGHNParameters(Parameters):
    """FLHA-GHN's own keys, with the paper's values but for the head: the paper's is `dense`, ten times as large."""

    head: Literal["base-lowrank", "dense", "lowrank", "tiled"] = option(
        "base-lowrank",
        "what writes a layer's weights: a head a type that is dense (the paper's), of low rank, or a base weight and a "
        "change of low rank; or tiles of one decoder, which write types that nobody had in training too",
        choices=("base-lowrank", "dense", "lowrank", "tiled"),
    )
    rank: int = option(
        4, "rank of low-rank heads for each time that a type occurs in one network", at_least=1, at_most=2**16
    )
    latent: int = option(16, "width of z, which heads are given", at_least=1, at_most=2**16)
    tile: int = option(16, "channels in and out of a tile", at_least=1, at_most=2**16)
    tile_latent: int = option(128, "width of z of a tile", at_least=1, at_most=2**16)
    width: int = option(51, "width of a node's embedding", at_least=1, at_most=2**16)
    steps: int = option(6, "T, steps of message passing", at_least=1, at_most=1000)
    edges: Literal["directed", "both", "shuffled", "none"] = option(
        "directed",
        "edges along the data flow, or in both directions, which tells deep layers of one type apart; as controls "
        "between other nodes, or none at all",
        choices=("directed", "both", "shuffled", "none"),
    )
    joints: bool = option(True, "sums and concatenations are nodes too")
    scale: bool = option(True, "a factor of each layer's weights is predicted apart")
    affine: Literal["generated", "local"] = option(
        "generated", "BatchNorm's weight and bias are written, or stay with the client", choices=("generated", "local")
    )
    types: str = option(
        "", "architectures whose layer types have heads, which everybody may know; empty: those of `architectures`"
    )
    unknown: Literal["local", "tiled"] = option(
        "local",
        "layers of other types stay with the client, or are written by tiles, which learn from clients that have such",
        choices=("local", "tiled"),
    )
    share: Literal["all", "own"] = option(
        "all",
        "which heads a client has: all, so that neither what it asks for nor what it sends names its layers; or those "
        "of its own layers, which the server learns by it",
        choices=("all", "own"),
    )
    average: Literal["uniform", "owners"] = option(
        "uniform",
        "mean of a head over all clients of the round (the paper's; one that lacks it counts as having left it as it "
        "was), or over those that have it",
        choices=("uniform", "owners"),
    )
    refine: Literal["head", "none", "all"] = option(
        "head",
        "what of a written network is trained before it is evaluated: its last layer (the paper's), nothing, or all",
        choices=("head", "none", "all"),
    )
    refine_epochs: int = option(1, "epochs of it", at_least=1)
    refine_rate: float = option(0.001, "learning rate of it", above=0)

    @property
    def design(self) -> "Design":
        """How the hypernetwork is built."""
        from fedhet.hypernets import Design

        keys = {each.name for each in fields(Design)} - {"affine"}
        return Design(affine=self.affine == "generated", **{key: getattr(self, key) for key in keys})

    def idle(self, config: Config) -> dict[str, str]:
        """What another head, or clients that have no unknown types, have no use for."""
        reasons: dict[str, list[str]] = {}
        if self.head == "tiled":
            reasons["head"] = ["rank", "types", "unknown", "share", "average"] + ["latent"] * (not self.scale)
        elif self.head == "dense":
            reasons["head"] = ["rank"]
        if self.share == "own":
            reasons["share"] = ["unknown"]
        elif self.head != "tiled":
            reasons["share"] = ["average"]
        if self.head != "tiled" and (self.unknown == "local" or self.share == "own"):
            reasons.setdefault("unknown" if self.share == "all" else "share", []).extend(["tile", "tile_latent"])
        if self.refine == "none":
            reasons["refine"] = ["refine_epochs", "refine_rate"]
        return self.set_in_vain("flha-ghn", reasons)


method = Method(
    "flha-ghn",
    traits=Traits(
        keeps="rest",
        scored="received",
        tells={"model": "hypernetwork"} | dict.fromkeys(("types", "edges", "unknown"), STRUCTURE),
    ),
    Parameters=FLHAGHNParameters,
    server="fedhet.strategies.flha_ghn:FLHAGHN",
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
    drawings={
        "layer-graphs": Drawing(
            "fedhet.results.drawings:layer_graphs_figure",
            "The architectures as the hypernetwork sees them: layers and joints by type, from the input down.",
        )
    },
)
