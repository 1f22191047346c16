"""Training, evaluation, and BatchNorm's statistics: one loop for all methods."""

from fedhet.learning.distillation import divergence as divergence
from fedhet.learning.distillation import soft_divergence as soft_divergence
from fedhet.learning.evaluation import BATCH as BATCH
from fedhet.learning.evaluation import evaluate as evaluate
from fedhet.learning.evaluation import forward as forward
from fedhet.learning.evaluation import of_tokens as of_tokens
from fedhet.learning.evaluation import read as read
from fedhet.learning.evaluation import reestimate as reestimate
from fedhet.learning.optimizers import Optimisation as Optimisation
from fedhet.learning.optimizers import eager as eager
from fedhet.learning.optimizers import learning_rate as learning_rate
from fedhet.learning.training import Loss as Loss
from fedhet.learning.training import Phase as Phase
from fedhet.learning.training import Step as Step
from fedhet.learning.training import Trained as Trained
from fedhet.learning.training import batches as batches
from fedhet.learning.training import train as train
