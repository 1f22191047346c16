"""Inputs of several tensors, such as the token ids and the attention mask of texts."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

# Arrays of pandas and decoded messages are read-only, and torch warns about the first such array, which is this one.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


class Inputs:
    """Several tensors (n, ...) of the same n examples, which can be used in place of one tensor.

    Operations that select, copy, move or join rows apply to all tensors. Other attributes and functions, such as
    `shape`, are those of the first tensor. A user's network is called with keywords, `network(**parts)`, or with
    positional arguments if the names are numbers, as for a tuple of tensors.
    """

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self.parts = {name: parts[name] for name in sorted(parts, key=_place)}  # as files and messages have any order

    @property
    def arguments(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The positional arguments and the keywords with which a network is called."""
        return (tuple(self.parts.values()), {}) if all(map(str.isdecimal, self.parts)) else ((), self.parts)

    @property
    def _first(self) -> Tensor:
        return next(iter(self.parts.values()))

    def __len__(self) -> int:
        return len(self._first)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "parts":  # as `copy` and `pickle` ask before there are parts
            raise AttributeError(f"Inputs has no attribute {name!r}")
        if name in ("index_select", "to", "clone", "cpu", "contiguous", "detach"):
            return lambda *args, **kwargs: Inputs({n: getattr(p, name)(*args, **kwargs) for n, p in self.parts.items()})
        return getattr(self._first, name)

    def __getitem__(self, rows: Any) -> "Inputs":
        return Inputs({name: part[rows] for name, part in self.parts.items()})

    def split(self, size: int) -> tuple["Inputs", ...]:
        """Return batches of `size` examples."""
        return tuple(self[start : start + size] for start in range(0, len(self), size))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply `torch.cat` and `torch.stack` to each tensor, and other functions to the first tensor only."""
        leaves, tree = _pytree.tree_flatten(args, is_leaf=lambda leaf: isinstance(leaf, Inputs))
        names = next([*leaf.parts] for leaf in leaves if isinstance(leaf, Inputs))
        inputs = {}
        for name in names if func in (torch.cat, torch.stack) else names[:1]:
            chosen = [leaf.parts[name] if isinstance(leaf, Inputs) else leaf for leaf in leaves]
            inputs[name] = func(*_pytree.tree_unflatten(chosen, tree), **(kwargs or {}))
        return Inputs(inputs) if func in (torch.cat, torch.stack) else inputs[names[0]]


def _place(name: str) -> tuple[bool, int, str]:
    """Return a key that sorts `input_ids` first, numbers by value and other names alphabetically."""
    return name != "input_ids", int(name) if name.isdecimal() else -1, name


_pytree.register_pytree_node(  # for torch.export and torch.func
    Inputs,
    lambda inputs: ([*inputs.parts.values()], [*inputs.parts]),
    lambda values, names: Inputs(dict(zip(names, values, strict=True))),
    serialized_type_name="fedhet.Inputs",
    flatten_with_keys_fn=lambda inputs: (
        [(_pytree.MappingKey(name), part) for name, part in inputs.parts.items()],
        [*inputs.parts],
    ),
)


def together(parts: Mapping[str, Tensor]) -> Tensor:
    """Combine tensors of the same examples, by name, in one `Inputs`, which type checkers see as a Tensor."""
    return cast(Tensor, Inputs(parts))


def parts_of(inputs: Tensor, name: str = "inputs") -> dict[str, Tensor]:
    """Return the tensors of inputs by key: `name` for a single tensor, else `name.PART`, such as `inputs.input_ids`."""
    parts = inputs.parts if isinstance(inputs, Inputs) else None
    return {name: inputs} if parts is None else {f"{name}.{key}": part for key, part in parts.items()}


def from_parts(tensors: Mapping[str, Tensor], name: str = "inputs") -> Tensor:
    """Invert `parts_of`: return the inputs with the keys `name` or `name.PART` in `tensors`, else raise a KeyError."""
    parts = {key.removeprefix(f"{name}."): part for key, part in tensors.items() if key.startswith(f"{name}.")}
    return together(parts) if parts else tensors[name]


def for_each(inputs: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `inputs` changed by `change`, which is applied to each tensor if they are several in an `Inputs`."""
    parts = inputs.parts if isinstance(inputs, Inputs) else None
    return change(inputs) if parts is None else together({name: change(part) for name, part in parts.items()})


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in memory order, as bytes (n,) uint8 on the CPU."""
    flat = tensor.detach().cpu().contiguous().flatten()
    # A single value, or none, can have the stride 0, with which PyTorch refuses another type.
    return (flat.clone(memory_format=torch.contiguous_format) if flat.numel() < 2 else flat).view(torch.uint8)
