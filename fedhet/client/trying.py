"""A user's network and data, tried out before anything is trained: what cannot be used is said in a sentence."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedhet import given
from fedhet.data import ClientData
from fedhet.data.reading import not_finite
from fedhet.errors import DataError, FedhetError, ModelError
from fedhet.population import ModelFunction
from fedhet.representations import Captured, Output, Representation
from fedhet.task import Task, infer

EXAMPLES = 8


class Tried(NamedTuple):
    """The findings about a client's network and data.

    Attributes:
        task: of its data.
        outputs: how many a prediction has.
        note: what is to be said of the network; empty if nothing is.
    """

    task: Task
    outputs: int
    note: str = ""


@torch.no_grad()
def try_out(
    representation: Representation,
    data: ClientData,
    transform: Callable[[Tensor], Tensor],
    task: Task | None,
    function: ModelFunction | None,
    *,
    guessed: bool,
) -> Tried:
    """Pass some of a client's examples through its network, left in evaluation mode, before anything is trained.

    Args:
        representation: of the network.
        data: the client's, on the network's device.
        transform: from raw inputs to the network's.
        task: as it was chosen; None to infer it from outputs and labels.
        function: the user's that gave the network, if one did.
        guessed: whether nobody named the network's head: then there is a note where it does not make the outputs.

    Raises:
        ModelError: the network cannot take such inputs, or what it returns is no row of finite numbers an example.
        DataError: its outputs and the labels cannot be of the task.
    """
    model, inputs = representation.model.eval(), transform(data.train.inputs[:EXAMPLES])
    name, origin = type(model).__name__, given.origin(function)
    try:
        with Output(model, representation.head).capture() as captured:
            outputs = model(inputs)
        again = model(inputs)
    except FedhetError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's network raises, it cannot take these inputs
        taken = f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"
        raise ModelError(
            f"its {name} cannot take its inputs, {taken}: {type(error).__name__}: {error}{origin}"
        ) from error
    if outputs.ndim < 1 or len(outputs) != len(inputs):
        shape = f"outputs of shape {tuple(outputs.shape)}" if outputs.ndim else "a single number"
        raise ModelError(f"its {name} returned {shape} for {len(inputs)} examples: a row each is needed{origin}")
    if function is not None and (odd := not_finite(outputs)) is not None:  # nobody has trained it yet
        raise ModelError(
            f"its {name} returned {odd[1]} for row {odd[0]} of its training inputs, which are finite, before any "
            f"training{origin}"
        )
    task = task or infer(outputs, data.train.labels)
    for part in (data.train, data.test, data.validation):
        if part is not None and len(part) and (problem := task.problem(outputs, part.labels)):
            raise DataError(problem)
    note = ""
    if guessed and not _makes(captured, outputs):
        note = (
            f"its head was guessed to be {representation.head!r}, the last nn.Linear, which does not make its "
            "network's outputs: name the right one, head = '...'"
        )
    elif not torch.allclose(outputs, again, rtol=1e-3, atol=1e-6):
        note = f"its {name} returns other outputs for the same inputs each time, in evaluation mode too{origin}"
    return Tried(task, outputs.shape[-1], note)


def _makes(head: Captured, outputs: Tensor) -> bool:
    """Whether the head's values are the outputs, or something that ranks alike, such as their softmax."""
    try:
        made = head.features
    except ModelError:  # it did not run
        return False
    if made.shape != outputs.shape:
        return made.numel() == outputs.numel()
    return bool((made.argmax(-1) == outputs.argmax(-1)).all())
