"""Kinds of outputs that are a vector for each example: scores of several labels, or numbers."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.tasks.kind import Columns, Outputs, sizes, zeros_and_ones
from fedhet.utils.statistics import Metric


class Vectors(Outputs):
    """Base class of kinds with an output for each label or target of an example."""

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.reshape(len(outputs), -1)

    def pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.reshape(labels.shape), labels.to(outputs.dtype)


class MultiLabel(Vectors):
    """Multi-label classification: logits (n, labels), labels (n, labels) of 0 and 1; binary cross entropy and AUC."""

    name = "multi-label"
    metric = "auc"
    meaning = "labels"

    def labels(self, labels: Tensor) -> Tensor:
        return labels[:, None] if labels.ndim == 1 else labels

    def numbers(self, labels: Tensor, classes: int) -> int:
        return labels.shape[1]

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        return F.binary_cross_entropy_with_logits(*self.pair(outputs, labels), pos_weight=weights)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        outputs = outputs.detach().reshape(labels.shape)
        return self.loss(outputs, labels) * len(labels), len(labels), (outputs, labels)

    def measure(self, count: int, *columns: Columns) -> Metric:
        from scipy.stats import rankdata  # slow to import

        outputs, labels = (torch.cat(column).double().cpu().numpy() for column in columns)
        positive = labels.astype(bool)
        having = positive.sum(0).astype(float)
        pairs = having * (count - having)
        won = (rankdata(outputs, axis=0) * positive).sum(0) - having * (having + 1) / 2
        values = np.divide(won, pairs, out=np.full_like(won, math.nan), where=pairs > 0)
        return Metric(tuple(values.tolist()), tuple(pairs.tolist()))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        if outputs[0].numel() != labels[0].numel() or labels.ndim != 2:
            return f"its labels are {sizes(labels)}, but its outputs are {sizes(outputs)}: each label needs an output"
        return "" if zeros_and_ones(labels) else "a multi-label task has labels 0 and 1, but its labels differ"


class Regression(Vectors):
    """Regression: outputs (n, targets), labels (n, targets) floats; mean squared error and R2.

    Outputs and labels with more axes, such as a depth for each pixel, count as a single target.
    """

    name = "regression"
    metric = "r2"
    meaning = "numbers"

    def labels(self, labels: Tensor) -> Tensor:
        labels = labels if labels.is_floating_point() else labels.float()
        return labels[:, None] if labels.ndim == 1 else labels

    def numbers(self, labels: Tensor, classes: int) -> int:
        return labels.shape[1] if labels.ndim == 2 else 1

    def loss(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        return F.mse_loss(*self.pair(outputs, labels))

    def evaluate(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, int, Columns]:
        targets = (labels if labels.ndim == 2 else labels.reshape(-1, 1)).double()
        squares = (outputs.detach().reshape(targets.shape).double() - targets).square()
        sums = (squares.sum(0), targets.sum(0), targets.square().sum(0))
        return squares.mean(1).sum(), len(targets), sums

    def measure(self, count: int, *columns: Columns) -> Metric:
        squares, total, total_squares = (torch.stack(column).sum(0) for column in columns)
        about_mean = total_squares - total.square() / max(count, 1)
        weights = torch.where(about_mean > 1e-12 * total_squares, float(count), 0.0)
        return Metric(tuple((1 - squares / about_mean).tolist()), tuple(weights.tolist()))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        if outputs[0].numel() == labels[0].numel():
            lengths = [[length for length in each.shape[1:] if length > 1] for each in (outputs, labels)]
            if lengths[0] == lengths[1] or min(map(len, lengths)) < 2:  # the same axes, or one of them flat
                return ""
        maybe = "; for several labels of 0 and 1 set task = multi-label" * zeros_and_ones(labels)
        if labels[0].numel() == 1 and bool((labels == labels.round()).all()):
            maybe += "; classes must be integers (labels.long())"
        return f"its targets are {sizes(labels)}, but its outputs are {sizes(outputs)}: each needs an output{maybe}"
