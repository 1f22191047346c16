"""Verification that a batch of networks computes what one of them computes alone."""

import copy
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError
from fedhet.models.representation import isolated
from fedhet.training.dropout import Draw, recorded
from fedhet.training.kinds import IncomparableError, Kinds, own_attributes
from fedhet.training.stacked import arrays_of
from fedhet.utils.randomness import global_states

VERIFIED: dict[Hashable, Sequence[Draw] | None] = {}
"""The draws of dropout in networks of each kind that this process has met; None if they are computed alone."""


def verify(
    kind: Hashable,
    model: nn.Module,
    examples: int,
    alone: Callable[[Sequence[Draw]], list[Tensor]],
    together: Callable[[Sequence[Draw]], list[Tensor]],
) -> None:
    """Raise an exception, now and for later networks of the kind, if a batch of networks computes other values.

    Args:
        kind: the key of the kind.
        model: a network of the kind, which is not the first of the batch.
        examples: number of examples that are passed through it.
        alone: function that computes values by this network, whose arrays have `other` values meanwhile; dropout draws
            from torch's global generator, and the draws are recorded in the function's argument.
        together: function of these draws that computes the same values as part of a batch (see `first_two`).
    """
    before = Kinds(model).network()
    modules = [*model.modules()]
    kept: dict[int, Any] = {id(value): value for value in (*modules, *arrays_of(model))}
    attributes = [{name: copy.deepcopy(value, kept) for name, value in own_attributes(module)} for module in modules]
    tensors = _tensor_attributes(modules)
    try:
        with _changed(arrays_of(model)), isolated(model), recorded(examples) as draws:
            arrays = arrays_of(model)
            versions = [array._version for array in arrays]
            expected = alone(draws)
            after = arrays_of(model)
            same = all(map(operator.is_, arrays, after)) and versions == [array._version for array in after]
            # Such as the weight that the hook of `weight_norm` computes, which would be that of a batch afterwards.
            same = same and all(map(operator.is_, tensors, _tensor_attributes(modules)))
        unchanged = False
        with suppress(IncomparableError):  # of an attribute that the pass set
            unchanged = Kinds(model).network() == before
        if not unchanged:
            for module, values in zip(modules, attributes, strict=True):
                # The pass may have added attributes, such as a counter.
                for name, _ in own_attributes(module):
                    del vars(module)[name]
                vars(module).update(values)
        if not (same and unchanged):
            raise ModelError("the network changes its buffers or attributes in a forward pass")
        check_equal(together(draws), expected, "a batch computes other outputs or gradients than a network alone")
    except Exception:  # with its own values, it may compute alone: a batch cannot, whatever it raises
        VERIFIED[kind] = None
        raise
    VERIFIED[kind] = draws


def other(array: Tensor) -> Tensor:
    """Return changed values, since networks that start equal hide that a batch reads an array of the first one."""
    if not array.is_floating_point():
        return array
    # If every weight grew by the same number, layers of many inputs would have outputs at which gradients are 0.
    shift = 0.0078125 if array.ndim < 2 or not array.any() else 0.0
    return 1.0625 * array + shift


def first_two(arrays: Sequence[Tensor]) -> list[Tensor]:
    """Return the arrays (clients, ...) of the first two networks, and `other` values for the second one."""
    return [torch.stack([array[0], other(array[1])]) for array in arrays]


@contextmanager
def _changed(arrays: list[Tensor]) -> Iterator[None]:
    """Context manager that changes arrays to `other` values in place, since attributes can have the same memory."""
    memory = [array.detach() for array in arrays]
    before = [array.clone() for array in memory]
    try:
        torch._foreach_copy_(memory, [other(array) for array in before])
        yield
    finally:
        torch._foreach_copy_(memory, before)


def check_equal(values: Sequence[Tensor], expected: Sequence[Tensor], message: str) -> None:
    """Raise a ModelError with the `message` if `values` differ from `expected` by more than rounding."""
    # Arrays of a coarser type, such as those of a method's own network, round those that are computed from them.
    least = 10 * max(torch.finfo(array.dtype).eps for array in expected) ** 0.5
    largest = max(float(array.abs().max()) for array in expected)
    for array, right in zip(values, expected, strict=True):
        # Up to rounding, which depends on all values for arrays whose values cancel out.
        bound = least * max(float(right.abs().max()), least * largest)
        if not torch.allclose(array, right, rtol=0.0, atol=bound, equal_nan=True):
            raise ModelError(message)


def _tensor_attributes(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [value for module in modules for _, value in own_attributes(module) if isinstance(value, Tensor)]


@contextmanager
def computing(kind: Hashable) -> Iterator[None]:
    """Context manager for a batch's computation, without torch's warnings about functions that `vmap` computes slowly.

    It raises a ModelError at its end if a global random generator was drawn from: alone, a network or a user's function
    finds these generators seeded for its client.
    """
    before = global_states()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield
    if global_states() != before:
        VERIFIED[kind] = None
        raise ModelError("the network or a user's function draws from a global random generator")


def padded_twice(array: Tensor, count: int, length: int) -> Tensor:
    """Return the second network's first `count` rows of `array` (clients, n, ...), padded, as those of two networks."""
    # Two, since `vmap` can be right for the first network only, such as with the padding row of an embedding.
    rows = torch.cat([array[1, :count], *[array[1, :1]] * (length - count)])
    return torch.stack([rows, rows])
