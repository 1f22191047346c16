"""FD, federated distillation (Jeong et al., 2018): clients share their mean logits of each class."""

from dataclasses import dataclass

from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import Options, option


@dataclass(frozen=True)
class FDOptions(Options):
    """FD's own configuration keys."""

    weight: float = option(0.1, "weight of the cross entropy to the peers' mean prediction of the class", at_least=0)


method = Method(
    "fd",
    traits=Traits(
        keeps="model", scored="trained", other_arrays="mean", sends={"prototypes": "posteriors", "width": STRUCTURE}
    ),
    Options=FDOptions,
)
