"""Divergences between the class scores of two networks."""

import torch.nn.functional as F
from torch import Tensor


def soft_divergence(outputs: Tensor, wanted: Tensor, temperature: float, *, many_labels: bool = False) -> Tensor:
    """Return the mean KL(softmax(wanted / T) || softmax(outputs / T)) of logits (n, ..., classes) at `temperature` T.

    `wanted` is detached. With `many_labels`, each output is the logit of a separate label, and divergences are averaged
    over labels. Gradients scale with 1 / temperature^2, for which the caller must compensate.
    """
    outputs, wanted = outputs / temperature, wanted.detach() / temperature
    if not many_labels:
        return _divergences(outputs.log_softmax(-1), wanted.log_softmax(-1)).sum(-1).mean()
    held, lacked = (_divergences(F.logsigmoid(sign * outputs), F.logsigmoid(sign * wanted)).mean() for sign in (1, -1))
    return held + lacked


def _divergences(logs: Tensor, wanted: Tensor) -> Tensor:
    return F.kl_div(logs, wanted, log_target=True, reduction="none")
