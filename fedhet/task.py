"""What a data set is for: its loss, its metric and what a prediction is, in one object.

`Task.evaluate` gives a `Score` for a batch. Scores add up, so that the sum over batches (or clients) is exactly the
score of all their examples together, and nothing is copied from the device before `Score.value` is asked for.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.errors import ConfigError, nearest


@dataclass(frozen=True)
class Score(ABC):
    """A metric and a mean loss over `count` examples; `a + b` is the score of both's examples together.

    Attributes:
        loss_sum: Sum of the loss over the examples, a scalar tensor.
        count: Number of predictions (examples, or characters where an example has several).
    """

    loss_sum: Tensor
    count: int

    @property
    def loss(self) -> float:
        """Mean loss; nan where there are no examples."""
        return self.loss_sum.item() / self.count if self.count else float("nan")

    @property
    @abstractmethod
    def value(self) -> float:
        """The task's metric over all the examples; nan where it is undefined."""

    @abstractmethod
    def __add__(self, other: Self) -> Self: ...

    def __radd__(self, other: int) -> Self:
        """Let `sum(scores)` start at 0."""
        return self


@dataclass(frozen=True)
class AccuracyScore(Score):
    """Share of right predictions; `correct` is their number, a scalar tensor."""

    correct: Tensor

    @property
    def value(self) -> float:
        """Accuracy in [0, 1]."""
        return self.correct.item() / self.count if self.count else float("nan")

    def __add__(self, other: Self) -> Self:
        """Add numbers of examples, of right ones, and losses."""
        return type(self)(self.loss_sum + other.loss_sum, self.count + other.count, self.correct + other.correct)


@dataclass(frozen=True)
class RankingScore(Score):
    """Mean AUC over labels; a ranking does not add up, so outputs and labels (n, labels) are kept batch by batch."""

    outputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]

    @property
    def value(self) -> float:
        """Mean AUC in [0, 1] over the labels that some examples have and others lack; nan without any such label."""
        return mean_auc(torch.cat(self.outputs), torch.cat(self.labels))

    def __add__(self, other: Self) -> Self:
        """Put the examples of both together."""
        return type(self)(
            self.loss_sum + other.loss_sum,
            self.count + other.count,
            self.outputs + other.outputs,
            self.labels + other.labels,
        )


def mean_auc(outputs: Tensor, labels: Tensor) -> float:
    """Mean area under the ROC curve over labels, ties counting half (the Mann-Whitney statistic).

    Args:
        outputs: (n, labels) scores, any monotone function of the probabilities.
        labels: (n, labels) of 0 and 1.

    Returns:
        The mean over the labels that occur with both values; nan if there is none.
    """
    columns = outputs.detach().double().T.contiguous()
    positive = labels.T.bool()
    ordered = columns.sort(dim=1).values
    below = torch.searchsorted(ordered, columns)
    up_to = torch.searchsorted(ordered, columns, right=True)
    ranks = (below + up_to + 1).double() / 2
    n_positive = positive.sum(1).double()
    n_negative = positive.shape[1] - n_positive
    auc = ((ranks * positive).sum(1) - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)
    return auc[(n_positive > 0) & (n_negative > 0)].mean().item()


class Task(ABC):
    """Loss, metric and prediction for one kind of labels.

    Attributes:
        name: The task's name in configurations and messages.
        metric: What `Score.value` is: `accuracy` or `auc`.
    """

    name: str
    metric: str

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar that can be differentiated."""

    @abstractmethod
    def evaluate(self, outputs: Tensor, labels: Tensor) -> Score:
        """Score of a batch; add scores up over batches."""

    @abstractmethod
    def probabilities(self, outputs: Tensor) -> Tensor:
        """The outputs (logits) as probabilities, same shape; what an ensemble averages."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Predicted labels, int64, in the shape of the labels."""


class Classification(Task):
    """One of several classes: logits (n, classes), labels (n,) int64; cross entropy and accuracy."""

    name = "classification"
    metric = "accuracy"

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy over the predictions."""
        return F.cross_entropy(*_flat(outputs, labels))

    def evaluate(self, outputs: Tensor, labels: Tensor) -> AccuracyScore:
        """Number of right predictions and sum of cross entropy."""
        loss = F.cross_entropy(*_flat(outputs, labels), reduction="sum")
        return AccuracyScore(loss, labels.numel(), (outputs.argmax(-1) == labels).sum())

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Softmax over the classes."""
        return outputs.softmax(-1)

    def predict(self, outputs: Tensor) -> Tensor:
        """The most probable class."""
        return outputs.argmax(-1)


def _flat(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions in one row, as cross entropy takes them."""
    return (outputs, labels) if outputs.ndim == 2 else (outputs.flatten(0, -2), labels.flatten())


class NextCharacter(Classification):
    """The next character of a text: logits (n, characters), labels (n,); or (n, steps, characters), (n, steps)."""

    name = "next-character"


class MultiLabel(Task):
    """Any number of labels at once: logits (n, labels), labels (n, labels) of 0 and 1; binary cross entropy and AUC."""

    name = "multi-label"
    metric = "auc"

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Binary cross entropy with logits, mean over examples and labels."""
        return F.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype))

    def evaluate(self, outputs: Tensor, labels: Tensor) -> RankingScore:
        """Outputs and labels to be ranked, and the sum over examples of the loss (the mean over labels)."""
        return RankingScore(self.loss(outputs, labels) * len(labels), len(labels), (outputs.detach(),), (labels,))

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Sigmoid of each label's logit."""
        return outputs.sigmoid()

    def predict(self, outputs: Tensor) -> Tensor:
        """1 where a label is more probable than not."""
        return (outputs > 0).long()


TASKS: dict[str, Task] = {task.name: task for task in (Classification(), MultiLabel(), NextCharacter())}


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ConfigError: There is none; the message says which there are.
    """
    if name not in TASKS:
        raise ConfigError(nearest("task", name, TASKS))
    return TASKS[name]
