import math
import operator
from functools import partial, reduce
from itertools import count

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedhet.errors import ConfigError, DataError
from fedhet.tasks import Score, Task
from fedhet.tasks.task import OUTPUTS
from fedhet.utils.statistics import Metric


def in_batches(name: str, outputs: torch.Tensor, labels: torch.Tensor, size: int) -> Score:
    task = Task(name)
    scores = (task.evaluate(o, y) for o, y in zip(outputs.split(size), labels.split(size), strict=True))
    return reduce(operator.add, scores)


@pytest.mark.parametrize("size", [1, 7, 50])
def test_accuracy_and_loss(size: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    outputs, labels = torch.randn(50, 5), torch.randint(5, (50,))
    score = in_batches("classification", outputs, labels, size)
    assert score.count == 50
    assert score.value == pytest.approx(metrics.accuracy_score(labels, outputs.argmax(1)))
    assert score.loss == pytest.approx(metrics.log_loss(labels, outputs.double().softmax(1), labels=range(5)), rel=1e-5)
    assert Task("classification").loss(outputs, labels).item() == pytest.approx(score.loss, rel=1e-5)


@pytest.mark.parametrize("size", [3, 60])
def test_auc_is_sklearns_whatever_the_batches(size: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    # Rounded, so that there are ties.
    outputs, labels = (torch.randn(60, 6) * 2).round(), torch.randint(2, (60, 6))
    labels[:, 4], labels[:, 5] = 1, 0
    score = in_batches("multi-label", outputs, labels, size)
    expected = np.mean([metrics.roc_auc_score(labels[:, label], outputs[:, label]) for label in range(4)])
    assert score.value == pytest.approx(expected, abs=1e-12)
    assert score.loss == pytest.approx(F.binary_cross_entropy_with_logits(outputs, labels.float()).item(), rel=1e-5)
    assert Task("multi-label").metric == "auc"


def won_and_possible_pairs(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """By the definition, of one label: each example that has it against each that lacks it, ties half."""
    margins = outputs[labels == 1][:, None] - outputs[labels == 0]
    return ((margins > 0).sum() + (margins == 0).sum() / 2).item(), margins.numel()


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4))
def test_auc_of_several_clients(seed: int, clients: int, labels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that there are ties; and few examples, so that some clients have a label on all or none.
    sizes = torch.randint(1, 8, (clients,), generator=generator).tolist()
    outputs = [torch.randint(-2, 3, (size, labels), generator=generator).float() for size in sizes]
    truths = [torch.randint(2, (size, labels), generator=generator) for size in sizes]
    metrics = [Task("multi-label").evaluate(o, y).metrics["auc"] for o, y in zip(outputs, truths, strict=True)]
    total = Metric.total(metrics)
    expected = []
    for label in range(labels):
        pairs = [won_and_possible_pairs(o[:, label], y[:, label]) for o, y in zip(outputs, truths, strict=True)]
        won, possible = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        assert total.weights[label] == possible
        assert total.values[label] == pytest.approx(won / possible if possible else math.nan, abs=1e-12, nan_ok=True)
        expected += [won / possible] if possible else []
    mean = sum(expected) / len(expected) if expected else math.nan
    assert total.value == pytest.approx(mean, abs=1e-12, nan_ok=True)


def test_a_label_without_pairs_is_ignored() -> None:
    total = Metric.total([Metric((0.5, math.nan, math.nan), (2, 0, 0)), Metric((math.nan, 0.9, math.nan), (0, 3, 0))])
    assert (total.values[:2], total.weights) == ((0.5, 0.9), (2, 3, 0))
    assert math.isnan(total.values[2])
    assert total.value == 0.7
    with pytest.raises(ValueError, match="shorter"):
        Metric.total([Metric((0.5, 0.5), (1, 1)), Metric((0.5,), (1,))])


def test_losses_train() -> None:
    classes = torch.arange(6) % 3
    by_task = {
        "multi-label": (torch.zeros(6, 3), torch.eye(3).repeat(2, 1).long()),
        "regression": (torch.zeros(6, 3), torch.eye(3).repeat(2, 1)),
        "binary": (torch.zeros(6, 1), torch.arange(6) % 2),
        "token-classification": (torch.zeros(2, 3, 3), classes.reshape(2, 3)),
        "segmentation": (torch.zeros(1, 3, 2, 3), classes.reshape(1, 2, 3)),
        "survival": (torch.zeros(6, 1), torch.tensor([[3.0, 1], [1, 1], [2, 1], [6, 0], [5, 1], [4, 1]])),
    }
    for task in map(Task, OUTPUTS):
        outputs, labels = by_task.get(task.name, (torch.zeros(6, 3), classes))
        outputs.requires_grad_()
        task.loss(outputs, labels).backward()
        assert outputs.grad is not None
        assert task.evaluate(-outputs.grad * (9 if task.name == "regression" else 1), labels).value == 1
        assert not task.evaluate(outputs.detach(), labels).loss_sum.requires_grad


def test_outputs_with_the_axis_of_classes_second_are_refused_for_tokens() -> None:
    problem = Task("token-classification").problem(torch.zeros(2, 5, 3), torch.zeros(2, 3).long())
    assert "give the axis of classes last, outputs.movedim(1, -1), or set task = segmentation" in problem


PADDED = torch.tensor([[1, 2, 0], [0, 0, 0]])


@pytest.mark.parametrize("name", ["next-character", "token-classification"])
@pytest.mark.parametrize(
    ("pad", "loss"),
    [
        (0, nn.CrossEntropyLoss(ignore_index=0)),
        (0, nn.CrossEntropyLoss(ignore_index=0).forward),
        (255, partial(F.cross_entropy, ignore_index=255)),
        (0, nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0]))),
    ],
)
def test_ignored_labels(name, pad, loss):
    """In the metric, the number of predictions and the loss, also of a batch in which nothing counts."""
    task, labels = Task(name, loss=loss), PADDED.masked_fill(PADDED == 0, pad)
    right = 9.0 * F.one_hot(PADDED.masked_fill(PADDED == 0, 1), 3)
    right[0, 1] = right[0, 0]
    assert task.problem(right, labels) == ""
    scores = [task.evaluate(outputs, each) for outputs, each in zip(right.split(1), labels.split(1), strict=True)]
    assert [score.count for score in scores] == [2, 0]
    total = scores[0] + scores[1]
    assert (total.value, total.metrics[total.task.metric].weights) == (0.5, (2,))
    assert total.loss == pytest.approx(F.cross_entropy(right[0, :2], torch.tensor([1, 2])).item())


def test_ignored_examples_and_pixels():
    outputs = torch.tensor([[0.0, 9.0], [9.0, 0.0], [9.0, 0.0]])
    score = Task("classification", loss=nn.NLLLoss(ignore_index=0)).evaluate(outputs, torch.tensor([1, 0, 1]))
    assert (score.value, score.count) == (0.5, 2)
    pixels, void = torch.tensor([[[[2.0, -2.0]]]]), torch.tensor([[[1, -100]]])
    one_channel = Task("segmentation", loss=nn.BCEWithLogitsLoss())
    assert one_channel.loss(pixels, void).item() == pytest.approx(F.softplus(torch.tensor(-2.0)).item())
    assert one_channel.loss(pixels, void.clamp(min=0)).item() == pytest.approx(F.softplus(torch.tensor(-2.0)).item())


CALLS = count()


class Own(nn.Module):
    """A loss that drops out half, and keeps what it is made with."""

    def __init__(self, **kept):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        for name, value in kept.items():
            setattr(self, name, value) if isinstance(value, nn.Parameter) else self.register_buffer(name, value)

    def forward(self, outputs, labels):
        if hasattr(self, "calls"):
            self.calls += 1
        return F.mse_loss(self.drop(outputs), labels) * getattr(self, "scale", 1)


def test_a_loss_is_in_training_mode_in_training_only():
    task, outputs, labels = Task("regression", loss=Own()), torch.ones(99, 1), torch.full((99, 1), 0.5)
    assert task.evaluate(outputs, labels).loss == 0.25
    assert task.own_loss.drop.training
    assert task.loss(outputs, labels) > 0.25


@pytest.mark.parametrize(
    ("name", "loss", "said"),
    [
        ("regression", Own(scale=nn.Parameter(torch.ones(()))), "has untrained parameters: freeze them"),
        ("regression", Own(calls=torch.zeros(())), "keeps state, which clients would share"),
        ("regression", lambda outputs, labels: next(CALLS) * outputs.mean(), "keeps state, which clients would share"),
        ("regression", lambda outputs, labels: outputs.detach().mean(), "returned a number without a gradient"),
        ("regression", lambda outputs, labels: outputs.mean() * math.nan, "returned nan before any training"),
        ("regression", lambda outputs, labels: 3.0, "returned a float: return a differentiable"),
        (
            "classification",
            nn.CrossEntropyLoss(reduction="none"),
            r"a tensor of shape \(8,\): return .* mean",
        ),
        ("classification", nn.CrossEntropyLoss(reduction="sum"), "returned a sum over a batch: return the mean"),
        (
            "classification",
            nn.BCEWithLogitsLoss(),
            r"fails for outputs \(float32 of .* and labels \(int64",
        ),
    ],
)
def test_unusable_losses_are_refused(name, loss, said):
    outputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.ones(8, 2) if name == "regression" else torch.arange(8) % 2
    with pytest.raises(ConfigError, match=said):
        Task(name, loss=loss).check_loss(outputs, labels)


def test_a_loss_with_a_frozen_parameter_is_taken():
    frozen = nn.Parameter(torch.ones(()), requires_grad=False)
    Task("regression", loss=Own(scale=frozen)).check_loss(torch.ones(2, 1), torch.ones(2, 1))


@pytest.mark.parametrize(("outputs", "fits"), [((4, 3), False), ((3, 4), True), ((12,), False), ((1, 3, 4), True)])
def test_outputs_are_not_reshaped(outputs, fits):
    assert (Task("regression").problem(torch.zeros(2, *outputs), torch.zeros(2, 3, 4)) == "") is fits


WEIGHTS = torch.tensor([1.0, 5.0, 9.0])
NOISE = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [1, 7, 60])
@pytest.mark.parametrize(
    "loss",
    [
        None,
        nn.CrossEntropyLoss(WEIGHTS, ignore_index=1),
        nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2).forward,
        partial(F.cross_entropy, weight=WEIGHTS),
        nn.NLLLoss(WEIGHTS),
    ],
)
def test_batches_are_joined_by_class_weights(loss, size):
    task = Task("classification", class_weights=() if loss else WEIGHTS.tolist(), loss=loss)
    outputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    labels = torch.arange(60).sub(10).clamp(min=0).div(20, rounding_mode="floor")
    parts = zip(outputs.split(size), labels.split(size), strict=True)
    score = reduce(operator.add, (task.evaluate(*part) for part in parts))
    expected = loss(outputs, labels) if loss else F.cross_entropy(outputs, labels, WEIGHTS)
    assert score.loss == pytest.approx(expected.item(), rel=1e-5)
    assert task.check_loss(outputs[:8], labels) == ""


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("classification", lambda outputs, labels: F.cross_entropy(outputs, labels, WEIGHTS)),
        ("regression", lambda outputs, targets: F.mse_loss(outputs, targets).sqrt()),
    ],
)
def test_losses_of_batches_that_cannot_be_joined(name, loss):
    labels = torch.arange(60) // 20 if name == "classification" else torch.arange(180.0).view(60, 3)
    assert "is not the mean of its examples' losses" in Task(name, loss=loss).check_loss(NOISE, labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_targets_in_half_precision(dtype):
    outputs = torch.zeros(2, 1, dtype=dtype)
    assert Task("regression").loss(outputs, torch.tensor([[1e5], [0.0]])).item() == pytest.approx(5e9)


@pytest.mark.parametrize("size", [7, 60])
def test_r2_of_targets_with_a_large_mean(size):
    metrics = pytest.importorskip("sklearn.metrics")
    targets = 1.7e9 + torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score = in_batches("regression", outputs := targets.roll(1, 1) / 2 + targets / 2, targets, size)
    assert score.value == pytest.approx(metrics.r2_score(targets.numpy(), outputs.numpy()), abs=1e-6)
    assert score.loss == pytest.approx(F.mse_loss(outputs, targets).item(), abs=1e-12)
    assert math.isnan(in_batches("regression", outputs, torch.full_like(targets, 0.1), size).value)


CLASSES = torch.arange(32).view(2, 4, 4) % 3


@pytest.mark.parametrize(
    "labels",
    [
        torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).softmax(1),
        F.one_hot(CLASSES, 3).float(),
        F.one_hot(CLASSES, 3).movedim(-1, 1).double(),
    ],
)
def test_soft_labels_are_no_regression(labels):
    with pytest.raises(DataError, match="can be soft labels"):
        Task().of(torch.zeros(labels.shape), labels)
    assert Task("regression").of(torch.zeros(labels.shape), labels).name == "regression"
    numbers = labels + torch.linspace(0, 1, labels.numel()).view_as(labels)
    assert Task().of(torch.zeros(labels.shape), numbers).name == "regression"


@pytest.mark.parametrize(
    "labels", [torch.tensor([-1.0, 1.0, 1.0]), torch.tensor([[0.05, 0.95], [0.95, 0.05], [0.95, 0.95]])]
)
def test_two_values_are_not_taken_for_numbers(labels):
    outputs = torch.zeros(3, *labels.shape[1:]) if labels.ndim > 1 else torch.zeros(3, 1)
    with pytest.raises(DataError, match=r"have only the values .*: give the integers 0 and 1"):
        Task().of(outputs, labels)
    assert Task("regression").of(outputs, labels).name == "regression"
    assert Task().of(outputs, (labels > 0.5).float()).name == ("binary" if labels.ndim == 1 else "multi-label")


@pytest.mark.parametrize(
    ("labels", "outputs", "task"),
    [
        (torch.tensor([0.0, 1, 1]), torch.zeros(3, 2), "classification"),
        (torch.tensor([[[0.0, 1, -100]]] * 2), torch.zeros(2, 1, 1, 3), "segmentation"),
    ],
)
def test_floats_that_are_classes_are_refused_until_they_are_integers(labels, outputs, task):
    with pytest.raises(DataError, match="give the integers 0 and 1 if they are classes"):
        Task().of(outputs, labels)
    found = Task().of(outputs, labels.long())
    assert (found.name, found.problem(outputs, labels.long())) == (task, "")
