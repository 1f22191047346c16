"""Arrays of several networks, stacked along a new first axis: (clients, ...)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map

Places = list[list[tuple[dict[str, Any], str]]]
"""For each array of a network, the modules' dicts that have it, each with its name there."""

_places: WeakKeyDictionary[nn.Module, Places] = WeakKeyDictionary()


def _places_of(model: nn.Module) -> Places:
    if model not in _places:  # finding them takes as long as a small network's forward pass
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for arrays in (module._parameters, module._buffers):
                for name, array in arrays.items():
                    if array is not None:
                        places.setdefault(id(array), []).append((arrays, name))
        _places[model] = [*places.values()]
    return _places[model]


@contextmanager
def swapped(model: nn.Module, arrays: Sequence[Tensor]) -> Iterator[None]:
    """Context manager in which a network has the `arrays`, in the order of `arrays_of`."""
    before = arrays_of(model)
    try:
        _put(model, arrays)
        yield
    finally:
        _put(model, before)


def _put(model: nn.Module, arrays: Sequence[Tensor]) -> None:
    for others, array in zip(_places_of(model), arrays, strict=True):
        for named, name in others:
            named[name] = array


def arrays_of(model: nn.Module) -> list[Tensor]:
    """Return a network's parameters and buffers as a list; an array that two modules share is listed once."""
    return [others[0][0][others[0][1]] for others in _places_of(model)]


def transposed(arrays: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """Return the list `arrays`, with the last two axes exchanged in arrays for which `chosen` is True."""
    return [array.mT if exchanged else array for array, exchanged in zip(arrays, chosen, strict=True)]


def stack(values: Sequence[Any], like: Tensor, *, floats: bool = False) -> Any:
    """Stack the tensors of nested containers of equal structure, such as dicts; keep the first one's other entries.

    Tensors with other numbers of rows, as they are drawn for mini-batches of other sizes, are padded. Floats that
    differ, or all if `floats`, become a tensor (clients,) with the type and the device of `like`.
    """

    def stacked(*leaves: Any) -> Any:
        if isinstance(leaves[0], float) and (floats or len({*leaves}) > 1):
            return like.new_tensor(leaves)
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        alike = len({leaf.shape for leaf in leaves}) == 1
        return torch.stack(leaves) if alike else pad_sequence([*leaves], batch_first=True)

    return tree_map(stacked, *values)


def clip(gradients: Sequence[Tensor], most: float) -> None:
    """Scale `gradients` (clients, ...) in place so that each client's total norm is at most `most`."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def first_of(count: int, arrays: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return views of the first `count` clients' stacked `arrays`, which the optimizer trains from now on."""
    chosen = {array: array.detach()[:count].requires_grad_(array.requires_grad) for array in arrays}
    for group in optimizer.param_groups:
        for array in group["params"]:
            optimizer.state[chosen[array]] = {
                name: value[:count] if isinstance(value, Tensor) and value.ndim else value
                for name, value in optimizer.state.pop(array, {}).items()
            }
        group["params"] = [chosen[array] for array in group["params"]]
    return [*chosen.values()]
