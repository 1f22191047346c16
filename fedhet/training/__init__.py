"""Training, evaluation and BatchNorm's statistics, with one training loop for all methods."""

from fedhet.training.evaluation import BATCH, Evaluation, forward, read, reestimate
from fedhet.training.phases import Loss, Optimisation, Phase, Step, Term, Trained, eager, learning_rate, soft_divergence
from fedhet.training.privacy import Privacy
from fedhet.training.training import Training, batches
from fedhet.training.vectorised import Computation, compute_in_batches

__all__ = ["BATCH", "Evaluation", "forward", "read", "reestimate"]
__all__ += ["Loss", "Optimisation", "Phase", "Step", "Term", "Trained", "eager", "learning_rate", "soft_divergence"]
__all__ += ["Computation", "Privacy", "Training", "batches", "compute_in_batches"]
