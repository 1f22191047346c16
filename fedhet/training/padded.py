"""Mini-batches of several networks, padded to the same number of examples by examples of weight 0."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedhet.training.training import Training

MEMORY = 2**30  # largest memory of a batch's transformed examples, in bytes, above which each step transforms its own

Batch = tuple[list[int], Tensor, Tensor, Tensor, Tensor]
"""The numbers of examples of several networks in a step, and their inputs, labels, row numbers and weights, padded."""


def padded_batches(
    group: Sequence[Training], drawn: Sequence[tuple[Iterator[Tensor], int]], dtype: torch.dtype
) -> Iterator[Batch]:
    """Yield for each step the active clients' examples, padded (see `Batch`)."""
    examples = [training.rows for training in group]
    size = sum(len(part) * part.inputs[:1].numel() for part in examples) * dtype.itemsize
    lengths = [length for _, length in drawn]
    iterators = [iterator for iterator, _ in drawn]
    if group[0].augments or size > MEMORY:
        yield from _prepared_in_each_step(group, iterators, lengths, dtype)
    else:
        yield from _prepared_once(group, [[*iterator] for iterator in iterators], lengths, dtype)


def _prepared_once(
    group: Sequence[Training], drawn: Sequence[Sequence[Tensor]], lengths: Sequence[int], dtype: torch.dtype
) -> Iterator[Batch]:
    inputs = torch.cat([training.prepare(training.rows.inputs[:], None) for training in group])
    labels = torch.cat([training.rows.labels for training in group])
    counts = [0, *[len(training.rows) for training in group][:-1]]
    starts = torch.tensor(counts, device=labels.device).cumsum(0)[:, None, None]
    batches = [*chain(*drawn)]
    # (clients, steps, examples) and (clients, steps)
    rows = pad_sequence([*pad_sequence(batches, batch_first=True).split(lengths)], batch_first=True)
    sizes = pad_sequence([*torch.tensor([len(batch) for batch in batches]).split(lengths)], batch_first=True)
    weights = ((torch.arange(rows.shape[2]) < sizes[..., None]).to(dtype) / sizes[..., None]).to(labels.device)
    places = rows + starts
    largest = rows.shape[2]
    for step, most in enumerate(sizes.amax(0).tolist()):
        if group[0].compiled:  # each number of examples is compiled by itself
            most = largest
        active = sum(length > step for length in lengths)
        here = slice(active), step, slice(most)
        chosen = places[here].flatten()
        shape = places[here].shape
        arrays = (array.index_select(0, chosen).unflatten(0, shape) for array in (inputs, labels))
        yield sizes[:active, step].tolist(), *arrays, rows[here], weights[here]


def _prepared_in_each_step(
    group: Sequence[Training], iterators: Sequence[Iterator[Tensor]], lengths: Sequence[int], dtype: torch.dtype
) -> Iterator[Batch]:
    for step in range(lengths[0]):
        active = sum(length > step for length in lengths)
        rows = [next(iterator) for iterator in iterators[:active]]
        batches = [training.batch(index) for training, index in zip(group, rows, strict=False)]
        weights = [torch.full((len(index),), 1 / len(index), dtype=dtype, device=index.device) for index in rows]
        inputs, labels = zip(*batches, strict=True)
        padded = [pad_sequence([*arrays], batch_first=True) for arrays in (inputs, labels, rows, weights)]
        yield [len(index) for index in rows], padded[0], padded[1], padded[2], padded[3]
