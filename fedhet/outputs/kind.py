"""The contract of a kind of outputs."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from fedhet.metric import Metric

Places = Literal["one", "tokens", "pixels"]

Columns = tuple[Tensor, ...]
"""The tensors that a metric needs of a batch."""


class Outputs(ABC):
    """A kind of outputs.

    Attributes:
        name: of the task, in configurations and messages.
        metric: `accuracy`, `auc`, `iou` or `r2`.
        places: an example has one prediction, or one for each token or each pixel.
        meaning: outputs are scores of classes, of labels of which an example may have several, or numbers.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    places: ClassVar[Places] = "one"
    meaning: ClassVar[Literal["classes", "labels", "numbers"]] = "classes"

    def scores(self, outputs: Tensor) -> Tensor:
        """Scores (..., classes), or numbers: the last axis is that of a prediction."""
        return outputs

    def labels(self, labels: Tensor) -> Tensor:
        """Labels in the form that methods work with; the same object if they are in it, or cannot be of the kind."""
        return labels

    def numbers(self, labels: Tensor, classes: int) -> int:
        """How many numbers the metric has."""
        return 1

    @abstractmethod
    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and labels as PyTorch's loss of the kind takes them."""

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean loss of a batch, a scalar; `weights` of the classes, (classes,)."""

    @abstractmethod
    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        """Return the sum of a batch's losses, the number of predictions, and the metric's columns."""

    @abstractmethod
    def measure(self, count: int, *columns: Columns) -> Metric:
        """The metric of so many predictions, from what `evaluate` gave of their batches."""

    @abstractmethod
    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """Why outputs of a few examples and labels of all cannot be of the kind, in words; empty if they can."""


def zeros_and_ones(labels: Tensor) -> bool:
    """Whether all labels are 0 or 1."""
    return bool(((labels == 0) | (labels == 1)).all())


def sizes(tensor: Tensor) -> str:
    """The shape of a tensor of examples, in words."""
    return "of shape (" + ", ".join(["n", *map(str, tensor.shape[1:])]) + ")"
