"""Evaluation: one pass over examples, in evaluation mode, without gradients."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedhet.data import Examples
from fedhet.data.reading import LazyInputs
from fedhet.learning.batching import Forward
from fedhet.representations import Representation
from fedhet.task import Score, Task

BATCH = 1024


def evaluate(
    model: nn.Module,
    examples: Examples,
    task: Task,
    prepare: Callable[[Tensor], Tensor],
    *,
    scores: nn.Module | Callable[[Tensor], Tensor] | None = None,
) -> Score | None:
    """Score a model on examples.

    Args:
        model: left in evaluation mode.
        examples: on the model's device.
        task: gives metric and loss.
        prepare: makes a float batch of raw inputs.
        scores: from a prepared batch to outputs, where a method predicts otherwise than by the model's own outputs.

    Returns:
        The score over all examples together, None where there is no example.
    """
    _switch_to_evaluation(model)
    parts = []
    for start in range(0, len(examples), BATCH):
        inputs, labels = prepare(examples.inputs[start : start + BATCH]), examples.labels[start : start + BATCH]
        scores = scores or model
        outputs = Forward(scores, inputs, learns=False).run()[0] if isinstance(scores, nn.Module) else scores(inputs)
        with torch.inference_mode():
            parts.append(task.evaluate(outputs, labels))
    return sum(parts[1:], parts[0]) if parts else None


def _switch_to_evaluation(model: nn.Module) -> None:
    if any(module.training for module in model.modules()):  # looking takes a tenth of the time of switching
        model.eval()


def read(
    model: nn.Module,
    inputs: Tensor | LazyInputs,
    transform: Callable[[Tensor], Tensor],
    *,
    until: Representation | None = None,
    rows: int = BATCH,
) -> Tensor:
    """Return a model's outputs (n, ...) for raw inputs, in evaluation mode, without a graph and not all rows at once.

    Args:
        model: left in evaluation mode.
        inputs: (n, ...) as they are stored.
        transform: from raw inputs to the model's.
        until: for Phi (n, d) instead of outputs.
        rows: at once.
    """
    _switch_to_evaluation(model)
    parts = (Forward(model, transform(part), until=until, learns=False) for part in inputs.split(rows))
    return torch.cat([part.run()[0] for part in parts])
