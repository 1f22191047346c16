"""Outputs that are scores of classes, of which one is right: for an example, a token or a pixel."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.metric import Metric
from fedhet.outputs.kind import Columns, Outputs, Places, sizes, zeros_and_ones

IGNORED = -100
"""Label of a token or a pixel that does not count, as in PyTorch's cross entropy."""


class Classification(Outputs):
    """One of several classes: logits (n, classes), labels (n,) int64; cross entropy and accuracy."""

    name = "classification"
    metric = "accuracy"

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (predictions, classes) and classes (predictions,)."""
        return outputs.flatten(0, -2), labels.flatten()

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean cross entropy over the predictions."""
        return F.cross_entropy(self.scores(outputs).flatten(0, -2), labels.flatten(), weights)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        """The sum of cross entropy, and the predicted and the right classes."""
        scores = self.scores(outputs)
        loss = F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum")
        return loss, labels.numel(), (scores.argmax(-1), labels)

    def measure(self, count: int, *columns: Columns) -> Metric:
        """Return the accuracy in [0, 1], weighted by the number of predictions."""
        right = sum(int((predicted == labels).sum()) for predicted, labels in zip(*columns, strict=True))
        return Metric((right / count if count else math.nan,), (count,))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """Classes must be whole numbers from 0, fewer than there are outputs."""
        if labels.is_floating_point():
            return "its labels are no classes but numbers: with task = regression they would be targets"
        if outputs.ndim != labels.ndim + 1 or outputs.shape[1:-1] != labels.shape[1:]:
            return _unlike(outputs, labels)
        return _outside(labels, outputs.shape[-1])


class Binary(Classification):
    """Yes or no: one logit, (n, 1) or (n,), labels (n,) of 0 and 1; binary cross entropy and accuracy.

    A logit z is the scores (0, z) of two classes, and that is what methods exchange. Where a method predicts otherwise
    than by the network, outputs may be such scores.
    """

    name = "binary"

    def scores(self, outputs: Tensor) -> Tensor:
        """Two scores, (n, 2)."""
        return outputs if outputs.ndim > 1 and outputs.shape[-1] == 2 else _two_scores(outputs.reshape(-1, 1), -1)

    def labels(self, labels: Tensor) -> Tensor:
        """Classes 0 and 1, (n,) int64."""
        alone = labels.numel() == len(labels) and not (labels.ndim == 1 and labels.dtype == torch.int64)
        return labels.reshape(-1).long() if alone and zeros_and_ones(labels) else labels

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The logits as the network gave them, and as many floats."""
        if outputs.ndim > 1 and outputs.shape[-1] == 2:
            outputs = outputs.diff(dim=-1)
        return outputs, labels.reshape(outputs.shape).to(outputs.dtype)

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """There must be one output and one label an example."""
        if outputs[0].numel() != 1:
            return (
                f"a binary task has one output, and its outputs are {sizes(outputs)}: of two the task is classification"
            )
        if labels.numel() != len(labels):
            return _unlike(outputs, labels)
        return "" if zeros_and_ones(labels) else "its labels are not all 0 or 1, as those of a binary task are"


class NextCharacter(Classification):
    """The next character of a text: logits (n, characters), labels (n,); or (n, steps, characters), (n, steps)."""

    name = "next-character"
    places = "tokens"


class TokenClassification(Classification):
    """A class for each token: logits (n, tokens, classes), labels (n, tokens), of which -100 do not count."""

    name = "token-classification"
    places: ClassVar[Places] = "tokens"

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean cross entropy over the predictions that count; 0 without one."""
        scores, labels = self.scores(outputs).flatten(0, -2), labels.flatten().long()
        total = F.cross_entropy(scores, labels, weights, reduction="sum", ignore_index=IGNORED)
        counted = labels[labels != IGNORED]
        return total / (weights[counted].sum() if weights is not None else torch.tensor(len(counted))).clamp(min=1e-9)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        """Number of right predictions and sum of cross entropy, over those that count."""
        loss, _, columns = super().evaluate(outputs, labels.long())
        return loss, int((labels != IGNORED).sum()), columns

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """There must be a label for each prediction, a class or -100."""
        scores = self.scores(outputs)
        if scores.ndim != labels.ndim + 1 or scores.shape[1:-1] != labels.shape[1:]:
            return _unlike(outputs, labels)
        if labels.is_floating_point() and not zeros_and_ones(labels):
            return "its labels are no classes but numbers: with task = regression they would be targets"
        counted = labels[labels != IGNORED]
        if not len(counted):
            return f"none of its labels counts: all are {IGNORED}"
        problem = _outside(counted, scores.shape[-1])
        return problem and f"{problem}; {IGNORED} is the label of what does not count"


class Segmentation(TokenClassification):
    """A class for each pixel: logits (n, classes, h, w), labels (n, h, w), of which -100 do not count; mean IoU.

    There may be any number of axes behind the classes. With one channel its logit is that of class 1 beside class 0.
    """

    name = "segmentation"
    metric = "iou"
    places: ClassVar[Places] = "pixels"

    def scores(self, outputs: Tensor) -> Tensor:
        """Scores (n, h, w, classes)."""
        return (_two_scores(outputs, 1) if outputs.shape[1] == 1 else outputs).movedim(1, -1)

    def labels(self, labels: Tensor) -> Tensor:
        """Whole numbers."""
        return labels.to(torch.uint8) if labels.is_floating_point() and zeros_and_ones(labels) else labels

    def numbers(self, labels: Tensor, classes: int) -> int:
        """One for each class."""
        return classes

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (n, classes, h, w) and classes (n, h, w); of one channel floats (n, 1, h, w).

        If some pixels do not count, one channel gives vectors of those that do: -100 would be a target like any other.
        """
        if outputs.shape[1] > 1:
            return outputs, labels.long()
        labels = labels.unsqueeze(1)
        counts, labels = labels.long() != IGNORED, labels.to(outputs.dtype)
        return (outputs, labels) if bool(counts.all()) else (outputs[counts], labels[counts])

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        """For each class the pixels of intersection and union, and the examples that have any."""
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
        """Intersection over union of each class, which weighs as many pixels as the union has."""
        both, union = (torch.stack(column).sum(0).double() for column in columns[:2])
        return Metric(tuple((both / union).tolist()), tuple(union.tolist()))


def _two_scores(logits: Tensor, axis: int) -> Tensor:
    """Scores of two classes whose difference is a logit: 0 and the logit."""
    return torch.cat([torch.zeros_like(logits), logits], axis)


def _unlike(outputs: Tensor, labels: Tensor) -> str:
    several = "; several labels of 0 and 1 an example need an output each (task = multi-label)"
    several = several if labels.ndim == 2 and labels.shape[1] > 1 and zeros_and_ones(labels) else ""
    return (
        f"its labels are {sizes(labels)} where its outputs are {sizes(outputs)}: give one class a prediction{several}"
    )


def _outside(labels: Tensor, classes: int) -> str:
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low >= 0 and high < classes:
        return ""
    return (
        f"its labels go from {low} to {high}, and its network has {classes} outputs, which stand for the "
        f"classes 0 to {classes - 1}: number the classes from 0, alike for all clients, and give the network an output "
        "for each"
    )
