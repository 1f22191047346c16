"""Keys of networks and loss terms, equal for those that differ only in the values of their arrays.

Networks with equal keys can be computed as one batch, with the code of one of them and the arrays of each.
"""

from collections.abc import Hashable, Mapping
from enum import Enum
from functools import cached_property
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fedhet.models.representation import Output, RandomStream, Representation

MOST = 1024  # largest number of entries of a tensor that is compared by value

_VALUES = (bool, int, float, complex, str, bytes, type(None), type, range, Enum, CodeType, BuiltinFunctionType)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


class IncomparableError(Exception):
    """A value cannot be compared with those of other networks."""


class Kinds:
    """Keys of values that belong to a network: its attributes, and the constants of loss terms.

    The network's own modules and arrays are compared by their names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), prefix)
            for arrays in (module._parameters, module._buffers):
                for name, array in arrays.items():
                    if array is not None:
                        names.setdefault(id(array), f"{prefix}.{name}")
        return names

    def network(self) -> tuple[Hashable, ...]:
        """Return the network's key: classes, attributes, hooks, and shapes and sharing of arrays.

        Raises an `IncomparableError` if an attribute cannot be compared, an array is sparse or in half precision, or
        two share memory.
        """
        keys: list[Hashable] = []
        numbers: dict[int, int] = {}
        memories: dict[int, int] = {}
        for module in self._model.modules():
            keys += self._module(module)
            for name, child in module._modules.items():
                keys.append((name, numbers.setdefault(id(child), len(numbers))))
            for name, array in (*module._parameters.items(), *module._buffers.items()):
                if array is None:
                    continue
                if array.layout is not torch.strided:
                    raise IncomparableError("an array is sparse")
                if array.is_floating_point() and array.element_size() < 4:
                    raise IncomparableError("rounding in half precision hides what a batch computes wrongly")
                if memories.setdefault(array.data_ptr(), id(array)) != id(array):
                    raise IncomparableError("two parameters are one memory")
                number = numbers.setdefault(id(array), len(numbers))
                keys.append((name, number, array.shape, array.dtype, array.requires_grad))
        return tuple(keys)

    def _module(self, module: nn.Module) -> list[Hashable]:
        """Return the keys of a module's class, attributes and hooks."""
        if isinstance(module, nn.RNNBase):
            raise IncomparableError("torch.func.vmap has no rule for recurrent layers")
        if getattr(module, "padding_idx", None) is not None:  # of an embedding
            raise IncomparableError("torch.func.vmap trains the padding row of an embedding")
        # PyTorch makes a class for each module with parametrizations.
        kind: Any = type(module).__bases__ if is_parametrized(module) else type(module)
        attributes = [(name, self.of(value)) for name, value in own_attributes(module)]
        hooks = [(name, *map(self.of, vars(module)[name].values())) for name in _HOOKS]
        return [kind, *attributes, *hooks]

    def of(self, value: Any) -> Hashable:
        """Return a value's key; raises an `IncomparableError` if it cannot be compared."""
        return self._of(value, {})

    def _of(self, value: Any, seen: dict[int, int]) -> Hashable:
        kind: Any = type(value)
        if isinstance(value, _VALUES) or kind in _TORCH_VALUES:
            return kind, value
        if isinstance(value, Representation):
            return kind, value.site
        if isinstance(value, Output):
            return kind, value.module
        if isinstance(value, RandomStream):
            return kind
        if (name := self._names.get(id(value))) is not None:
            return "of the network", name
        if isinstance(value, Tensor | np.ndarray):
            array = np.asarray(value.detach().cpu()) if isinstance(value, Tensor) else value
            if array.size > MOST or array.dtype == object:
                raise IncomparableError(f"an attribute is a large {kind.__name__} that is no parameter or buffer")
            return kind, str(value.dtype), tuple(value.shape), array.tobytes()
        # A value that contains itself is compared by its place among those that contain it.
        if id(value) in seen:
            return "again", seen[id(value)]
        seen = {**seen, id(value): len(seen)}
        if len(seen) > 50:
            raise IncomparableError(f"an attribute has too many levels, down to a {kind.__name__}")
        return kind, *(self._of(part, seen) for part in _parts_of(value))


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return names and values of a module's attributes, without those that PyTorch gives every module."""
    return [item for item in vars(module).items() if item[0] not in _OF_EVERY_MODULE]


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, tuple | list):
        return [*value]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__code__, value.__module__, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, nn.Module):  # which is no submodule, but an attribute
        attributes = vars(value)
        hooks = [hook for name in _HOOKS for hook in attributes[name].values()]
        arrays = [attributes["_parameters"], attributes["_buffers"]]
        return [type(value), own_attributes(value), attributes["_modules"], *arrays, hooks]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    # What pickle would save is what makes the value; nothing is pickled here.
    try:
        return [*value.__reduce_ex__(4)]
    except Exception as error:
        raise IncomparableError(f"an attribute is a {type(value).__name__}, which cannot be compared") from error


def constants_key(kinds: Kinds, constants: Mapping[str, Any]) -> Hashable:
    """Return the key of a loss term's constants, of whose tensors and floats only shapes and types count."""
    return tuple((name, _without_tensors(kinds, value)) for name, value in constants.items())


def _without_tensors(kinds: Kinds, value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.dtype
    if isinstance(value, float):
        return float
    if isinstance(value, dict):
        return dict, *((key, _without_tensors(kinds, part)) for key, part in value.items())
    if type(value) in (tuple, list):
        return type(value), *(_without_tensors(kinds, part) for part in value)
    return kinds.of(value)
