"""Passes of several networks that are built alike, run as one pass of a batch of networks (`torch.func`).

The parameters of all are stacked, and `torch.func.vmap` turns a layer into one grouped or batched kernel for all of
them. What is stacked is part of the graph, so each network's own parameters get their gradients, and losses,
optimisers and everything else stay each client's own.
"""

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.learning.passes import Forward, Passed
from fedhet.representations import RandomStream, isolated

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HELD = ("_parameters", "_buffers", "_modules", "training")
_texts: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()
"""What `Layout.built` and `Layout.obscure` are of each network."""


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


def together(passes: Sequence[Forward], streams: Sequence[RandomStream], *, trace: bool = True) -> list[Passed]:
    """Passes of one kind as one. Smaller batches are filled up with zeros, whose outputs nobody sees.

    Args:
        passes: of one kind.
        streams: what dropout draws from in each, but in those that bring a stream.
        trace: whether buffers (BatchNorm's statistics) are changed, but for passes that must leave none.

    Returns:
        What each gave.

    Raises:
        Unfit: an operator other than `nn.Dropout` draws random numbers, or has no form for a batch of networks.
    """
    sizes = [len(each.inputs) for each in passes]
    inputs = torch.stack([_filled(each.inputs, max(sizes)) for each in passes])
    call = _Call(
        passes[0], [(each.stream or own, size) for each, own, size in zip(passes, streams, sizes, strict=True)]
    )
    with torch.set_grad_enabled(passes[0].learns and torch.is_grad_enabled()):
        parameters = _stacked([layout(each.model).parameters for each in passes])
        own = [layout(each.model).buffers for each in passes]
        try:
            outputs, captured, buffers = vmap(call.of, randomness="error")(parameters, _stacked(own), inputs)
        except Exception as error:  # whatever a module does that a batch of networks cannot
            raise Unfit(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    if trace and passes[0].stream is None:
        with torch.no_grad():
            for name, now in buffers.items():
                for each, value in zip(own, now.unbind(), strict=True):
                    each[name].copy_(value)
    parts = {name: value.unbind() for name, value in captured.items()}
    return [
        (each[:size], {name: values[index][:size] for name, values in parts.items()})
        for index, (size, each) in enumerate(zip(sizes, outputs.unbind(), strict=True))
    ]


def fits(passes: Sequence[Forward]) -> bool:
    """Whether batches may be filled up: whether no row depends on the others. Leaves no trace.

    Args:
        passes: of one kind, and one size of batch.

    Raises:
        Unfit: as `together`, or it computes something else than the passes one by one.
    """
    passes = [replace(each, bf16=False) for each in passes]  # whose rounding would hide what differs
    last = passes[-1]
    with torch.no_grad():
        joint, seen = together(passes, [RandomStream(0) for _ in passes], trace=False)[-1]
        with isolated(last.model, RandomStream(0)):
            own, captured = last.compute(last.inputs)
        if not _alike([joint, *seen.values()], [own, *captured.values()]):
            raise Unfit("as a batch of networks it computes something else")
        if len(last.inputs) < 3:
            return False
        with isolated(last.model, RandomStream(0)):
            fewer, captured = last.compute(last.inputs[:-1])
        return _alike([fewer, *captured.values()], [each[:-1] for each in (own, *captured.values())])


def _alike(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(
        one.shape == other.shape
        and (one - other).abs().max() <= torch.finfo(one.dtype).eps ** 0.5 * other.abs().max().clamp(min=1)
        for one, other in zip(ones, others, strict=True)
    )


def _filled(inputs: Tensor, size: int) -> Tensor:
    missing = size - len(inputs)
    return torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])]) if missing else inputs


def _stacked(networks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in networks]) for name in networks[0]}


class _Call(nn.Module):
    """A pass as a module, so that `functional_call` puts other tensors into the network that it goes through.

    Args:
        asked: the pass.
        drawing: for each network what dropout draws from, and how many rows of the batch are its own.
    """

    def __init__(self, asked: Forward, drawing: Sequence[tuple[RandomStream, int]]) -> None:
        super().__init__()
        self.model = asked.model
        self._compute, self._drawing = asked.compute, drawing

    def forward(self, inputs: Tensor) -> Passed:
        live = [module for module in layout(self.model).dropouts if module.training and module.p]
        try:
            for module in live:
                vars(module)["forward"] = functools.partial(_Dropout.apply, p=module.p, drawing=self._drawing)
            return self._compute(inputs)
        finally:
            for module in live:
                del vars(module)["forward"]

    def of(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Outputs, captured values, and the buffers as they are then."""
        tensors = {f"model.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
        outputs, captured = functional_call(self, tensors, (inputs,))
        return outputs, dict(captured), {name: tensors[f"model.{name}"] for name in buffers}


class _Dropout(torch.autograd.Function):
    """Dropout of a batch of networks: each draws for its own rows, from its own stream, what it would draw alone."""

    @staticmethod
    def forward(inputs: Tensor, p: float, drawing: Sequence[tuple[RandomStream, int]]) -> Tensor:
        raise Unfit("dropout of what does not depend on the network")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: `vmap` is differentiated as it stands."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        inputs: Tensor,
        p: float,
        drawing: Sequence[tuple[RandomStream, int]],
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        inputs = inputs.movedim(in_dims[0], 0)
        factors = []
        for own, (stream, rows) in zip(inputs, drawing, strict=True):
            with stream.active({inputs.device} - {torch.device("cpu")}):
                factors.append(_filled(F.dropout(torch.ones_like(own[:rows]), p), len(own)))
        return inputs * torch.stack(factors), 0
