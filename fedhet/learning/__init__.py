"""Training, evaluation, and BatchNorm's statistics: one loop for all methods."""

from fedhet.learning.batching import ClientBatching, Forward
from fedhet.learning.evaluation import BATCH, evaluate, read, reestimate
from fedhet.learning.optimizers import Optimisation, eager, learning_rate
from fedhet.learning.training import Loss, Phase, Step, Trained, batches, train

__all__ = [
    "BATCH",
    "ClientBatching",
    "Forward",
    "Loss",
    "Optimisation",
    "Phase",
    "Step",
    "Trained",
    "batches",
    "eager",
    "evaluate",
    "learning_rate",
    "read",
    "reestimate",
    "train",
]
