"""Metrics: what each one needs of a batch, and its values with the weights by which clients' values are averaged.

A metric of a table of classes, such as F1, is a sum: its weighted mean over clients is the metric of all their examples
together. AUC, average precision, R2, RMSE and perplexity are no sums: for each class or target, clients' values are
averaged over those that have one, and then the classes or targets. Values are those of scikit-learn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.utils.statistics import Metric

Columns = tuple[Tensor, ...]
"""Tensors that a metric needs of a batch."""

LARGEST = 1e9
"""Losses, weights and metrics above this value count as diverged, so that sums of squares stay finite."""

IGNORED = -100
"""Label of a token or pixel that is ignored, as in PyTorch's cross entropy."""


@dataclass(frozen=True)
class Measure:
    """A metric.

    Attributes:
        collect: function of a batch that returns the tensors that `combine` needs. Its arguments are scores
            (n, ..., C) and labels (n, ...) of class tasks, or outputs and labels (n, k) of others.
        combine: function of the number of predictions and, for each of these tensors, the tuple of it by batch.
        by_class: whether there is a value for each class.
        table: whether the weights are numbers of predictions by class.
        pairs: whether the weights are numbers of pairs of examples.
        heaviest: largest sum of weights that a prediction can add to a class.
        lower: whether lower values are better.
        limits: smallest and largest value.
    """

    collect: Callable[[Tensor, Tensor], Columns]
    combine: Callable[..., Metric]
    by_class: bool = False
    table: bool = False
    pairs: bool = False
    heaviest: float = 1.0
    lower: bool = False
    limits: tuple[float, float] = (0.0, 1.0)


# ---- sums of hits


def _hits(scores: Tensor, labels: Tensor) -> Columns:
    return ((scores.argmax(-1) == labels).sum(),)


def _fraction(count: int, hits: Columns) -> Metric:
    return Metric((int(torch.stack(hits).sum()) / count if count else math.nan,), (count,))


# ---- a table of classes


def _table(scores: Tensor, labels: Tensor) -> Columns:
    """Return by class numbers of correct predictions, of predictions and of labels, and of examples with either."""
    labels = labels.long()
    counts = labels != IGNORED
    classes = scores.shape[-1]
    example = torch.arange(len(labels), device=labels.device).reshape(-1, *[1] * (labels.ndim - 1)) * classes

    def by_class(chosen: Tensor, of: Tensor) -> Tensor:  # (n, classes)
        return (example + of)[chosen].bincount(minlength=len(labels) * classes).reshape(-1, classes)

    predicted = scores.argmax(-1)
    both = by_class(counts & (predicted == labels), labels)
    positive, actual = by_class(counts, predicted), by_class(counts, labels)
    return both.sum(0), positive.sum(0), actual.sum(0), (positive + actual > 0).sum(0), (actual > 0).sum(0)


def _summed(columns: tuple[Columns, ...]) -> list[Tensor]:
    return [torch.stack(column).sum(0).double() for column in columns]


def _ratio(above: Tensor, below: Tensor, having: Tensor, either: Tensor) -> Metric:
    """Return ratios by class; behind one are the examples having the class, since a network can predict it for all."""
    behind = torch.where(having > 0, having, either)
    return Metric(tuple((above / below).tolist()), tuple(below.tolist()), tuple(behind.int().tolist()))


def _recalls(count: int, *columns: Columns) -> Metric:
    both, _, actual, _, having = _summed(columns)
    return _ratio(both, actual, having, having)


def _f1(count: int, *columns: Columns) -> Metric:
    both, positive, actual, either, having = _summed(columns)
    return _ratio(2 * both, positive + actual, having, either)


def _f1_of_one(count: int, *columns: Columns) -> Metric:
    """Return the F1 of class 1 of two; the examples behind it are those of class 1 or, if fewer, the others."""
    metric = _f1(count, *columns)
    behind = metric.behind[1]
    others = count - metric.behind[1]
    return Metric(metric.values[1:], metric.weights[1:], (min(behind, others) if others else behind,))


def _f1_of_labels(count: int, *columns: Columns) -> Metric:
    """Return the F1 of each label; the examples behind it are those with the label or, if fewer, those without."""
    both, positive, actual, either = _summed(columns)
    return _ratio(2 * both, positive + actual, torch.minimum(actual, count - actual), either)


def _iou(count: int, *columns: Columns) -> Metric:
    both, positive, actual, either, having = _summed(columns)
    return _ratio(both, positive + actual - both, having, either)


def _signs(outputs: Tensor, labels: Tensor) -> Columns:
    """Return numbers of correct predictions, of predictions, of labels and of examples with either, by label."""
    predicted, actual = outputs > 0, labels > 0.5
    both = predicted & actual
    return both.sum(0), predicted.sum(0), actual.sum(0), (predicted | actual).sum(0)


# ---- ranks


def _class_scores(scores: Tensor, labels: Tensor) -> Columns:
    """Return scores and labels of each class against all others; of two classes, those of class 1."""
    counted = labels != IGNORED
    scores = scores[counted]
    labels = labels[counted].long()
    if scores.shape[-1] == 2:
        return scores.diff(dim=-1), labels[:, None]
    # Equal probabilities, as those of trees, stay equal: the normalisation of others differs by rounding errors.
    return scores.double().log_softmax(-1).round(decimals=13), F.one_hot(labels, scores.shape[-1])


def _entries(outputs: Tensor, labels: Tensor) -> Columns:
    return outputs, labels


def _ranked(name: str, *, pairs: bool) -> Callable[..., Metric]:
    """Return `Measure.combine` of a metric of scikit-learn by column, which needs examples with and without a label.

    The weights are numbers of `pairs` of such examples, else of all examples.
    """

    def combine(count: int, *columns: Columns) -> Metric:
        from sklearn import metrics  # slow to import

        scores, labels = (torch.cat(column).double().cpu().numpy() for column in columns)
        having = labels.astype(bool).sum(0)
        both = having * (len(labels) - having)
        weights = both if pairs else np.where(both > 0, len(labels), 0)
        score = getattr(metrics, name)
        listed = zip(scores.T, labels.T, both, strict=True)
        values = [min(score(y, x), 1.0) if known else math.nan for x, y, known in listed]  # 1 + 2e-16 is 1
        least = np.minimum(having, len(labels) - having)
        return Metric(tuple(map(float, values)), tuple(map(float, weights)), tuple(least.tolist()))

    return combine


# ---- distances to targets, and losses


def _squares(outputs: Tensor, targets: Tensor) -> Columns:
    targets = targets.double()
    squares = (outputs.double() - targets).square()
    # Differences from the first target keep the digits that squares of large targets lose.
    mean = targets[0] + (targets - targets[0]).mean(0)
    return squares.sum(0), torch.full_like(mean, len(targets)), mean, (targets - mean).square().sum(0)


def _r2(count: int, *columns: Columns) -> Metric:
    squares, counts, means, about_means = map(torch.stack, columns)
    mean = means[0] + (counts * (means - means[0])).sum(0) / count
    about_mean = about_means.sum(0) + (counts * (means - mean).square()).sum(0)
    weights = torch.where(about_mean > 1e-30 * count * mean.square(), float(count), 0.0)  # above rounding errors
    values = (1 - squares.sum(0) / about_mean).clamp(min=-LARGEST)
    return Metric(tuple(values.tolist()), tuple(weights.tolist()))


def _distances(outputs: Tensor, targets: Tensor) -> Columns:
    distances = (outputs.double() - targets.double()).abs()
    return distances.sum(0), distances.square().sum(0)


def _mae(count: int, distances: Columns, squares: Columns) -> Metric:
    return _means(torch.stack(distances).sum(0) / count, count)


def _rmse(count: int, distances: Columns, squares: Columns) -> Metric:
    return _means((torch.stack(squares).sum(0) / count).sqrt(), count)


def _means(values: Tensor, count: int) -> Metric:
    return Metric(tuple(values.clamp(max=LARGEST).tolist()), (float(count),) * len(values))


def _entropies(scores: Tensor, labels: Tensor) -> Columns:
    losses = F.cross_entropy(scores.flatten(0, -2).double(), labels.flatten().long(), reduction="sum")
    return (losses,)


def _perplexity(count: int, losses: Columns) -> Metric:
    return _means((torch.stack(losses).sum() / count).exp()[None], count)


# ---- survival


def _concordance(count: int, risks: Columns, labels: Columns) -> Metric:
    """Return Harrell's concordance index: the fraction of comparable pairs whose higher risk has the event first.

    A pair is comparable if its earlier time is that of an event; of equal times, if only one is. Equal risks count
    half.
    """
    scores = torch.cat(risks).double().flatten()
    times, events = torch.cat(labels).double().unbind(1)
    events = events > 0
    won, pairs = 0.0, 0
    for row in events.nonzero().flatten():
        later = (times > times[row]) | ((times == times[row]) & ~events)
        won += float((scores[row] > scores[later]).sum() + (scores[row] == scores[later]).sum() / 2)
        pairs += int(later.sum())
    weight = float(count) if pairs else 0.0
    return Metric((won / pairs if pairs else math.nan,), (weight,), (int(events.sum()),))


ACCURACY = Measure(_hits, _fraction)
BALANCED_ACCURACY = Measure(_table, _recalls, by_class=True, table=True)
MACRO_F1 = Measure(_table, _f1, by_class=True, table=True, heaviest=2.0)
F1 = Measure(_table, _f1_of_one, heaviest=2.0, table=True)
LABEL_F1 = Measure(_signs, _f1_of_labels, by_class=True, heaviest=2.0, table=True)
IOU = Measure(_table, _iou, by_class=True, table=True)
AUC = Measure(_class_scores, _ranked("roc_auc_score", pairs=False), by_class=True)
AVERAGE_PRECISION = Measure(_class_scores, _ranked("average_precision_score", pairs=False), by_class=True)
CONCORDANCE = Measure(_entries, _concordance)
LABEL_AUC = Measure(_entries, _ranked("roc_auc_score", pairs=True), by_class=True, pairs=True)
LABEL_AVERAGE_PRECISION = Measure(_entries, _ranked("average_precision_score", pairs=True), by_class=True, pairs=True)
R2 = Measure(_squares, _r2, by_class=True, limits=(-LARGEST, 1.0))
RMSE = Measure(_distances, _rmse, by_class=True, lower=True, limits=(0.0, LARGEST))
MAE = Measure(_distances, _mae, by_class=True, lower=True, limits=(0.0, LARGEST))
PERPLEXITY = Measure(_entropies, _perplexity, lower=True, limits=(0.0, LARGEST))
