"""Kinds of network outputs: class scores, multi-label scores, and numbers (regression)."""

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.tasks import metrics
from fedhet.tasks.metrics import IGNORED, Columns, Measure


def zeros_and_ones(labels: Tensor) -> bool:
    """Return whether all labels are 0 or 1."""
    return bool(((labels == 0) | (labels == 1)).all())


class Outputs:
    """A kind of network outputs, such as class scores: its loss, its metric, and the shapes of outputs and labels.

    The methods of this base class are for classification: logits (n, classes), labels (n,) int64.

    Attributes:
        name: name of the task, such as `classification`.
        metrics: the task's metrics by name; the first is the default.
        places: what has a prediction: each example (`one`), each of its `tokens`, or each of its `pixels`.
        meaning: what outputs are: scores of exclusive `classes`, multi-label scores (`labels`), or `numbers`.
        joint: whether the loss of examples depends on the others of their batch.
    """

    name: ClassVar[str] = "classification"
    metrics: ClassVar[Mapping[str, Measure]] = {
        "accuracy": metrics.ACCURACY,
        "balanced-accuracy": metrics.BALANCED_ACCURACY,
        "macro-f1": metrics.MACRO_F1,
        "auc": metrics.AUC,
    }
    places: ClassVar[Literal["one", "tokens", "pixels"]] = "one"
    meaning: ClassVar[Literal["classes", "labels", "numbers"]] = "classes"
    joint: ClassVar[bool] = False

    def scores(self, outputs: Tensor) -> Tensor:
        """Return outputs as (n, ..., k), with scores of k classes, k scores of multi-label tasks, or k numbers."""
        return outputs

    def labels(self, labels: Tensor) -> Tensor:
        """Return labels converted to the task's shape and dtype, or unchanged if they are not suitable for the task."""
        return labels

    def counting(self, labels: Tensor) -> Tensor:
        """Return which examples have a term of the loss, as booleans (n,)."""
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)

    def numbers(self, metric: str, labels: Tensor, classes: int) -> int:
        """Return how many values a metric has: 1, or one for each of `classes` or for each column of `labels`."""
        if not self.metrics[metric].by_class:
            return 1
        # Of two classes, only one has an AUC.
        return 1 if classes == 2 and not self.metrics[metric].table else classes

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and labels in the shapes and types that PyTorch's loss for this task expects."""
        return outputs.flatten(0, -2), labels.flatten()

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch, a scalar, with optional class weights (classes,)."""
        return F.cross_entropy(self.scores(outputs).flatten(0, -2), labels.flatten(), weights)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss (n,) of each example, for outputs with one prediction for each example."""
        # Under `vmap`, PyTorch's cross entropy takes twice as long.
        return -self.scores(outputs).log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Return the sum of a batch's losses and the number of predictions."""
        loss = F.cross_entropy(self.scores(outputs).flatten(0, -2), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    def collect(self, names: Iterable[str], outputs: Tensor, labels: Tensor) -> dict[str, Columns]:
        """Return, for each metric in `names`, the tensors of a batch that it needs (see `Measure.collect`)."""
        scores = self.scores(outputs.detach())
        return {name: self.metrics[name].collect(scores, labels) for name in names}

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """Return a message if outputs (of a few examples) or labels do not fit the task, else an empty string."""
        if labels.is_floating_point():
            return _FLOATS
        if outputs.ndim != labels.ndim + 1 or outputs.shape[1:-1] != labels.shape[1:]:
            return _unlike(outputs, labels)
        return _outside(labels, outputs.shape[-1])


class Binary(Outputs):
    """Binary classification: a logit, (n, 1) or (n,), labels (n,) of 0 and 1; binary cross entropy and accuracy.

    Methods use a logit z as the scores (0, z) of two classes. Outputs can also be scores of two classes, (n, 2).
    """

    name = "binary"
    metrics: ClassVar[Mapping[str, Measure]] = {
        "accuracy": metrics.ACCURACY,
        "balanced-accuracy": metrics.BALANCED_ACCURACY,
        "f1": metrics.F1,
        "auc": metrics.AUC,
        "average-precision": metrics.AVERAGE_PRECISION,
    }

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs if outputs.ndim > 1 and outputs.shape[-1] == 2 else _two_scores(outputs.reshape(-1, 1), -1)

    def labels(self, labels: Tensor) -> Tensor:
        alone = labels.numel() == len(labels) and not (labels.ndim == 1 and labels.dtype == torch.int64)
        return labels.reshape(-1).long() if alone and zeros_and_ones(labels) else labels

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.ndim > 1 and outputs.shape[-1] == 2:
            outputs = outputs.diff(dim=-1)
        return outputs, labels.reshape(outputs.shape).to(outputs.dtype)

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        if outputs[0].numel() != 1:
            return f"a binary task has one output, but its outputs are {_sizes(outputs)}: set task = classification"
        if labels.numel() != len(labels):
            return _unlike(outputs, labels)
        return "" if zeros_and_ones(labels) else "a binary task needs labels of 0 and 1: convert its labels"


class NextCharacter(Outputs):
    """Prediction of the next character: logits (n, characters), labels (n,); or (n, steps, characters), (n, steps)."""

    name = "next-character"
    metrics: ClassVar[Mapping[str, Measure]] = {"accuracy": metrics.ACCURACY, "perplexity": metrics.PERPLEXITY}
    places = "tokens"


class TokenClassification(Outputs):
    """Classification of each token: logits (n, tokens, classes), labels (n, tokens); the label -100 is ignored.

    `places` says what has a prediction: each example (`one`), each token or, in `Segmentation`, each pixel.
    """

    name = "token-classification"
    metrics: ClassVar[Mapping[str, Measure]] = {
        "accuracy": metrics.ACCURACY,
        "balanced-accuracy": metrics.BALANCED_ACCURACY,
        "macro-f1": metrics.MACRO_F1,
        "perplexity": metrics.PERPLEXITY,
    }
    places: ClassVar[Literal["one", "tokens", "pixels"]] = "tokens"

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        scores = self.scores(outputs).flatten(0, -2)
        labels = labels.flatten().long()
        total = F.cross_entropy(scores, labels, weights, reduction="sum", ignore_index=IGNORED)
        counted = labels != IGNORED
        # Without a selection, whose size depends on values, `torch.func.vmap` can compute it for each example.
        count = counted.sum() if weights is None else (weights[labels.clamp(min=0)] * counted).sum()
        return total / count.clamp(min=1e-9)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        loss, _ = super().evaluate(outputs, labels.long())
        return loss, int((labels != IGNORED).sum())

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        scores = self.scores(outputs)
        if scores.ndim != labels.ndim + 1 or scores.shape[1:-1] != labels.shape[1:]:
            return _unlike(outputs, labels)
        if labels.is_floating_point() and not zeros_and_ones(labels):
            return _FLOATS
        counted = labels[labels != IGNORED]
        if not len(counted):
            return f"all of its labels are {IGNORED}, which is ignored: give it other labels"
        problem = _outside(counted, scores.shape[-1])
        return problem and f"{problem}; {IGNORED} is the label to ignore"


class Segmentation(TokenClassification):
    """Classification of each pixel: logits (n, classes, h, w), labels (n, h, w); mean IoU. The label -100 is ignored.

    Any number of axes can follow the axis of classes. A single channel is the logit of class 1 against class 0.
    """

    name = "segmentation"
    metrics: ClassVar[Mapping[str, Measure]] = {
        "iou": metrics.IOU,
        "dice": metrics.MACRO_F1,
        "accuracy": metrics.ACCURACY,
    }
    places = "pixels"

    def scores(self, outputs: Tensor) -> Tensor:
        return (_two_scores(outputs, 1) if outputs.shape[1] == 1 else outputs).movedim(1, -1)

    def labels(self, labels: Tensor) -> Tensor:
        return labels.to(torch.uint8) if labels.is_floating_point() and zeros_and_ones(labels) else labels

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.shape[1] > 1:
            return outputs, labels.long()
        labels = labels.unsqueeze(1)
        counts = labels.long() != IGNORED
        labels = labels.to(outputs.dtype)
        return (outputs, labels) if bool(counts.all()) else (outputs[counts], labels[counts])


_FLOATS = "its labels are floats, not classes: give classes as integers, or set task = regression"


def _sizes(tensor: Tensor) -> str:
    return "of shape (" + ", ".join(["n", *map(str, tensor.shape[1:])]) + ")"


def _alike(outputs: Tensor, labels: Tensor) -> bool:
    """Return whether outputs and labels of an example have the same shape, apart from axes of length 1."""
    lengths = [[length for length in tensor.shape[1:] if length > 1] for tensor in (outputs, labels)]
    return lengths[0] == lengths[1]


def _two_scores(logits: Tensor, axis: int) -> Tensor:
    return torch.cat([torch.zeros_like(logits), logits], axis)


def _unlike(outputs: Tensor, labels: Tensor) -> str:
    remedy = (
        "give a class per prediction, or set task = multi-label for several labels of 0 and 1 per example, with an "
        "output for each"
    )
    if outputs.shape[1:] == labels.shape[1:] and labels.ndim > 1 and zeros_and_ones(labels):
        remedy = "give class numbers, labels.argmax(1)" + (", or set task = multi-label" if labels.ndim == 2 else "")
        return f"its labels are 0 or 1 for each output ({_sizes(labels)}): {remedy}"
    if outputs.shape[1:] == labels.shape[1:] and not labels.is_floating_point():
        return (
            f"its labels are whole numbers {_sizes(labels)}, each with an output: set task = regression to predict "
            "them, or give 0 and 1 for a multi-label task"
        )
    if labels.ndim > 1 and outputs.shape[2:] == labels.shape[1:]:
        remedy = "give the axis of classes last, outputs.movedim(1, -1), or set task = segmentation"
    return f"its labels are {_sizes(labels)}, but its outputs are {_sizes(outputs)}: {remedy}"


def _outside(labels: Tensor, classes: int) -> str:
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low >= 0 and high < classes:
        return ""
    return (
        f"its labels go from {low} to {high}, but its network has {classes} outputs, for classes 0 to {classes - 1}: "
        "number the classes from 0, in the same way for all clients, and give the network an output for each, or set "
        "task = regression to predict numbers"
    )


class Vectors(Outputs):
    """Base class of tasks with one output per label or target; `entries` is a loss called like `F.mse_loss`."""

    entries: ClassVar[Callable[..., Tensor]]

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.reshape(len(outputs), -1)

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(outputs.dtype, torch.float32)  # float16 ends at 65504
        return outputs.reshape(labels.shape).to(dtype), labels.to(dtype)

    def labels(self, labels: Tensor) -> Tensor:
        return labels[:, None] if labels.ndim == 1 else labels

    def numbers(self, metric: str, labels: Tensor, classes: int) -> int:
        return labels.shape[1] if labels.ndim == 2 else 1

    def collect(self, names: Iterable[str], outputs: Tensor, labels: Tensor) -> dict[str, Columns]:
        targets = labels if labels.ndim == 2 else labels.reshape(-1, 1)
        outputs = outputs.detach().reshape(targets.shape)
        return {name: self.metrics[name].collect(outputs, targets) for name in names}

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.entries(*self.pair(outputs, labels), **({} if weights is None else {"pos_weight": weights}))

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.entries(*self.pair(outputs, labels), reduction="none").flatten(1).mean(1)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return self.loss(outputs.detach(), labels) * len(labels), len(labels)


class MultiLabel(Vectors):
    """Multi-label classification: logits and labels of 0 and 1, (n, labels) each; binary cross entropy and AUC."""

    name = "multi-label"
    metrics: ClassVar[Mapping[str, Measure]] = {
        "auc": metrics.LABEL_AUC,
        "average-precision": metrics.LABEL_AVERAGE_PRECISION,
        "macro-f1": metrics.LABEL_F1,
    }
    meaning = "labels"
    entries = staticmethod(F.binary_cross_entropy_with_logits)

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        if not _alike(outputs, labels) or labels.ndim != 2:
            return f"its labels are {_sizes(labels)}, but its outputs are {_sizes(outputs)}: each label needs an output"
        return "" if zeros_and_ones(labels) else "a multi-label task needs labels of 0 and 1: convert its labels"


class Regression(Vectors):
    """Regression: outputs and float labels (n, targets), or one target of any shape; mean squared error and R2."""

    name = "regression"
    metrics: ClassVar[Mapping[str, Measure]] = {"r2": metrics.R2, "rmse": metrics.RMSE, "mae": metrics.MAE}
    meaning = "numbers"
    entries = staticmethod(F.mse_loss)

    def labels(self, labels: Tensor) -> Tensor:
        return super().labels(labels if labels.is_floating_point() else labels.double())

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        targets = (labels if labels.ndim == 2 else labels.reshape(-1, 1)).double()
        squares = (outputs.detach().reshape(targets.shape).double() - targets).square()
        return squares.mean(1).sum(), len(targets)

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        if _alike(outputs, labels):
            return ""
        return (
            f"its targets are {_sizes(labels)}, but its outputs are {_sizes(outputs)}: give both one shape; classes "
            "must be integers (labels.long()), and several labels of 0 and 1 need task = multi-label"
        )


class Survival(Outputs):
    """Survival analysis: a log hazard (n, 1) or (n,), labels (n, 2) of time and event (1, or 0 if censored).

    The loss is the negative log partial likelihood of Cox's model (1972) with Efron's correction for ties (1977),
    divided by the number of events. Its risk sets are of the mini-batch in training, and of all test examples in an
    evaluation.
    """

    name = "survival"
    metrics: ClassVar[Mapping[str, Measure]] = {"concordance": metrics.CONCORDANCE}
    meaning = "numbers"
    joint = True

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.reshape(len(outputs), -1)

    def labels(self, labels: Tensor) -> Tensor:
        return labels if labels.is_floating_point() else labels.double()

    def counting(self, labels: Tensor) -> Tensor:
        return labels[:, 1] > 0

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores(outputs), labels

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        order = labels[:, 0].argsort(descending=True, stable=True)
        times, events = labels[order].double().unbind(1)
        risks = outputs.reshape(-1)[order].double()
        if not bool(events.any()):
            return 0 * outputs.sum()
        # sum_i [r_i - log(sum_{j at risk} e^{r_j} - (k_i / d_i) sum_{j tied} e^{r_j})] over events i, where i is the
        # k_i-th (from 0) of d_i tied events.
        _, group, counts = times.unique_consecutive(return_inverse=True, return_counts=True)
        hazards = (risks - risks.max()).exp()
        at_risk = hazards.cumsum(0)[counts.cumsum(0) - 1]
        tied = torch.zeros_like(at_risk).index_add(0, group, hazards * events)
        number = torch.zeros_like(at_risk).index_add(0, group, events)
        rank = events.cumsum(0) - 1 - (number.cumsum(0) - number)[group]
        left = at_risk[group] - rank / number[group].clamp(min=1) * tied[group]
        chosen = events > 0
        likelihood = (risks - risks.max())[chosen] - left[chosen].clamp(min=1e-300).log()
        return -(likelihood.sum() / events.sum()).to(outputs.dtype)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return self.loss(outputs.detach(), labels) * len(labels), len(labels)

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        if outputs[0].numel() != 1:
            return f"a survival task has one output, the log hazard, but its outputs are {_sizes(outputs)}"
        if labels.ndim != 2 or labels.shape[1] != 2:
            return f"a survival task needs labels (n, 2) of time and event, but its labels are {_sizes(labels)}"
        if not zeros_and_ones(labels[:, 1]):
            swap = ": swap its columns" if zeros_and_ones(labels[:, 0]) else ""
            return f"a survival task needs an event of 0 or 1 in the second column of its labels{swap}"
        if bool((labels[:, 0] < 0).any()):
            return "a survival task needs times of 0 or more in the first column of its labels"
        return ""


OUTPUTS: dict[str, Outputs] = {
    kind.name: kind()
    for kind in (Outputs, Binary, MultiLabel, NextCharacter, TokenClassification, Segmentation, Regression, Survival)
}
"""Kinds of outputs by the name of their task."""

MEASURES = {name: measure for kind in OUTPUTS.values() for name, measure in kind.metrics.items()}


def direction(metric: str) -> int:
    """Return 1 if higher values of a metric (by name) are better, and -1 if lower ones are."""
    return -1 if metric in MEASURES and MEASURES[metric].lower else 1


def worst(metric: str) -> float:
    """Return the worst value of a metric (by name); 0 for a name of the user's."""
    return MEASURES[metric].limits[MEASURES[metric].lower] if metric in MEASURES else 0.0
