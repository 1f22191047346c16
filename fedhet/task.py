"""The task of a data set: its loss, its metric and the meaning of its outputs, in one object.

Nothing is copied from the device before `Score.metric` is asked for. That is what a client sends: numbers with their
weights, so that `Metric.total` of several clients cannot be wrong, and no outputs or labels.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.errors import ConfigError, nearest

LARGEST = 1e9
"""Numbers beyond this are none that training which has not diverged makes: sums of their squares must be finite."""


@dataclass(frozen=True)
class Metric:
    """A metric by label, and how much each weighs; of several clients, `total` is their metric together.

    Attributes:
        values: one number for each label; a single one for accuracy.
        weights: how much each counts, as many numbers: examples for accuracy and R2, for AUC the pairs of an example
            that has the label and one that lacks it. 0 where the value is undefined.
    """

    values: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def value(self) -> float:
        """Plain mean over the labels that weigh anything; nan without one."""
        defined = [value for value, weight in zip(self.values, self.weights, strict=True) if weight > 0]
        return math.fsum(defined) / len(defined) if defined else math.nan

    @staticmethod
    def total(metrics: Iterable["Metric"]) -> "Metric":
        """For each label the weighted mean over those who can say something of it, and all their weight.

        For AUC a pair is of one client: outputs are only ranked among its own. Raises `ValueError` for other labels.
        """
        values, weights = [], []
        pairs = (zip(each.values, each.weights, strict=True) for each in metrics)
        for label in map(list, zip(*pairs, strict=True)):
            weights.append(math.fsum(weight for _, weight in label))
            # A value that weighs nothing is nan, and nan * 0 is not 0.
            won = math.fsum(value * weight for value, weight in label if weight > 0)
            values.append(won / weights[-1] if weights[-1] else math.nan)
        return Metric(tuple(values), tuple(weights))


@dataclass(frozen=True)
class Score:
    """A metric and a mean loss over `count` predictions; `a + b` is the score of both's examples together.

    Attributes:
        task: gives the metric.
        loss_sum: sum of the loss over the examples, a scalar tensor.
        count: number of predictions (examples, or characters where an example has several).
        batches: what the task needs of each batch for its metric.
    """

    task: "Task"
    loss_sum: Tensor
    count: int
    batches: tuple[tuple[Tensor, ...], ...]

    @property
    def loss(self) -> float:
        """Mean loss; nan where there are no examples."""
        return self.loss_sum.item() / self.count if self.count else math.nan

    @property
    def metric(self) -> Metric:
        """The task's metric over all the examples, and what it weighs beside other clients'."""
        return self.task.measure(self.count, *zip(*self.batches, strict=True))

    @property
    def value(self) -> float:
        """The metric as one number; nan where it is undefined."""
        return self.metric.value

    def __add__(self, other: "Score") -> "Score":
        """The score of both's examples together."""
        batches = self.batches + other.batches
        return Score(self.task, self.loss_sum + other.loss_sum, self.count + other.count, batches)


class Task(ABC):
    """Loss and metric for one kind of labels.

    Attributes:
        name: the task's name in configurations and messages.
        metric: what `Score.value` is: `accuracy`, `auc` or `r2`.
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
    def measure(self, count: int, *columns: tuple[Tensor, ...]) -> Metric:
        """The metric of so many predictions, from what `evaluate` kept of their batches."""

    @abstractmethod
    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """Why outputs of a few examples and labels of all cannot be of the task, in words; empty if they can."""


class Classification(Task):
    """One of several classes: logits (n, classes), labels (n,) int64; cross entropy and accuracy."""

    name = "classification"
    metric = "accuracy"

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy over the predictions."""
        return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())

    def evaluate(self, outputs: Tensor, labels: Tensor) -> Score:
        """Number of right predictions and sum of cross entropy."""
        loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum")
        return Score(self, loss, labels.numel(), (((outputs.argmax(-1) == labels).sum(),),))

    def measure(self, count: int, *columns: tuple[Tensor, ...]) -> Metric:
        """Accuracy in [0, 1], which weighs as many as there are predictions."""
        (correct,) = columns
        return Metric((torch.stack(correct).sum().item() / count if count else math.nan,), (count,))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """Classes must be whole numbers from 0, fewer than there are outputs."""
        classes = outputs.shape[-1]
        if binary := _binary(outputs, labels):
            return binary
        if labels.is_floating_point():
            return "its labels are no classes but numbers: with task = regression they would be targets"
        if outputs.ndim != labels.ndim + 1 or outputs.shape[1:-1] != labels.shape[1:]:
            return f"its labels are {_sizes(labels)} where its outputs are {_sizes(outputs)}: give one class an example"
        low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if low < 0 or high >= classes:
            return (
                f"its labels go from {low} to {high}, and its network has {classes} outputs, which stand for the "
                f"classes 0 to {classes - 1}: number the classes from 0, alike for all clients"
            )
        return ""


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

    def evaluate(self, outputs: Tensor, labels: Tensor) -> Score:
        """The sum over examples of the loss (the mean over labels); a ranking does not add up, so batches are kept."""
        return Score(self, self.loss(outputs, labels) * len(labels), len(labels), ((outputs.detach(), labels),))

    def measure(self, count: int, *columns: tuple[Tensor, ...]) -> Metric:
        """Area under the ROC curve of each label, ties counting half (the Mann-Whitney statistic).

        It is the share of pairs, of an example that has the label and one that lacks it, in which the first has the
        higher output; it weighs as many as there are pairs, and is nan without one.
        """
        from scipy.stats import rankdata  # which takes long to import

        outputs, labels = (torch.cat(column).double().cpu().numpy() for column in columns)
        positive = labels.astype(bool)
        having = positive.sum(0).astype(float)
        pairs = having * (count - having)
        won = (rankdata(outputs, axis=0) * positive).sum(0) - having * (having + 1) / 2
        values = np.divide(won, pairs, out=np.full_like(won, math.nan), where=pairs > 0)
        return Metric(tuple(values.tolist()), tuple(pairs.tolist()))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """There must be an output for each label, and labels must be 0 or 1."""
        if outputs.shape[1:] != labels.shape[1:]:
            return f"its labels are {_sizes(labels)} where its outputs are {_sizes(outputs)}: each needs an output"
        return "" if ((labels == 0) | (labels == 1)).all() else "its labels are not all 0 or 1, as several labels are"


class Regression(Task):
    """Numbers: outputs (n, targets), labels (n, targets) floats; mean squared error and R2."""

    name = "regression"
    metric = "r2"

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Squared error, mean over examples and targets."""
        return F.mse_loss(outputs.reshape(labels.shape), labels.to(outputs.dtype))

    def evaluate(self, outputs: Tensor, labels: Tensor) -> Score:
        """Sums of squared errors, of the targets, and of their squares."""
        targets = labels.double()
        squares = (outputs.detach().reshape(labels.shape).double() - targets).square()
        sums = (squares.sum(0), targets.sum(0), targets.square().sum(0))
        return Score(self, squares.mean(1).sum(), len(labels), (sums,))

    def measure(self, count: int, *columns: tuple[Tensor, ...]) -> Metric:
        """R2 of each target, at most 1, which weighs as many as there are examples; undefined for equal targets."""
        squares, total, total_squares = (torch.stack(column).sum(0) for column in columns)
        about_mean = total_squares - total.square() / max(count, 1)
        weights = torch.where(about_mean > 1e-12 * total_squares, float(count), 0.0)
        return Metric(tuple((1 - squares / about_mean).tolist()), tuple(weights.tolist()))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """There must be an output for each target."""
        if outputs[0].numel() != labels[0].numel():
            return f"its targets are {_sizes(labels)} where its outputs are {_sizes(outputs)}: each needs an output"
        return ""


def _sizes(tensor: Tensor) -> str:
    return "of shape (" + ", ".join(["n", *map(str, tensor.shape[1:])]) + ")"


TASKS: dict[str, Task] = {task.name: task for task in (Classification(), MultiLabel(), NextCharacter(), Regression())}


def infer(outputs: Tensor, labels: Tensor) -> Task:
    """The task that outputs of a few examples and labels of all seem to be of; `Task.problem` says if they can be.

    Several labels of 0 and 1 an example are labels, other floats are targets; all else are classes.
    """
    several = labels.ndim == 2 and labels.shape[1] > 1 and outputs.shape[1:] == labels.shape[1:]
    if several and bool(((labels == 0) | (labels == 1)).all()):
        return TASKS["multi-label"]
    if labels.is_floating_point() and not _binary(outputs, labels):
        return TASKS["regression"]
    return TASKS["classification" if labels.ndim == 1 else "next-character"]


def _binary(outputs: Tensor, labels: Tensor) -> str:
    """Why one logit and labels of 0 and 1 cannot be used; empty for other outputs or labels."""
    if len(outputs) == 0 or outputs[0].numel() != 1 or labels.numel() != len(labels):
        return ""
    if not bool(((labels == 0) | (labels == 1)).all()):
        return ""
    return (
        "its network has one output and its labels are all 0 or 1, as in a binary task with one logit, which there is "
        "not: give the network two outputs and the labels as integer classes, 0 and 1; or, if they are meant as "
        "numbers, set task = regression"
    )


def get_task(name: str) -> Task:
    """The task of that name; raises `ConfigError`, with those that there are, if there is none."""
    if name not in TASKS:
        raise ConfigError(nearest("task", name, TASKS))
    return TASKS[name]
