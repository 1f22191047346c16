"""Examples, and a data set of them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.task import Task

Indices = NDArray[np.int64]
Transform = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples in memory, as compact as they were stored: images stay uint8 until they are in a batch.

    Attributes:
        inputs: (n, ...), any dtype; `DataSet.transform` makes what a model takes of a batch.
        labels: (n,) int64 classes, or (n, labels) of 0 and 1.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Indices | Tensor) -> "Examples":
        """Copy of the examples at these indices, in this order."""
        chosen = torch.as_tensor(indices)
        return Examples(self.inputs[chosen], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds: its own training and test part, and the inputs that all share (None without a pool)."""

    train: Examples
    test: Examples
    shared: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Groups:
    """The natural clients of a data set, such as speaking roles.

    Attributes:
        names: The natural clients' names.
        train: (n_train,) index into `names` of each training example's owner.
        test: (n_test,) the same of the test examples.
    """

    names: tuple[str, ...]
    train: Indices
    test: Indices


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set: all its examples and what is to be done with a batch of them.

    Attributes:
        name: Name in the registry.
        train: Training examples.
        test: The common test set.
        classes: Number of classes, labels or characters: the outputs of a model.
        task: Loss, metric and prediction.
        input_shape: Shape of one transformed example, which a model is built for.
        transform: Makes a model's input of a batch of raw inputs (n, ...): float images that are normalised, character
            indices as int64. It works on one example's values alone, so that it may be applied to any part.
        augment: Draws random variants of a batch of raw images, same shape and dtype, with the generator given; None
            where the data set has no augmentation.
        groups: Owners of the examples, for the natural partition; None where there are none.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    task: Task
    input_shape: tuple[int, ...]
    transform: Transform
    augment: Augment | None = None
    groups: Groups | None = None
