"""A user's network tried out on a user's data before anything is trained: what it cannot do is said in a sentence."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedhet.client.networks import Network
from fedhet.data import ClientData
from fedhet.errors import DataError, FedhetError, ModelError
from fedhet.representations import Output
from fedhet.task import Task, infer

EXAMPLES = 8


@torch.no_grad()
def try_out(
    network: Network, data: ClientData, transform: Callable[[Tensor], Tensor], task: Task | None
) -> tuple[Task, str]:
    """The task of a client, and what is to be said of its network's head.

    Args:
        network: on the device of the data; left in evaluation mode.
        data: the client's.
        transform: from raw inputs to the network's.
        task: as it was chosen; None to infer it from outputs and labels.

    Returns:
        The task; and a sentence where the head does not make the network's outputs, else nothing.

    Raises:
        ModelError: the network cannot take such inputs.
        DataError: its outputs and the labels cannot be of the task.
    """
    network.model.eval()
    inputs = transform(data.train.inputs[:EXAMPLES])
    head = Output(network.model, network.representation.head)
    try:
        with head.capture():
            outputs = network.model(inputs)
    except FedhetError:
        raise
    except Exception as error:  # whatever a user's network raises, it cannot take these inputs
        given = f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"
        raise ModelError(
            f"its {type(network.model).__name__} cannot take its inputs, {given}: {type(error).__name__}: {error}"
        ) from error
    task = task or infer(outputs, data.train.labels)
    for part in (data.train, data.test, data.validation):
        if part is not None and len(part) and (problem := task.problem(outputs, part.labels)):
            raise DataError(problem)
    return task, "" if _makes(head, outputs) else network.representation.head


def _makes(head: Output, outputs: Tensor) -> bool:
    """Whether the head's values are the outputs, or something that ranks alike, such as their softmax."""
    try:
        made = head.features
    except ValueError:  # it did not run
        return False
    if made.shape != outputs.shape:
        return made.numel() == outputs.numel()
    return bool((made.argmax(-1) == outputs.argmax(-1)).all())
