import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedhet.errors import ConfigError, nearest
from fedhet.task import TASKS, Score, get_task, mean_auc


def in_batches(name: str, outputs: torch.Tensor, labels: torch.Tensor, size: int) -> Score:
    task = get_task(name)
    total = sum(task.evaluate(o, y) for o, y in zip(outputs.split(size), labels.split(size), strict=True))
    assert isinstance(total, Score)
    return total


@pytest.mark.parametrize("size", [1, 7, 50])
def test_accuracy_and_loss_do_not_depend_on_the_batches(size: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    outputs, labels = torch.randn(50, 5), torch.randint(5, (50,))
    score = in_batches("classification", outputs, labels, size)
    assert score.count == 50
    assert score.value == pytest.approx(metrics.accuracy_score(labels, outputs.argmax(1)))
    assert score.loss == pytest.approx(metrics.log_loss(labels, outputs.double().softmax(1), labels=range(5)), rel=1e-5)
    assert get_task("classification").loss(outputs, labels).item() == pytest.approx(score.loss, rel=1e-5)


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
    assert get_task("multi-label").metric == "auc"


def test_auc_without_a_label_of_both_values_is_undefined() -> None:
    assert math.isnan(mean_auc(torch.randn(5, 2), torch.ones(5, 2)))


def test_next_character_counts_characters() -> None:
    task = get_task("next-character")
    outputs, labels = torch.randn(4, 9, 80), torch.randint(80, (4, 9))
    assert task.loss(outputs, labels).item() == pytest.approx(F.cross_entropy(outputs.mT, labels).item(), rel=1e-5)
    score = task.evaluate(outputs, labels)
    assert score.count == 36
    assert score.loss == pytest.approx(task.loss(outputs, labels).item(), rel=1e-5)
    last = task.evaluate(outputs[:, -1], labels[:, -1])
    assert (last.count, task.predict(outputs).shape) == (4, (4, 9))


@pytest.mark.parametrize(("name", "labels"), [("classification", [2, 0]), ("multi-label", [[1, 0, 1], [1, 0, 0]])])
def test_prediction_has_the_form_of_the_labels(name: str, labels: list[object]) -> None:
    outputs = torch.tensor([[1.0, -1.0, 3.0], [0.5, -2.0, -1.0]])
    task = get_task(name)
    assert task.predict(outputs).tolist() == labels
    probabilities = task.probabilities(outputs)
    assert probabilities.shape == outputs.shape
    assert probabilities.min() > 0
    assert probabilities.max() < 1


def test_losses_train() -> None:
    for task in TASKS.values():
        outputs = torch.zeros(6, 3, requires_grad=True)
        labels = torch.eye(3).repeat(2, 1).long() if task.name == "multi-label" else torch.arange(6) % 3
        task.loss(outputs, labels).backward()
        assert outputs.grad is not None
        assert torch.equal(task.predict(-outputs.grad), labels)
        assert not task.evaluate(outputs.detach(), labels).loss_sum.requires_grad


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown task 'multilabel'; did you mean 'multi-label'"):
        get_task("multilabel")
    assert nearest("model", "x", []) == "unknown model 'x'; known: none"
