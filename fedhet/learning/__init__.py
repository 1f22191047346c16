"""Training, evaluation, and BatchNorm's statistics: one loop for all methods. No Flower."""

from fedhet.learning.batching import ClientBatching, Forward
from fedhet.learning.evaluation import BATCH, evaluate, read
from fedhet.learning.optimizers import eager
from fedhet.learning.phases import Loss, Optimisation, Phase, Step, one_cycle, scheduled
from fedhet.learning.statistics import reestimate
from fedhet.learning.training import Trained, batches, train

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
    "one_cycle",
    "read",
    "reestimate",
    "scheduled",
    "train",
]
