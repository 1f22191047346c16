"""FedGH (Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023)."""

from dataclasses import dataclass

from fedhet.methods.included.fedproto import WidthOptions
from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import option


@dataclass(frozen=True)
class LearnerOptions(WidthOptions):
    """Configuration keys of methods whose server trains a network on clients' mean representations of classes."""

    server_epochs: int = option(
        1, "number of epochs per round on the clients' mean representations of classes", at_least=1
    )
    server_learning_rate: float = option(0.01, "learning rate of the server's SGD", above=0)


@dataclass(frozen=True)
class FedGHOptions(LearnerOptions):
    """FedGH's own configuration keys."""

    server_epochs: int = option(1, "number of epochs per round in which the server trains the head", at_least=1)


TRAITS = Traits(
    keeps="model", scored="trained", other_arrays="whole", sends={"prototypes": "prototypes", "width": STRUCTURE}
)
"""Traits of methods whose server trains a network on clients' mean representations of classes."""

method = Method(
    "fedgh", traits=TRAITS, Options=FedGHOptions, own={"fedgh.width": 32, "fedgh.server-learning-rate": 0.1}
)
