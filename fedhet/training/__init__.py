"""Training, evaluation and BatchNorm's statistics, with one training loop for all methods."""

from fedhet.training.backends import Backend, OneByOne, Scored, attempt
from fedhet.training.evaluation import BATCH, Evaluation, forward, multiply_adds, read, reestimate
from fedhet.training.phases import Loss, Optimisation, Phase, Step, Term, Trained, eager, learning_rate, soft_divergence
from fedhet.training.privacy import Privacy
from fedhet.training.training import Training, batches
from fedhet.training.vectorised import Batches

__all__ = [
    "BATCH",
    "Backend",
    "Batches",
    "Evaluation",
    "OneByOne",
    "Scored",
    "attempt",
    "forward",
    "multiply_adds",
    "read",
]
__all__ += ["Loss", "Optimisation", "Phase", "Step", "Term", "Trained", "eager", "learning_rate", "soft_divergence"]
__all__ += ["Privacy", "Training", "batches", "reestimate"]
