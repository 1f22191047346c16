"""Training, evaluation and BatchNorm's statistics, with one training loop for all methods."""

from fedhet.training.distillation import soft_divergence as soft_divergence
from fedhet.training.evaluation import BATCH as BATCH
from fedhet.training.evaluation import evaluate as evaluate
from fedhet.training.evaluation import forward as forward
from fedhet.training.evaluation import of_tokens as of_tokens
from fedhet.training.evaluation import read as read
from fedhet.training.evaluation import reestimate as reestimate
from fedhet.training.optimizers import Optimisation as Optimisation
from fedhet.training.optimizers import eager as eager
from fedhet.training.optimizers import learning_rate as learning_rate
from fedhet.training.phases import Loss as Loss
from fedhet.training.phases import Phase as Phase
from fedhet.training.phases import Step as Step
from fedhet.training.phases import Term as Term
from fedhet.training.phases import Trained as Trained
from fedhet.training.privacy import Privacy as Privacy
from fedhet.training.training import batches as batches
from fedhet.training.training import train as train
from fedhet.training.vectorised import Computation as Computation
from fedhet.training.vectorised import Evaluation as Evaluation
from fedhet.training.vectorised import Prediction as Prediction
from fedhet.training.vectorised import Training as Training
from fedhet.training.vectorised import compute_in_batches as compute_in_batches
from fedhet.training.vectorised import multiply_adds as multiply_adds
