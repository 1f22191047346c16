"""Class scores: what networks say of the same examples, their mean, and how far a network is from it.

FedMD (Li and Wang, 2019) averages logits and matches them by their mean absolute error; DS-FL (Itahara et al., 2020)
averages probabilities, sharpens the mean and matches it by cross entropy.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.representations.features import ROWS_AT_ONCE

Kind = Literal["logits", "probabilities"]
Match = Literal["absolute", "squared", "kl-divergence"]


@torch.no_grad()
def class_scores(model: nn.Module, inputs: Tensor, transform: Callable[[Tensor], Tensor], kind: Kind) -> Tensor:
    """Class scores `(n, C)` of raw inputs, float32, in evaluation mode.

    Args:
        model: left in evaluation mode.
        inputs: `(n, ...)` as they are stored.
        transform: from raw inputs to the model's.
        kind: what the model returns, or the softmax of it.

    Raises:
        ValueError: the model's outputs are no `(n, C)`.
    """
    model.eval()
    return scores_of(torch.cat([model(transform(part)) for part in inputs.split(ROWS_AT_ONCE)]), len(inputs), kind)


def scores_of(logits: Tensor, count: int, kind: Kind) -> Tensor:
    """Class scores `(n, C)`, float32, of what a model returned for `count` examples.

    Raises:
        ValueError: that is no `(n, C)`.
    """
    if logits.ndim != 2 or len(logits) != count:
        raise ValueError(f"{kind} need outputs of shape ({count}, classes), got {tuple(logits.shape)}")
    return _as(kind, logits.float())


def mean_scores(told: Sequence[Tensor], kind: Kind, handled: Sequence[Tensor] | None = None) -> Tensor:
    """The mean of class scores over clients.

    Args:
        told: the clients' scores, each `(n, C)` of the same n examples.
        kind: what they are; rows of probabilities add up to 1 in the mean too.
        handled: for each client `(C,)` bool, the classes that it knows of: only its scores of these count. A class that
            nobody handles has the mean of all. None: all count.

    Returns:
        `(n, C)` float32.
    """
    scores = torch.stack(list(told)).double()
    if handled is None:
        return scores.mean(0).float()
    counts = torch.stack(list(handled))
    counts = (counts | ~counts.any(0)).double()
    mean = (scores * counts[:, None]).sum(0) / counts.sum(0)
    if kind == "probabilities":
        mean = normalised(mean)
    return mean.float()


def normalised(scores: Tensor) -> Tensor:
    """Rows `(n, C)` of numbers from 0 as probabilities, which add up to 1."""
    return scores / scores.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def sharpened(probabilities: Tensor, temperature: float) -> Tensor:
    """Entropy-reduced probabilities `(n, C)`: softmax of them over a temperature, as in DS-FL.

    Not their powers: at .1 equal probabilities stay equal, and 1 beside 0 becomes 1 beside exp(-10).
    """
    return (probabilities / temperature).softmax(1)


def distance(outputs: Tensor, target: Tensor, kind: Kind, match: Match) -> Tensor:
    """How far a network's outputs are from the scores that they should have, a scalar.

    Args:
        outputs: `(n, C)` logits.
        target: `(n, C)` scores.
        kind: what the target is.
        match: mean absolute or squared error over all n C scores of that kind; or the mean Kullback-Leibler divergence
            of the outputs' softmax from the target's, in nats an example.
    """
    if match == "kl-divergence":
        wanted = target.softmax(1) if kind == "logits" else target
        return F.kl_div(F.log_softmax(outputs, 1), wanted, reduction="batchmean")
    error = F.l1_loss if match == "absolute" else F.mse_loss
    return error(_as(kind, outputs), target)


def _as(kind: Kind, logits: Tensor) -> Tensor:
    return logits.softmax(1) if kind == "probabilities" else logits
