"""FedTGP (Zhang et al., "FedTGP: Trainable Global Prototypes ...", AAAI 2024)."""

from dataclasses import dataclass

from fedhet.methods.included.fedgh import TRAITS, LearnerOptions
from fedhet.methods.method import Method
from fedhet.methods.options import option


@dataclass(frozen=True)
class FedTGPOptions(LearnerOptions):
    """FedTGP's own configuration keys."""

    server_epochs: int = option(100, "number of epochs per round in which the server trains the prototypes", at_least=1)
    weight: float = option(0.1, "lambda, the weight of the distance to the global prototypes", at_least=0)
    threshold: float = option(100.0, "tau, the maximum margin between prototypes of different classes", at_least=0)


method = Method("fedtgp", traits=TRAITS, Options=FedTGPOptions, own={"fedtgp.width": 32})
