"""Declarations of the scikit-learn baselines, which train without networks or communication."""

from dataclasses import dataclass
from typing import Literal

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, keys_about

TRAINING = (*keys_about("optimiser"), "batch-size", "augment", "precision", "local-epochs", "closing-epochs")


@dataclass(frozen=True)
class ClassicalOptions(Options):
    """Configuration keys of the scikit-learn baselines: they add none, and those in `without` have no effect."""

    without = TRAINING


def classical(name: str, public: Literal["none", "inputs"] = "none") -> Method:
    """Return the declaration of a scikit-learn baseline; its client side is a class in `client_apps/classical.py`."""
    return Method(
        name,
        traits=Traits(keeps="model", scored="trained", public=public, communicates=False),
        Options=ClassicalOptions,
        client=f"fedhet.client_apps.classical:{name.title().replace('-', '')}",
        common={"rounds": 1},
        own={"rounds": 1},
    )
