"""The base class of the kinds of outputs."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from fedhet.utils.statistics import Metric

Places = Literal["one", "tokens", "pixels"]

Columns = tuple[Tensor, ...]
"""Tensors of a batch from which a metric is computed."""


class Outputs(ABC):
    """A kind of network outputs, such as class scores: its loss, its metric, and the shapes of outputs and labels.

    Attributes:
        name: Name of the task, such as `classification`.
        metric: `accuracy`, `auc`, `iou` or `r2`.
        places: Whether an example has one prediction, or one for each token or pixel.
        meaning: Whether outputs are scores of exclusive classes, scores of several labels, or numbers.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    places: ClassVar[Places] = "one"
    meaning: ClassVar[Literal["classes", "labels", "numbers"]] = "classes"

    def scores(self, outputs: Tensor) -> Tensor:
        """Return outputs with the axis of class scores, or of the values of a prediction, moved to the end."""
        return outputs

    def labels(self, labels: Tensor) -> Tensor:
        """Convert labels to the form that methods use; labels that need no conversion or do not fit stay unchanged."""
        return labels

    def numbers(self, labels: Tensor, classes: int) -> int:
        """Return the number of values of the metric, such as one for each class."""
        return 1

    @abstractmethod
    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and labels in the form that the corresponding loss of PyTorch expects."""

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch, a scalar, with optional class weights (classes,)."""

    @abstractmethod
    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        """Return the sum of a batch's losses, the number of predictions, and the columns that `measure` needs."""

    @abstractmethod
    def measure(self, count: int, *columns: Columns) -> Metric:
        """Compute the metric of `count` predictions from the columns that `evaluate` returned for their batches."""

    @abstractmethod
    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """Return a message if outputs of a few examples or labels of all do not fit the kind; else an empty string."""


def zeros_and_ones(labels: Tensor) -> bool:
    """Return whether all labels are 0 or 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def sizes(tensor: Tensor) -> str:
    """Describe the shape of a tensor of examples for a message."""
    return "of shape (" + ", ".join(["n", *map(str, tensor.shape[1:])]) + ")"
