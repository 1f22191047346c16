"""The mini-batches of a phase of training."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice

import torch
from torch import Tensor

from fedhet.data import Examples
from fedhet.utils.machine import brought


def rows_of(
    examples: Examples, size: int, epochs: int, steps: int, generator: torch.Generator, *, least: int
) -> tuple[Iterator[Tensor], int]:
    """Return the mini-batches of whole epochs, or of a number of steps, as index tensors, and their number.

    Args:
        examples: the examples, which may be in groups.
        size: batch size.
        epochs: number of epochs.
        steps: number of mini-batches instead of epochs, if above 0.
        generator: draws the order of examples.
        least: examples in the smallest mini-batch.
    """
    if examples.groups == ():
        return iter(()), 0
    total, device = steps or epochs * len(_ends(len(examples), size, least)), examples.labels.device
    if examples.groups is None:
        orders = (batches(len(examples), size, generator, device, least=least) for _ in count())
    else:
        orders = (grouped_batches(examples.groups, size, generator, least=least) for _ in count())
    return islice(chain.from_iterable(orders), total), total


def batches(
    count: int, size: int, generator: torch.Generator, device: torch.device | None = None, *, least: int = 1
) -> Iterator[Tensor]:
    """Yield the mini-batches of one shuffled epoch of `count` examples as index tensors on a device.

    A last batch of fewer than `least` examples joins the one before it.
    """
    order = torch.randperm(count, generator=generator)
    order = order if device is None else brought(order, device)
    start = 0
    for end in _ends(count, size, least):
        yield order[start:end]
        start = end


def grouped_batches(
    groups: Sequence[Tensor], size: int, generator: torch.Generator, *, least: int = 1
) -> Iterator[Tensor]:
    """Yield the mini-batches of one shuffled epoch, each of whole groups of rows (k,) int64, of about `size` examples.

    The last may be smaller, but has at least `least` examples.
    """
    order = torch.randperm(len(groups), generator=generator).tolist()
    together = max(1, round(size * len(groups) / sum(map(len, groups))))
    start = 0
    for end in _ends(len(groups), together, math.ceil(least / min(map(len, groups)))):
        yield torch.cat([groups[place] for place in order[start:end]])
        start = end


def _ends(count: int, size: int, least: int) -> list[int]:
    ends = list(range(size, count, size))
    if ends and count - ends[-1] < least:
        ends.pop()
    return [*ends, count] if count else []
