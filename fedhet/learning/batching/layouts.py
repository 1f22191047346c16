"""The structure of a network, by which networks that differ only in weights are recognised."""

import inspect
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedhet.learning.batching.passes import Forward

_COMPARED = (type, complex, torch.dtype, torch.device, torch.Size, OrderedDict, partial)
"""Attributes of these types count by value, as Python's own do; of others not even their pickles tell everything."""

_WEIGHTS = {"_parameters", "_buffers", "_modules", "training"}


class Unfit(Exception):
    """Why passes cannot be one."""


class Layout:
    """Where a network's modules and tensors are, and how it is built.

    Attributes:
        built: each module's class and attributes, each tensor's shape and dtype; equal ones compute the same with other
            weights. Empty where modules hold anything in which they might differ unseen (closures, other tensors).
        obscure: what that is; empty where there is nothing of the kind.
        dropouts: the modules that draw from each network's own stream.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_modules())
        self._modules = list(named.values())
        self.dropouts = [module for module in self._modules if type(module) is nn.Dropout]
        self._norms = [module for module in self._modules if isinstance(module, _NormBase)]
        self._parameters = _places(named, "_parameters")
        self._buffers = _places(named, "_buffers")
        tensors = self.parameters | self.buffers
        shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
        self.built, self.obscure = "", ""
        try:
            self.built = repr([*((name, _description(module)) for name, module in named.items()), *shapes])
        except Unfit as error:
            self.obscure = str(error)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which of the modules are in training mode."""
        return tuple(module.training for module in self._modules)

    @property
    def momenta(self) -> tuple[float | None, ...]:
        """Of layers with running statistics; they are others where statistics are taken anew."""
        return tuple(layer.momentum for layer in self._norms)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name, one that has several only once."""
        return {name: held[key] for name, held, key in self._parameters}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name; one that a module has bound anew is the new one."""
        return {name: held[key] for name, held, key in self._buffers}


layout = lru_cache(maxsize=None)(Layout)
"""A network's layout, kept until `layout.cache_clear()`."""


def first_difference(one: nn.Module, other: nn.Module) -> str:
    """How two networks that can be compared, and are not built alike, differ: in the first layer that does."""
    for mine, its in zip_longest(one.named_modules(), other.named_modules(), fillvalue=("", nn.Identity())):
        words = [repr(module) if not [*module.children()] else type(module).__name__ for _, module in (mine, its)]
        if words[0] != words[1] or _description(mine[1]) != _description(its[1]):
            return f"{mine[0] or its[0] or 'the network'} is {words[0]} in one and {words[1]} in another"
    return "their tensors have other shapes or dtypes"


def _places(named: Mapping[str, nn.Module], kind: str) -> list[tuple[str, dict[str, Any], str]]:
    seen: set[int] = set()
    places = []
    for prefix, module in named.items():
        held = getattr(module, kind)
        for key, tensor in held.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                places.append((f"{prefix}.{key}" if prefix else key, held, key))
    return places


def _description(module: nn.Module) -> bytes:
    """A module's class and attributes, without those below it and weights; `Unfit` if one cannot be compared."""
    left_out = _WEIGHTS | ({"momentum"} if isinstance(module, _NormBase) else set())
    attributes = {key: value for key, value in vars(module).items() if key not in left_out}
    hooks = {key: value for key, value in attributes.items() if "_hooks" in key and isinstance(value, OrderedDict)}
    numbers = sorted({number for each in hooks.values() for number in each})  # torch numbers all hooks of a process
    attributes |= {key: [(numbers.index(number), hook) for number, hook in hooks[key].items()] for key in hooks}
    written = io.BytesIO()
    pickler = _ByValue(written)
    pickler.fast = True  # equal values are equal bytes, whether or not they are one object
    try:
        pickler.dump((type(module), attributes))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise Unfit(f"an attribute of which this is known: {error}") from error
    return written.getvalue()


class _ByValue(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _COMPARED) or inspect.isroutine(value):
            return NotImplemented  # as ever: functions and classes by where they stand, which fails for closures
        raise Unfit(f"a {type(value).__name__} among its attributes")


def kind(asked: Forward) -> tuple[object, ...]:
    """Return the kind of a pass: passes of equal kinds and momenta can run as one; an empty kind fits no other."""
    model_layout = layout(asked.model)
    if not model_layout.built:
        return ()
    sites = tuple((name, site.site) for name, site in asked.captures.items())
    until = asked.until.site if asked.until else None
    inputs = asked.inputs
    batch = (tuple(inputs.shape[1:]), inputs.dtype, inputs.device)
    return (model_layout.built, model_layout.modes, sites, until, asked.learns, asked.stream is None, asked.bf16, batch)
