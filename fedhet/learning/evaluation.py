"""Passes over examples in evaluation mode, without gradients: scores, outputs, and BatchNorm's statistics."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedhet.data import Examples
from fedhet.data.reading import LazyInputs
from fedhet.learning.passes import forward
from fedhet.models.arrays import kinds_of
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
    """Return the score of a model, left in evaluation mode, over all examples together; None without an example.

    Args:
        model: on the device of the examples.
        examples: what it is scored on.
        task: gives metric and loss.
        prepare: makes a float batch of raw inputs.
        scores: from a prepared batch to outputs, where a method predicts otherwise than by the model's own outputs.
    """
    model.eval()
    predict: Callable[[Tensor], Tensor] = model if scores is None else scores
    total = None
    for raw, labels in examples.batches(BATCH):
        inputs = prepare(raw)
        outputs = forward(predict, inputs, learns=False)[0] if isinstance(predict, nn.Module) else predict(inputs)
        score = task.evaluate(outputs.detach(), labels)
        total = score if total is None else total + score
    return total


def read(
    model: nn.Module,
    inputs: Tensor | LazyInputs,
    transform: Callable[[Tensor], Tensor],
    *,
    until: Representation | None = None,
    rows: int = BATCH,
    tokens: Tensor | None = None,
) -> Tensor:
    """Return a model's outputs (n, ...) for raw inputs, without a graph and not all rows at once.

    Args:
        model: left in evaluation mode.
        inputs: (n, ...) as they are stored.
        transform: from raw inputs to the model's.
        until: for Phi (n, d) instead of outputs.
        rows: at once.
        tokens: (n,) int64, for values (n, tokens, ...): of which token of each row; None for all.
    """
    model.eval()
    values = []
    for start in range(0, len(inputs), rows):
        part = forward(model, transform(inputs[start : start + rows]), until=until, learns=False)[0]
        values.append(part if tokens is None else of_tokens(part, tokens[start : start + rows]))
    return torch.cat(values)


def of_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """The values (n, ...) of one token (n,) of each row, of those (n, tokens, ...) of all."""
    return values[torch.arange(len(values), device=values.device), tokens]


def reestimate(
    model: nn.Module,
    inputs: Tensor | LazyInputs,
    transform: Callable[[Tensor], Tensor],
    chosen: Callable[[str], bool] = lambda name: True,
) -> None:
    """Re-estimate the running statistics of BatchNorm and InstanceNorm, as means over batches, weighted by their sizes.

    Averaged weights give other activations than those that the statistics were taken of. A unit that does not vary here
    (one that a client never had, whose inputs are still zeros) counts as of variance 1.

    Args:
        model: left in evaluation mode, if it has such layers.
        inputs: (n, ...) raw examples; with fewer than two nothing is done.
        transform: from raw inputs to the model's.
        chosen: the layers whose statistics are taken, by the names of their running means.
    """
    kinds = kinds_of(model)
    layers: list[_NormBase] = []
    for prefix, module in model.named_modules():
        name = f"{prefix}.running_mean".removeprefix(".")
        if isinstance(module, _NormBase) and kinds.get(name) == "statistic" and chosen(name):
            layers.append(module)
    if not layers or len(inputs) < 2:
        return
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    try:
        seen = 0
        for batch in (part for part in inputs.split(BATCH) if len(part) > 1):
            seen += len(batch)
            for layer in layers:
                layer.momentum = len(batch) / seen  # the mean over all examples
            forward(model, transform(batch), learns=False)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.eval()
            layer.momentum = momentum
    for layer in layers:
        assert layer.running_var is not None
        layer.running_var[layer.running_var == 0] = 1
