"""Examples, and a data set of them."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.data.reading import LazyInputs
from fedhet.task import Task

Indices = NDArray[np.int64]
Transform = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, eq=False)
class Examples:
    """Raw inputs (n, ...) of any dtype, in memory or read on demand (`[:]` reads all), and labels.

    Labels are (n,) int64 classes, (n, labels) of 0 and 1, or (n, targets) float32; with a class for each token or pixel
    (n, tokens) int64 or (n, h, w) whole numbers. With `groups`, the rows (k,) int64 of each, a step of training is on
    whole groups only, and an example that is in none is not trained on.
    """

    inputs: Tensor | LazyInputs
    labels: Tensor
    groups: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Inputs and labels of some examples, (k,) int64 or a slice; rows of a dataset are read once for both.

        A user's collate function may change their order, and a dataset the labels: do not use `labels` with `inputs`.
        """
        if isinstance(self.inputs, LazyInputs):
            return self.inputs.pairs(rows)
        if isinstance(rows, slice):
            return self.inputs[rows], self.labels[rows]
        return self.inputs.index_select(0, rows), self.labels.index_select(0, rows)  # faster than inputs[rows]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of so many examples at a time."""
        return (self.at(slice(start, start + size)) for start in range(0, len(self), size))

    def subset(self, indices: Indices | Tensor) -> "Examples":
        """Return the examples at these indices, in this order; examples in memory are copied."""
        chosen = torch.as_tensor(indices)
        inputs = self.inputs.subset(chosen) if isinstance(self.inputs, LazyInputs) else self.inputs[chosen]
        return Examples(inputs, self.labels[chosen])

    def to(self, device: torch.device) -> "Examples":
        """The same on a device."""
        return Examples(self.inputs.to(device), self.labels.to(device))


def digest(*content: object) -> str:
    """Return a short name for tensors, of which dtype and shape count, and for the text of other objects."""
    digested = hashlib.blake2b(digest_size=12)
    for each in content:
        if not isinstance(each, Tensor):
            digested.update(f"{each}\n".encode())
            continue
        digested.update(f"{each.dtype}{list(each.shape)}".encode())
        digested.update(each.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digested.hexdigest()


@dataclass(frozen=True, eq=False)
class PublicDataset:
    """Examples that all clients share, the same for all in one order: inputs (n, ...) as they are stored, and labels.

    Labels are (n,) int64 classes, or (n, labels) of 0 and 1; None where there are none.
    """

    inputs: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @cached_property
    def digest(self) -> str:
        """A short name for the content, labels included."""
        return digest(*(tensor for tensor in (self.inputs, self.labels) if tensor is not None))

    @cached_property
    def unlabelled(self) -> "PublicDataset":
        """The same without labels; the same object again."""
        return self if self.labels is None else PublicDataset(self.inputs)

    def to(self, device: torch.device) -> "PublicDataset":
        """The same on a device."""
        return PublicDataset(self.inputs.to(device), None if self.labels is None else self.labels.to(device))


P = TypeVar("P", Examples, PublicDataset)


@lru_cache(maxsize=4)
def resident(part: P, device: torch.device) -> P:
    """The same on a device, which holds it once until `resident.cache_clear()`."""
    return part.to(device)


def relabelled(part: P, change: Callable[[Tensor], Tensor]) -> P:
    """Return the object with converted labels; the object itself if nothing changes or there are none."""
    labels = part.labels if part.labels is None else change(part.labels)
    if labels is part.labels:
        return part
    if isinstance(part.inputs, LazyInputs):
        return replace(part, inputs=replace(part.inputs, relabel=change), labels=labels)
    return replace(part, labels=labels)


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's data: its own training and test parts, and the public dataset (None without one).

    The common test set is for personal models (`test-on`). `augment` draws variants of a raw training batch, and
    `batch_size` goes before the configured one.
    """

    train: Examples
    test: Examples
    public: PublicDataset | None = None
    common: Examples | None = None
    validation: Examples | None = None
    augment: Augment | None = None
    batch_size: int | None = None

    def to(self, device: torch.device) -> "ClientData":
        """Move the examples to a device, except the public dataset."""
        parts: dict[str, Any] = {name: part for name, part in vars(self).items() if isinstance(part, Examples)}
        return replace(self, **{name: part.to(device) for name, part in parts.items()})

    def relabelled(self, change: Callable[[Tensor], Tensor]) -> "ClientData":
        """The same with all labels changed; the same object if none is."""
        parts: dict[str, Any] = {
            n: part for n, part in vars(self).items() if isinstance(part, Examples | PublicDataset)
        }
        changed = {name: relabelled(part, change) for name, part in parts.items()}
        return self if all(changed[name] is part for name, part in parts.items()) else replace(self, **changed)


class Owners(NamedTuple):
    """For each training and each test example (n,) the number of its owner, such as a speaking role; -1: nobody's."""

    train: Indices
    test: Indices


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set: its examples, and the transform of a batch.

    Attributes:
        name: Name in the registry.
        train: Training examples.
        test: The common test set.
        classes: Number of classes, labels or characters: the outputs of a model.
        task: Loss, metric and prediction.
        input_shape: Shape of one transformed example.
        transform: Makes a model's input of a batch of raw inputs (n, ...), each example by itself.
        augment: Draws random variants of a batch of raw images, same shape and dtype, with the generator given.
        groups: Owners of the examples, for the natural partition.
        together: Owners whose examples `iid` deals to one client, such as patients.
        white: Raw value of white, of images.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    task: Task
    input_shape: tuple[int, ...]
    transform: Transform
    augment: Augment | None = None
    groups: Owners | None = None
    together: Owners | None = None
    white: int = 255
