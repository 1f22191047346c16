"""Methods of scikit-learn on each client's own examples: the same predictions as scikit-learn's by hand."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.semi_supervised import LabelSpreading
from torch import nn

import fedhet
from fedhet.config import configuration
from fedhet.methods import registry
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo

SETTINGS = {
    "preset": "",
    "dataset": "digits",
    "partition": "classes",
    "classes-per-client": 4,
    "samples-per-client": 30,
    "clients": 3,
    "public-samples": 200,
    "report": False,
}


def by_hand(method: str, train: np.ndarray, labels: np.ndarray, public: np.ndarray) -> Any:
    if method == "nearest-neighbour":
        return KNeighborsClassifier(1).fit(train, labels)
    if method == "logistic-regression":
        return LogisticRegression(max_iter=1000).fit(train, labels)
    if method == "gradient-boosting":
        return HistGradientBoostingClassifier(min_samples_leaf=3, random_state=0).fit(train, labels)
    known = np.concatenate([labels, np.full(len(public), -1)])
    return LabelSpreading(kernel="knn", n_neighbors=7, max_iter=200).fit(np.concatenate([train, public]), known)


@pytest.mark.parametrize("method", ["nearest-neighbour", "logistic-regression", "label-spreading", "gradient-boosting"])
def test_accuracy_of_scikit_learn(method: str, tmp_path: Path) -> None:
    done = fedhet.run(SETTINGS | {"method": method}, out=tmp_path / "run")
    config = configuration.resolve(SETTINGS | {"method": method})
    transform = client_setup.dataset_of(config).transform
    shared = client_setup.public_dataset(config)
    assert shared is not None
    right, examples = 0, 0
    for number in range(3):
        data = client_setup.data_of(ClientInfo(str(number), number, 3, config))
        parts = (data.train.inputs, data.test.inputs, shared.inputs)
        train, test, public = (transform(part[:]).flatten(1).numpy() for part in parts)
        predicted = by_hand(method, train, data.train.labels.numpy(), public).predict(test)
        right += int((predicted == data.test.labels.numpy()).sum())
        examples += len(test)
    assert done.summary["personal_accuracy"]["weighted"] == pytest.approx(right / examples)
    assert done.summary["work"]["steps"] == 0
    assert done.summary["bytes_up"] == 0


@pytest.mark.parametrize("method", ["nearest-neighbour", "logistic-regression", "label-spreading", "gradient-boosting"])
def test_auc_of_scikit_learn_with_a_class_that_training_lacks(method: str, tmp_path: Path) -> None:
    inputs = torch.randn(80, 5, generator=torch.Generator().manual_seed(0))
    labels = inputs[:, :3].argmax(1)
    public, test = inputs[:20], slice(50, None)
    train = (labels != 1).nonzero()[:30, 0]
    data = {"train": (inputs[train], labels[train]), "test": (inputs[test], labels[test])}
    if method == "label-spreading":
        data["public"] = public, labels[:20]
    settings = {"method": method, "clients": 1, "metric": "auc", "report": False}
    done = fedhet.run(settings, model=nn.Linear(5, 3), data=lambda client: data, out=tmp_path / "run")
    classifier = by_hand(method, inputs[train].numpy(), labels[train].numpy(), public.numpy())
    scores = np.zeros((30, 3))
    scores[:, classifier.classes_] = classifier.predict_proba(inputs[test].numpy())
    expected = roc_auc_score(labels[test], scores / scores.sum(1, keepdims=True), multi_class="ovr")
    assert done.summary["personal_auc"]["weighted"] == pytest.approx(expected)


def test_boosting_learns_from_few_examples() -> None:
    inputs, labels = load_breast_cancer(return_X_y=True)
    side = registry.client_side("gradient-boosting")
    predicted = side.fitted(Mock(), inputs[15:38], labels[15:38]).predict(inputs[100:])
    assert (predicted == labels[100:]).mean() > 0.8


def test_client_with_one_class(tmp_path: Path) -> None:
    settings = SETTINGS | {"method": "logistic-regression", "classes-per-client": 1}
    assert fedhet.run(settings, out=tmp_path / "run").summary["personal_accuracy"]["weighted"] == 1.0
