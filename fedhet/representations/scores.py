"""Class scores: what networks say of examples, as logits or as probabilities."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError
from fedhet.representations.features import ROWS_AT_ONCE

Kind = Literal["logits", "probabilities"]


@torch.no_grad()
def posteriors(model: nn.Module, inputs: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Class posteriors `(n, C)` of raw inputs `(n, ...)`, float32; the model is left in evaluation mode.

    Args:
        model: the network.
        inputs: as they are stored.
        transform: from raw inputs to the model's.

    Raises:
        ModelError: the model's outputs are no `(n, C)`.
    """
    model.eval()
    logits = torch.cat([model(transform(part)) for part in inputs.split(ROWS_AT_ONCE)])
    return scores_of(logits, len(inputs), "probabilities")


def scores_of(logits: Tensor, count: int, kind: Kind) -> Tensor:
    """Class scores `(n, C)`, float32, of what a model returned for `count` examples.

    Raises:
        ModelError: that is no `(n, C)`.
    """
    if logits.ndim != 2 or len(logits) != count:
        raise ModelError(f"{kind} need outputs of shape ({count}, classes), got {tuple(logits.shape)}")
    logits = logits.float()
    return logits.softmax(1) if kind == "probabilities" else logits
