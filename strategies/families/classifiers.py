"""Methods whose clients fit a classifier of scikit-learn to their own examples, as baselines."""

from dataclasses import dataclass

from fedhet.methods.options import Options, keys_about
from fedhet.server import FederatedStrategy, State, Traits


@dataclass(frozen=True)
class Keys(Options):
    without = (
        *keys_about("optimiser"),
        *("batch-size", "augment", "precision", "local-epochs", "closing-epochs", "start-from"),
    )


TRAITS = Traits(keeps="model", predicts="a classifier of scikit-learn")
ONE_ROUND = {"rounds": 1}


class Classifiers(FederatedStrategy[Keys, State]):
    """Base class of strategies whose clients fit a classifier and send nothing."""
