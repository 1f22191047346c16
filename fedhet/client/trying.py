"""A user's network and data, tried out before anything is trained: what cannot be used is said in a sentence."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedhet import given
from fedhet.client.networks import Network
from fedhet.data import ClientData
from fedhet.data.own import as_client_data
from fedhet.data.reading import not_finite
from fedhet.errors import DataError, FedhetError, ModelError
from fedhet.population import ClientInfo, ModelFunction
from fedhet.representations import Captured, Output
from fedhet.task import Task, infer

EXAMPLES = 8


def own_data(function: given.DataFunction, client: ClientInfo) -> ClientData:
    """The data that a user's function gives a client.

    Raises:
        DataError: they cannot be used; with the function.
    """
    value = function(client)
    try:
        return as_client_data(client.name, value)
    except DataError as error:
        raise DataError(f"{error}{given.origin(function)}") from error


def own_network(function: ModelFunction, client: ClientInfo) -> nn.Module:
    """The network that a user's function gives a client, freshly built.

    Raises:
        ModelError: it is none that can be trained; with the function.
    """
    model = function(client)
    if problem := _unfit(model):
        raise ModelError(f"client {client.name}: the model function returned a {problem}{given.origin(function)}")
    return model


def _unfit(model: object) -> str:
    """Say what is wrong with a network, whatever the data; empty if nothing is."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        return f"{name}, no nn.Module"
    if isinstance(model, torch.jit.ScriptModule):
        return f"{name}, TorchScript, whose modules cannot be seen: give the nn.Module that it was made of"
    if lazy := next((each for each, tensor in model.named_parameters() if is_lazy(tensor)), None):
        return (
            f"{name} whose {lazy} has no shape before a first pass: have the function pass one example through it, "
            "model(torch.zeros(1, ...)), before it returns it"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return f"{name} without a parameter that requires a gradient: leave something to train, at least the head"
    return ""


def take_weights(model: nn.Module, fresh: nn.Module, function: ModelFunction | None) -> None:
    """Give a network the weights of one that was built anew.

    Raises:
        ModelError: they are of other names or shapes.
    """
    try:
        model.load_state_dict(fresh.state_dict())
    except RuntimeError as error:
        raise ModelError(
            f"its {type(model).__name__} was built again as another network, and must be the same for a client every "
            f"time: let nothing random decide its layers{given.origin(function)}"
        ) from error


@dataclass(frozen=True)
class Tried:
    """The findings about a client whose network was tried out.

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
    network: Network,
    data: ClientData,
    transform: Callable[[Tensor], Tensor],
    task: Task | None,
    function: ModelFunction | None = None,
    *,
    guessed: bool = True,
) -> Tried:
    """Pass some of a client's examples through its network before anything is trained.

    Args:
        network: on the device of the data; left in evaluation mode. A user's own was not trained yet.
        data: the client's.
        transform: from raw inputs to the network's.
        task: as it was chosen; None to infer it from outputs and labels.
        function: the user's that gave the network, if one did.
        guessed: whether nobody named the network's head.

    Returns:
        The result, with a note where a guessed head does not make the outputs, or where these are random.

    Raises:
        ModelError: the network cannot take such inputs, or what it returns is no row of finite numbers an example.
        DataError: its outputs and the labels cannot be of the task.
    """
    network.model.eval()
    inputs = transform(data.train.inputs[:EXAMPLES])
    name, origin, head_name = type(network.model).__name__, given.origin(function), network.representation.head
    head = Output(network.model, head_name)
    try:
        with head.capture() as captured:
            outputs = network.model(inputs)
        again = network.model(inputs)
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
    if isinstance(function, given.Function) and (odd := not_finite(outputs)) is not None:
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
            f"its head was guessed to be {head_name!r}, the last nn.Linear, which does not make its network's outputs: "
            "name the right one, head = '...'"
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
