"""FML (Shen et al., "Federated Mutual Learning", 2020)."""

from dataclasses import dataclass

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, option


@dataclass(frozen=True)
class AuxiliaryOptions(Options):
    """Configuration keys of methods whose clients also train an auxiliary network, which they share."""

    uses = ("architectures",)  # of the auxiliary network
    shared_model: str = option(
        "", "architecture of the shared network; empty: the first of architectures, mlp-20 for tabular data"
    )


@dataclass(frozen=True)
class FMLOptions(AuxiliaryOptions):
    """FML's own configuration keys."""

    alpha: float = option(
        0.5, "weight of labels in the own network's loss, 1 - alpha of the shared network's scores", above=0, at_most=1
    )
    beta: float = option(
        0.5,
        "weight of labels in the shared network's loss, 1 - beta of the own network's scores",
        at_least=0,
        at_most=1,
    )


TRAITS = Traits(keeps="model", scored="trained", common_init=True, sends={"model": "weights"})
"""Traits of methods with an auxiliary network."""

method = Method("fml", traits=TRAITS, Options=FMLOptions)
