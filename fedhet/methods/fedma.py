"""FedMA (Wang et al., ICLR 2020)."""

from dataclasses import dataclass

from fedhet.method import Method
from fedhet.options import option

from .pfnm import COMMON, DRAWINGS, TRAITS, PFNMParameters


@dataclass(frozen=True)
class FedMAParameters(PFNMParameters):
    """FedMA's own keys, with the paper's values."""

    passes: int = option(1, "passes over all layers, if rounds = 0", at_least=1)
    retrain_epochs: int = option(
        0, "epochs that clients train behind a layer just matched; 0: as many as local-epochs", at_least=0
    )
    last_epochs: int = option(3, "epochs of the round of the output layer, in retrain-epochs", at_least=0)
    last_learning_rate: float = option(
        0.0, "learning rate of that round (the authors' code: a tenth of learning-rate); 0: learning-rate", at_least=0
    )

    without = ("closing-epochs",)  # nothing is learnt from a round after the last pass


method = Method(
    "fedma",
    traits=TRAITS,
    Parameters=FedMAParameters,
    common={**COMMON, "rounds": 0},
    drawings=DRAWINGS,
    own={"rounds": 0, "local-epochs": 20, "fedma.retrain-epochs": 10},
)
