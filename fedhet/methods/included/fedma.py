"""FedMA (Wang et al., ICLR 2020): the server matches and averages the units of clients' networks, layer by layer."""

from dataclasses import dataclass

from fedhet.methods.included.pfnm import COMMON, DRAWINGS, TRAITS, PFNMOptions
from fedhet.methods.method import Method
from fedhet.methods.options import option


@dataclass(frozen=True)
class FedMAOptions(PFNMOptions):
    """FedMA's own configuration keys, with the paper's values."""

    passes: int = option(1, "number of passes over all layers, if rounds = 0", at_least=1)
    retrain_epochs: int = option(
        0, "number of epochs that clients train after a layer is matched; 0: local-epochs", at_least=0
    )
    last_epochs: int = option(
        3, "number of epochs of the output layer's round, as a multiple of retrain-epochs", at_least=0
    )
    last_learning_rate: float = option(0.0, "learning rate of the output layer's round; 0: learning-rate", at_least=0)

    without = ("closing-epochs",)  # nothing is learnt from a round after the last pass


method = Method(
    "fedma",
    traits=TRAITS,
    Options=FedMAOptions,
    common={**COMMON, "rounds": 0},
    drawings=DRAWINGS,
    own={"rounds": 0, "local-epochs": 20, "fedma.retrain-epochs": 10},
)
