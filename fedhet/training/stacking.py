"""Arrays of several networks with equal architectures, stacked along a new first axis: (clients, ...)."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

_places: WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str]]] = WeakKeyDictionary()


def _places_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return a pair for each parameter and buffer: the dict of its module that has it, and its key in the dict."""
    if model not in _places:  # finding them takes as long as a small network's forward pass
        arrays = (arrays for module in model.modules() for arrays in (module._parameters, module._buffers))
        _places[model] = [(each, key) for each in arrays for key, array in each.items() if array is not None]
    return _places[model]


def batched(model: nn.Module, function: Callable[..., Any], dims: Sequence[Any] = (0,)) -> Callable[..., Any]:
    """Return `function`, which calls `model`, vectorised over networks by `torch.func.vmap`.

    The first argument of the result is a list of the networks' stacked arrays; `dims` are the `in_dims` of the others.
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
    """Return a network's parameters and buffers; arrays that two modules share are listed twice."""
    return [arrays[key] for arrays, key in _places_of(model)]


def linear_weights(model: nn.Module) -> list[bool]:
    """Return for each of `arrays_of(model)` whether it is the weight of an `nn.Linear`.

    Such weights are stacked transposed, so that their gradients are contiguous and need not be copied.
    """
    linear = {id(module._parameters) for module in model.modules() if type(module) is nn.Linear}
    return [id(arrays) in linear and key == "weight" for arrays, key in _places_of(model)]


def transposed(arrays: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """Return `arrays` with the last two axes exchanged where `chosen` is True."""
    return [each.mT if its else each for each, its in zip(arrays, chosen, strict=True)]


def stack(values: Sequence[Any]) -> Any:
    """Return nested containers like each of `values`, with tensors stacked, and other entries from the first."""
    first = values[0]
    if isinstance(first, dict):
        return {name: stack([each[name] for each in values]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(stack(each) for each in zip(*values, strict=True))
    return torch.stack([*values]) if isinstance(first, Tensor) else first


def dims_of(value: Any) -> Any:
    """Return `in_dims` of `torch.func.vmap` for a result of `stack`: 0 for each tensor, None for other entries."""
    if isinstance(value, dict):
        return {name: dims_of(each) for name, each in value.items()}
    return tuple(map(dims_of, value)) if isinstance(value, tuple) else 0 if isinstance(value, Tensor) else None


def clip(gradients: Sequence[Tensor], most: float) -> None:
    """Scale each client's gradients in place to a norm of at most `most`, as `nn.utils.clip_grad_norm_` does."""
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.ndim - 1)))


def first_of(count: int, arrays: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return views of the first `count` clients' arrays, and let the optimizer step these in place of all clients'."""
    chosen = {each: each.detach()[:count].requires_grad_(each.requires_grad) for each in arrays}
    for group in optimizer.param_groups:
        for each in group["params"]:
            state = optimizer.state.pop(each, {}).items()
            kept = {n: x[:count] if isinstance(x, Tensor) and x.ndim else x for n, x in state}
            optimizer.state[chosen[each]] = kept
        group["params"] = [chosen[each] for each in group["params"]]
    return [*chosen.values()]
