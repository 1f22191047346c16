"""How a network is built, so that networks that compute the same with other weights can be told."""

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.learning.batching.passes import Forward

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HELD = ("_parameters", "_buffers", "_modules", "training")
_texts: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()
"""`Layout.built` and `Layout.obscure` of each network."""


class Unfit(Exception):
    """Why passes cannot be one."""


class Layout:
    """Where a network's modules and tensors are, and how it is built.

    Attributes:
        built: equal texts mean the same computation with other weights: each module's class and plain attributes, and
            each tensor's shape and dtype. Empty where modules hold anything else (tensors that are no buffers,
            closures), in which they might differ unseen.
        obscure: what that is; empty where there is nothing of the kind.
        dropouts: the modules that draw from each network's own stream.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_modules())
        self._modules = list(named.values())
        self.dropouts = [module for module in self._modules if type(module) is nn.Dropout]
        self._norms = [module for module in self._modules if isinstance(module, _BatchNorm)]
        self._parameters = _places(named, "_parameters")
        self._buffers = _places(named, "_buffers")
        if model not in _texts:
            tensors = self.parameters | self.buffers
            shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
            try:
                _texts[model] = "\n".join([*(_module(*each) for each in named.items()), *shapes]), ""
            except Unfit as error:
                _texts[model] = "", str(error)
        self.built, self.obscure = _texts[model]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which of the modules are in training mode."""
        return tuple(module.training for module in self._modules)

    @property
    def momenta(self) -> tuple[float | None, ...]:
        """Of BatchNorm's layers; they are others where statistics are taken anew."""
        return tuple(layer.momentum for layer in self._norms)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name, one that has several only once."""
        return {name: held[key] for name, held, key in self._parameters}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name; one that a module has bound anew is the new one."""
        return {name: held[key] for name, held, key in self._buffers}


layout = functools.lru_cache(maxsize=None)(Layout)
"""A network's layout, kept until `layout.cache_clear()`."""


def first_difference(one: nn.Module, other: nn.Module) -> str:
    """The first line in which two networks that can be compared are built differently; empty where they are alike."""
    pairs = zip_longest(*(layout(model).built.splitlines() for model in (one, other)), fillvalue="nothing")
    mine, its = next(((mine, its) for mine, its in pairs if mine != its), ("", ""))
    words = [(a, b) for a, b in zip_longest(mine.split(), its.split(), fillvalue="nothing") if a != b]
    return f"{mine.split()[0]} has {words[0][0]} in one and {words[0][1]} in another" if words else ""


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


def _module(name: str, module: nn.Module) -> str:
    held = (*_HELD, "momentum") if isinstance(module, _BatchNorm) else _HELD
    attributes = {key: value for key, value in vars(module).items() if key not in held}
    # Torch numbers all hooks of a process: here they go by their order in this module.
    numbers = sorted({number for key, value in attributes.items() if _holds_hooks(key, value) for number in value})
    places = {number: place for place, number in enumerate(numbers)}
    for key, value in attributes.items():
        if _holds_hooks(key, value):
            attributes[key] = {places[number]: each for number, each in value.items()}
    return f"{name}: {_named(type(module))} " + " ".join(f"{key}={_plain(each)}" for key, each in attributes.items())


def _holds_hooks(key: str, value: object) -> bool:
    return "_hooks" in key and isinstance(value, OrderedDict)


def _plain(value: object) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_plain(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, set | frozenset):
        return f"({', '.join(sorted(map(_plain, value)))})"
    if isinstance(value, functools.partial):
        return f"{_plain(value.func)}{_plain(value.args)}{_plain(value.keywords)}"
    if isinstance(value, type) or inspect.isroutine(value):
        return _named(value)
    raise Unfit(f"a {type(value).__name__} among its attributes")


def _named(value: Any) -> str:
    """A class or function by where it stands; one that is made anew for each network is not the same in each."""
    text = f"{value.__module__}.{value.__qualname__}"
    found: Any = sys.modules.get(value.__module__ or "")
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is value or inspect.isbuiltin(value):
        return text
    if isinstance(value, type):
        return f"{text} {id(value)}"
    raise Unfit(f"{text} among its attributes")


def kind(asked: Forward) -> tuple[object, ...]:
    """Passes of one kind may be one pass, where momenta are the same, and but for the sizes of their batches.

    Empty: this one can be no other's.
    """
    found = layout(asked.model)
    if not found.built:
        return ()
    sites = tuple((name, site.site) for name, site in asked.captures.items())
    until = asked.until.site if asked.until else None
    inputs = asked.inputs
    batch = (tuple(inputs.shape[1:]), inputs.dtype, inputs.device)
    return (found.built, found.modes, sites, until, asked.learns, asked.stream is None, asked.bf16, batch)
