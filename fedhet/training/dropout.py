"""Dropout of a batch of networks: each network has the masks that it would have alone.

PyTorch draws a mask when a layer needs it, from the global generator. The masks' shapes are recorded in a network's
forward pass; then the same numbers are drawn from a generator for each network, and dropout multiplies by them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.errors import ModelError

ATTENTION = "scaled_dot_product_attention"
NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", ATTENTION)
"""Functions of `torch.nn.functional` that draw masks."""

_AXES = {"dropout1d": 3, "dropout2d": 4, "dropout3d": 5}
"""Number of axes of a batch for functions that drop whole channels."""


class Draw(NamedTuple):
    """A mask that a network draws in each step.

    Attributes:
        kept: probability that an entry is kept.
        rows: length of the mask's first axis for each example.
        shape: lengths of the mask's other axes.
        order: the mask's axes in the order in which they lie in memory, where PyTorch fills in random numbers.
        dtype: the mask's dtype.
    """

    kept: float
    rows: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    def mask(self, examples: int, generator: torch.Generator) -> Tensor:
        """Return the mask (rows * examples, ...) that a network draws; kept entries are 1 / kept."""
        shape = (self.rows * examples, *self.shape)
        mask = torch.empty([shape[axis] for axis in self.order], dtype=self.dtype)
        mask.bernoulli_(self.kept, generator=generator).div_(self.kept)
        return mask.permute([self.order.index(axis) for axis in range(len(shape))])


def masks(
    draws: Sequence[Draw], counts: Sequence[int], most: int, generators: Sequence[torch.Generator], device: torch.device
) -> list[Tensor]:
    """Return a step's masks, (clients, rows * most, ...) each, that several networks draw from their `generators`.

    `counts` are the networks' numbers of examples in the step, padded to `most`.
    """
    drawn = []
    for draw in draws:
        mask = torch.ones(len(counts), draw.rows * most, *draw.shape, dtype=draw.dtype)
        for row, count, generator in zip(mask, counts, generators, strict=False):
            row[: draw.rows * count] = draw.mask(count, generator)
        drawn.append(mask.to(device))
    return drawn


@contextmanager
def recorded(examples: int) -> Iterator[list[Draw]]:
    """Context manager that yields a list, to which dropout in a forward pass of so many `examples` adds its draws."""
    draws: list[Draw] = []

    def record(original: Callable[..., Any], name: str, p: float, /, *args: Any, **kwargs: Any) -> Any:
        values = args[0]
        shape = (*values.shape[:-1], args[1].shape[-2]) if name == ATTENTION else _shape(name, values)
        rows, rest = divmod(shape[0], examples)
        if rest or p >= 1:
            raise ModelError("it has a dropout layer whose mask has no rows for each example")
        strides = values.stride()
        order = tuple(sorted(range(len(shape)), key=lambda axis: -strides[axis]))
        if shape != values.shape:  # of a new tensor, in which axes lie in their own order
            order = tuple(range(len(shape)))
        draws.append(Draw(1 - p, rows, tuple(shape[1:]), order, values.dtype))
        return original(*args, **kwargs)

    with _replaced(record):
        yield draws


@contextmanager
def replayed(values: Sequence[Tensor]) -> Iterator[None]:
    """Context manager in which dropout multiplies by the masks `values`, in their order."""
    rest = iter(values)

    def multiply(_original: object, name: str, _p: float, /, *args: Any, **kwargs: Any) -> Tensor:
        mask = next(rest)
        if name == ATTENTION:
            return _attention(mask, *args, **kwargs)
        inplace = _arguments(*args[1:], **kwargs)[2]
        result: Tensor = args[0].mul_(mask) if inplace else args[0] * mask
        return result

    with _replaced(multiply):
        yield


def _arguments(p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[float, bool, bool]:
    return p, training, inplace


def _shape(name: str, inputs: Tensor) -> tuple[int, ...]:
    if name not in _AXES:
        return tuple(inputs.shape)
    if inputs.ndim != _AXES[name]:
        raise ModelError(f"it has {name} of inputs with {inputs.ndim} axes")
    return *inputs.shape[:2], *(1 for _ in inputs.shape[2:])


def _attention(
    mask: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention whose weights are multiplied by `mask`, as `F.scaled_dot_product_attention` computes it."""
    if enable_gqa:
        raise ModelError("it has grouped attention with dropout")
    scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) * mask @ value


@contextmanager
def _replaced(function: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which dropout of this thread calls `function(original, name, p, ...)` instead of F's own."""
    thread = threading.get_ident()

    def replacing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            p = _probability(name, args, kwargs) if threading.get_ident() == thread else 0.0
            return function(original, name, p, *args, **kwargs) if p else original(*args, **kwargs)

        return replacement

    originals = {name: getattr(F, name) for name in NAMES}
    try:
        for name, original in originals.items():
            setattr(F, name, replacing(name, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def _probability(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if name == ATTENTION:
        p: float = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return p
    p, training, _ = _arguments(*args[1:], **kwargs)
    return p if training else 0.0
