"""Arrays of several networks with equal architectures, stacked along a new first axis: (clients, ...)."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

_places: WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str]]] = WeakKeyDictionary()


def _places_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return, for each parameter and buffer, the dictionary of its module that holds it, and its key there."""
    if model not in _places:  # finding them takes as long as a small network's forward pass
        arrays = (arrays for module in model.modules() for arrays in (module._parameters, module._buffers))
        _places[model] = [(each, key) for each in arrays for key, array in each.items() if array is not None]
    return _places[model]


def batched(model: nn.Module, function: Callable[..., Any], dims: Sequence[Any] = (0,)) -> Callable[..., Any]:
    """Return a function that maps `function` over networks: its first argument is a list of their stacked arrays.

    `dims` are the axes of the other arguments to map over (`in_dims` of `torch.func.vmap`).
    """
    places = _places_of(model)
    before = [arrays[key] for arrays, key in places]

    def of_one(state: Sequence[Tensor], *args: Any) -> Any:
        try:
            for (arrays, key), each in zip(places, state, strict=True):
                arrays[key] = each
            return function(*args)
        finally:
            for (arrays, key), each in zip(places, before, strict=True):
                arrays[key] = each

    return vmap(of_one, in_dims=(0, *dims), randomness="error")


def arrays_of(model: nn.Module) -> list[Tensor]:
    """Return a network's parameters and buffers; one that two modules share is listed twice."""
    return [arrays[key] for arrays, key in _places_of(model)]


def linear_weights(model: nn.Module) -> list[bool]:
    """Return which of `arrays_of(model)` are weights of `nn.Linear`.

    If these are stacked transposed, their gradients are contiguous and need not be copied.
    """
    linear = {id(module._parameters) for module in model.modules() if type(module) is nn.Linear}
    return [id(arrays) in linear and key == "weight" for arrays, key in _places_of(model)]


def transposed(arrays: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """Return the arrays, those that are `chosen` with their last two axes exchanged."""
    return [each.mT if its else each for each, its in zip(arrays, chosen, strict=True)]


def stack(values: Sequence[Any]) -> Any:
    """Return nested containers with the tensors of all `values` stacked, and other values of the first."""
    first = values[0]
    if isinstance(first, dict):
        return {name: stack([each[name] for each in values]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(stack(each) for each in zip(*values, strict=True))
    return torch.stack([*values]) if isinstance(first, Tensor) else first


def dims_of(value: Any) -> Any:
    """Return the axes to map over (`in_dims`) for what `stack` returns: 0 for each tensor, None for other values."""
    if isinstance(value, dict):
        return {name: dims_of(each) for name, each in value.items()}
    return tuple(map(dims_of, value)) if isinstance(value, tuple) else 0 if isinstance(value, Tensor) else None


def clip(gradients: Sequence[Tensor], most: float) -> None:
    """Scale each client's gradients in place to a norm of at most `most`, as `nn.utils.clip_grad_norm_` does."""
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.ndim - 1)))


def first_of(count: int, leaves: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return stacked parameters of the first clients, in the same memory, and let the optimizer step only these."""
    chosen = {each: each.detach()[:count].requires_grad_() for each in leaves}
    for group in optimizer.param_groups:
        group["params"] = [chosen[each] for each in group["params"]]
    for each, first in chosen.items():
        state = optimizer.state.pop(each, {}).items()
        optimizer.state[first] = {n: x[:count] if isinstance(x, Tensor) and x.ndim else x for n, x in state}
    return [*chosen.values()]
