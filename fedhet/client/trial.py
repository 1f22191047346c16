"""Tries out a client's network on its data before training, so that errors about them are plain sentences."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedhet import supplied
from fedhet.client.jobs import Tried
from fedhet.data import ClientData
from fedhet.data.reading import not_finite
from fedhet.errors import DataError, FedhetError, ModelError
from fedhet.population import ModelFunction
from fedhet.representations import Captured, Representation
from fedhet.task import Task

EXAMPLES = 8
"""Number of examples with which a network is tried out."""

OWN_MODEL = "the configured architectures are made for the configured data set: give a network of your own (model)"


@torch.no_grad()
def try_out(
    representation: Representation,
    data: ClientData,
    transform: Callable[[Tensor], Tensor],
    task: Task,
    function: ModelFunction | None,
    *,
    guessed: bool,
) -> Tried:
    """Try a client's network on some of its examples before training; the network stays in evaluation mode.

    Args:
        representation: the network's representation.
        data: the client's data, on the network's device.
        transform: from raw inputs to the network's.
        task: the chosen task; without a name it is inferred from outputs and labels.
        function: the user's function that returned the network, if any.
        guessed: whether neither user nor method named the head; then a note says if it does not compute the outputs.

    Raises:
        ModelError: the network cannot take such inputs, or does not return a row of finite numbers for each example.
        DataError: its outputs or the labels do not fit the task.
        ConfigError: the task's own loss cannot be used.
    """
    model, inputs = representation.model.eval(), transform(data.train.inputs[:EXAMPLES])
    name, origin = model._get_name(), supplied.origin(function)
    try:
        with representation.head_output() as captured:
            outputs = model(inputs)
        again = model(inputs)
    except FedhetError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's network raises, it cannot take these inputs
        taken = f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"
        reason = OWN_MODEL if function is None else _remedy(model, inputs) or f"{type(error).__name__}: {error}"
        raise ModelError(f"its {name} cannot take its inputs, {taken}: {reason}{origin}") from error
    if outputs.ndim < 1 or len(outputs) != len(inputs):
        shape = f"outputs of shape {tuple(outputs.shape)}" if outputs.ndim else "a single number"
        raise ModelError(f"its {name} returned {shape} for {len(inputs)} examples: a row each is needed{origin}")
    if function is not None and (odd := not_finite(outputs)) is not None:  # nobody has trained it yet
        raise ModelError(
            f"its {name} returned {odd[1]} for row {odd[0]} of its training inputs, which are finite, before any "
            f"training{origin}"
        )
    asked, task = task, task.of(outputs, data.train.labels)
    for part in (data.train, data.test, data.validation):
        if part is not None and len(part) and (problem := task.problem(outputs, task.outputs.labels(part.labels))):
            raise DataError(problem)
    task.check_loss(outputs, task.outputs.labels(data.train.labels[: len(outputs)]))
    note = ""
    if guessed and captured is not None and not _makes(captured, outputs):
        kind = "nn.Linear" if isinstance(model.get_submodule(representation.head), nn.Linear) else "convolution"
        note = (
            f"its head was guessed to be {representation.head!r}, the last {kind}, which does not make its "
            "network's outputs: name the right one, head = '...'"
        )
    elif _probabilities(model, task, outputs):
        note = (
            f"its {name} returns probabilities, and the loss of {task.name} takes scores before a softmax or sigmoid: "
            f"leave that out of the network, since it learns more slowly with it{origin}"
        )
    elif not torch.allclose(outputs, again, rtol=1e-3, atol=1e-6):
        note = f"its {name} returns other outputs for the same inputs each time, in evaluation mode too{origin}"
    elif task is not asked and task.name == "multi-label" and bool((data.train.labels.sum(1) == 1).all()):
        note = "each of its examples has one label of several: classes are given by their numbers, labels.argmax(1)"
    scores = task.outputs.scores(outputs)
    tokens = scores.shape[1] if task.outputs.places == "tokens" and scores.ndim == 3 else 1
    return Tried(task, scores.shape[-1], note, tokens)


def _remedy(model: nn.Module, inputs: Tensor) -> str:
    """Return how images must be laid out for the network's first convolution; empty if that is not what is wrong."""
    first = next((each for each in model.modules() if isinstance(each, nn.Conv2d)), None)
    if first is None or inputs.ndim not in (3, 4):
        return ""
    if inputs.ndim == 4 and inputs.shape[1] != first.in_channels == inputs.shape[3]:
        return "their channels come last: give images as (n, channels, height, width), inputs.permute(0, 3, 1, 2)"
    if inputs.ndim == 3 and first.in_channels == 1:
        return "they have no axis of channels: give images as (n, 1, height, width), inputs.unsqueeze(1)"
    return ""


def _probabilities(model: nn.Module, task: Task, outputs: Tensor) -> bool:
    """Whether a network returns probabilities, where the task's own loss takes scores before a softmax or sigmoid."""
    if task.own_loss is not None or task.outputs.meaning == "numbers":
        return False
    if task.name in ("binary", "multi-label"):
        return isinstance([*model.modules()][-1], nn.Sigmoid)
    scores = task.outputs.scores(outputs)
    sums = scores.sum(-1)
    return bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)


def _makes(head: Captured, outputs: Tensor) -> bool:
    """Whether the head's outputs are the network's, or rank classes alike, as before a softmax."""
    try:
        scores = head.features
    except ModelError:  # it did not run
        return False
    if scores.shape != outputs.shape:
        return scores.numel() == outputs.numel()
    return bool((scores.argmax(-1) == outputs.argmax(-1)).all())
