"""Training, evaluation, and BatchNorm's statistics: one loop for all methods. No Flower."""

from fedhet.learning.cohort import Cohort
from fedhet.learning.evaluation import BATCH, evaluate, evaluating, read, reading
from fedhet.learning.optimizers import eager
from fedhet.learning.passes import Forward, Pausing, alone, at_once
from fedhet.learning.phases import FurtherBatch, Loss, Optimisation, Phase, Step, Term, one_cycle, scheduled
from fedhet.learning.statistics import reestimate, reestimating
from fedhet.learning.training import Trained, batches, train, training

__all__ = [
    "BATCH",
    "Cohort",
    "Forward",
    "FurtherBatch",
    "Loss",
    "Optimisation",
    "Pausing",
    "Phase",
    "Step",
    "Term",
    "Trained",
    "alone",
    "at_once",
    "batches",
    "eager",
    "evaluate",
    "evaluating",
    "one_cycle",
    "read",
    "reading",
    "reestimate",
    "reestimating",
    "scheduled",
    "train",
    "training",
]
