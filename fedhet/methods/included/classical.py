"""Declarations of the scikit-learn baselines, which train without networks or communication."""

from dataclasses import dataclass, replace

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, keys_about


@dataclass(frozen=True)
class ClassicalOptions(Options):
    """Options of the scikit-learn baselines, which add no keys; the common keys in `without` have no effect."""

    without = (
        *keys_about("optimiser"),
        *("batch-size", "augment", "precision", "local-epochs", "closing-epochs", "start-from"),
    )


nearest_neighbour = Method(
    "nearest-neighbour",
    Traits(keeps="model", scored="trained", communicates=False),
    ClassicalOptions,
    common={"rounds": 1},
    own={"rounds": 1},
)
logistic_regression = replace(nearest_neighbour, name="logistic-regression", family="logistic-regression")
label_spreading = replace(
    nearest_neighbour,
    name="label-spreading",
    family="label-spreading",
    traits=Traits(keeps="model", scored="trained", public="inputs", communicates=False),
)
