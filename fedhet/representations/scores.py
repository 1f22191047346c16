"""Class scores: what networks say of examples, as logits or as probabilities."""

from typing import Literal

from torch import Tensor

from fedhet.errors import ModelError

Kind = Literal["logits", "probabilities"]


def scores_of(logits: Tensor, count: int, kind: Kind) -> Tensor:
    """Class scores `(n, C)`, float32, of what a model returned for `count` examples.

    Raises:
        ModelError: that is no `(n, C)`.
    """
    if logits.ndim != 2 or len(logits) != count:
        raise ModelError(f"{kind} need outputs of shape ({count}, classes), got {tuple(logits.shape)}")
    logits = logits.float()
    return logits.softmax(1) if kind == "probabilities" else logits
