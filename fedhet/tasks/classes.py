"""Kinds of outputs that are scores of exclusive classes, for each example, token or pixel."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.tasks.kind import Columns, Outputs, Places, sizes, zeros_and_ones
from fedhet.utils.statistics import Metric

IGNORED = -100
"""Label of a token or pixel that is ignored, as in PyTorch's cross entropy."""


class Classification(Outputs):
    """Classification into several classes: logits (n, classes), labels (n,) int64; cross entropy and accuracy."""

    name = "classification"
    metric = "accuracy"

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.flatten(0, -2), labels.flatten()

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self.scores(outputs).flatten(0, -2), labels.flatten(), weights)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        scores = self.scores(outputs)
        loss = F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum")
        return loss, labels.numel(), ((scores.argmax(-1) == labels).sum(),)

    def measure(self, count: int, *columns: Columns) -> Metric:
        return Metric((int(torch.stack(columns[0]).sum()) / count if count else math.nan,), (count,))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        if labels.is_floating_point():
            return _FLOATS
        if outputs.ndim != labels.ndim + 1 or outputs.shape[1:-1] != labels.shape[1:]:
            return _unlike(outputs, labels)
        return _outside(labels, outputs.shape[-1])


class Binary(Classification):
    """Binary classification: a logit, (n, 1) or (n,), labels (n,) of 0 and 1; binary cross entropy and accuracy.

    Methods exchange a logit z as the scores (0, z) of two classes. Outputs can also be such scores, (n, 2).
    """

    name = "binary"

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
            return f"a binary task has one output, but its outputs are {sizes(outputs)}: for two use classification"
        if labels.numel() != len(labels):
            return _unlike(outputs, labels)
        return "" if zeros_and_ones(labels) else "a binary task has labels 0 and 1, but its labels have other values"


class NextCharacter(Classification):
    """Prediction of the next character of a text: logits (n, characters) and labels (n,), or a prediction at each step.

    With a prediction at each step, logits are (n, steps, characters) and labels (n, steps).
    """

    name = "next-character"
    places = "tokens"


class TokenClassification(Classification):
    """Classification of each token: logits (n, tokens, classes), labels (n, tokens); the label -100 is ignored."""

    name = "token-classification"
    places: ClassVar[Places] = "tokens"

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        scores, labels = self.scores(outputs).flatten(0, -2), labels.flatten().long()
        total = F.cross_entropy(scores, labels, weights, reduction="sum", ignore_index=IGNORED)
        counted = labels[labels != IGNORED]
        return total / (weights[counted].sum() if weights is not None else torch.tensor(len(counted))).clamp(min=1e-9)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        loss, _, columns = super().evaluate(outputs, labels.long())
        return loss, int((labels != IGNORED).sum()), columns

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        scores = self.scores(outputs)
        if scores.ndim != labels.ndim + 1 or scores.shape[1:-1] != labels.shape[1:]:
            return _unlike(outputs, labels)
        if labels.is_floating_point() and not zeros_and_ones(labels):
            return _FLOATS
        counted = labels[labels != IGNORED]
        if not len(counted):
            return f"all of its labels are {IGNORED}, which is ignored"
        problem = _outside(counted, scores.shape[-1])
        return problem and f"{problem}; {IGNORED} is the label to ignore"


class Segmentation(TokenClassification):
    """Classification of each pixel: logits (n, classes, h, w), labels (n, h, w); mean IoU. The label -100 is ignored.

    Any number of axes can follow the axis of classes. A single channel is the logit of class 1 against class 0.
    """

    name = "segmentation"
    metric = "iou"
    places: ClassVar[Places] = "pixels"

    def scores(self, outputs: Tensor) -> Tensor:
        return (_two_scores(outputs, 1) if outputs.shape[1] == 1 else outputs).movedim(1, -1)

    def labels(self, labels: Tensor) -> Tensor:
        return labels.to(torch.uint8) if labels.is_floating_point() and zeros_and_ones(labels) else labels

    def numbers(self, labels: Tensor, classes: int) -> int:
        return classes

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.shape[1] > 1:
            return outputs, labels.long()
        labels = labels.unsqueeze(1)
        counts, labels = labels.long() != IGNORED, labels.to(outputs.dtype)
        return (outputs, labels) if bool(counts.all()) else (outputs[counts], labels[counts])

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        labels, scores = labels.long(), self.scores(outputs)
        loss, count, _ = super().evaluate(outputs, labels)
        counts, classes = labels != IGNORED, scores.shape[-1]
        example = torch.arange(len(labels), device=labels.device).reshape(-1, *[1] * (labels.ndim - 1)) * classes

        def by_class(chosen: Tensor, of: Tensor) -> Tensor:  # (n, classes)
            return (example + of)[chosen].bincount(minlength=len(labels) * classes).reshape(-1, classes)

        predicted = scores.argmax(-1)
        both = by_class(counts & (predicted == labels), labels)
        union = by_class(counts, predicted) + by_class(counts, labels) - both
        return loss, count, (both.sum(0), union.sum(0), (union > 0).sum(0))

    def measure(self, count: int, *columns: Columns) -> Metric:
        both, union = (torch.stack(column).sum(0).double() for column in columns[:2])
        return Metric(tuple((both / union).tolist()), tuple(union.tolist()))


_FLOATS = "its labels are floats, not classes: give classes as integers, or set task = regression"


def _two_scores(logits: Tensor, axis: int) -> Tensor:
    """Return the scores of two classes, 0 and the logit, along an axis."""
    return torch.cat([torch.zeros_like(logits), logits], axis)


def _unlike(outputs: Tensor, labels: Tensor) -> str:
    several = "; for several labels of 0 and 1 per example, set task = multi-label, with an output for each"
    several = several if labels.ndim == 2 and labels.shape[1] > 1 and zeros_and_ones(labels) else ""
    return (
        f"its labels are {sizes(labels)}, but its outputs are {sizes(outputs)}: give one class per prediction{several}"
    )


def _outside(labels: Tensor, classes: int) -> str:
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low >= 0 and high < classes:
        return ""
    return (
        f"its labels go from {low} to {high}, but its network has {classes} outputs, for classes 0 to {classes - 1}: "
        "number the classes from 0, in the same way for all clients, and give the network an output for each"
    )
