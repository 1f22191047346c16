"""The methods that use scikit-learn, without networks or peers. Keys about training have no effect."""

from dataclasses import dataclass
from typing import Literal

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Parameters, keys_about

TRAINING = (*keys_about("optimiser"), "batch-size", "augment", "precision", "local-epochs", "closing-epochs")


@dataclass(frozen=True)
class ClassicalParameters(Parameters):
    """Keys without effect on methods of scikit-learn."""

    without = TRAINING


def classical(name: str, public: Literal["none", "inputs"] = "none") -> Method:
    """Return a method whose two sides are classes in `strategies/classical.py` and `client_apps/classical.py`."""
    side = f"classical:{name.title().replace('-', '')}"
    return Method(
        name,
        traits=Traits(keeps="model", scored="trained", public=public, communicates=False),
        Parameters=ClassicalParameters,
        server=f"fedhet.strategies.{side}",
        client=f"fedhet.client_apps.{side}",
        common={"rounds": 1},
        own={"rounds": 1},
    )
