"""Training, evaluation and BatchNorm's statistics, with one training loop for all methods."""

from fedhet.training.evaluation import BATCH, Evaluation, Prediction, evaluate, forward, read, reestimate
from fedhet.training.phases import Loss, Optimisation, Phase, Step, Trained, eager, learning_rate, soft_divergence
from fedhet.training.phases import Privacy as Privacy
from fedhet.training.training import Term, Training, batches, train
from fedhet.training.vectorised import Computation, compute_in_batches

__all__ = ["BATCH", "Evaluation", "Prediction", "evaluate", "forward", "read", "reestimate"]
__all__ += ["Loss", "Optimisation", "Phase", "Privacy", "Step", "Trained", "eager", "learning_rate", "soft_divergence"]
__all__ += ["Computation", "Term", "Training", "batches", "compute_in_batches", "train"]
