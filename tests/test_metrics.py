"""Metrics are scikit-learn's, add up over clients where they are sums, and pass a node's policy."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torch import nn

import fedhet
from fedhet.client.policy import Policy
from fedhet.comparing.tuning import Search, Trial, Tuning
from fedhet.errors import ConfigError, Refused
from fedhet.setup.client_setup import ClientInfo
from fedhet.tasks import OUTPUTS, Task, direction
from fedhet.utils.statistics import Metric

pytestmark = pytest.mark.usefixtures("home", "no_report")

RANDOM = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=RANDOM)


def classes(*shape, number=4):
    return torch.randint(0, number, shape, generator=RANDOM)


def evaluated(task, metric, outputs, labels, size=7):
    """The metric from batches of `size`, after `labels` are converted as for a client."""
    task = Task(task).measuring(metric, ())
    labels = task.outputs.labels(labels)
    parts = [task.evaluate(*batch) for batch in zip(outputs.split(size), labels.split(size), strict=True)]
    return sum(parts[1:], parts[0]).metrics[metric]


def one_vs_rest(value):
    def mean(labels, outputs):
        probabilities = outputs.double().softmax(-1)
        return np.mean([value(labels == k, probabilities[:, k]) for k in range(4)])

    return mean


def by_column(value):
    return lambda labels, outputs: np.mean([value(labels[:, k], outputs[:, k]) for k in range(labels.shape[1])])


CLASSES = draw(60, 4), classes(60)
BINARY = draw(60, 1), classes(60, number=2)
LABELS = draw(60, 3), classes(60, 3, number=2)
TARGETS = draw(60, 2), draw(60, 2)
TOKENS = draw(20, 5, 4), classes(20, 5)
PIXELS = draw(20, 3, 4, 4), classes(20, 4, 4, number=3)


@pytest.mark.parametrize(
    ("task", "metric", "batch", "reference"),
    [
        ("classification", "accuracy", CLASSES, lambda y, z: sklearn.accuracy_score(y, z.argmax(1))),
        ("classification", "balanced-accuracy", CLASSES, lambda y, z: sklearn.balanced_accuracy_score(y, z.argmax(1))),
        ("classification", "macro-f1", CLASSES, lambda y, z: sklearn.f1_score(y, z.argmax(1), average="macro")),
        (
            "classification",
            "auc",
            CLASSES,
            lambda y, z: sklearn.roc_auc_score(y, z.double().softmax(-1), multi_class="ovr"),
        ),
        (
            "classification",
            "auc",
            (draw(60, 2), classes(60, number=2)),
            lambda y, z: sklearn.roc_auc_score(y, z[:, 1] - z[:, 0]),
        ),
        ("binary", "accuracy", BINARY, lambda y, z: sklearn.accuracy_score(y, z[:, 0] > 0)),
        ("binary", "balanced-accuracy", BINARY, lambda y, z: sklearn.balanced_accuracy_score(y, z[:, 0] > 0)),
        ("binary", "f1", BINARY, lambda y, z: sklearn.f1_score(y, z[:, 0] > 0)),
        ("binary", "auc", BINARY, lambda y, z: sklearn.roc_auc_score(y, z[:, 0])),
        (
            "binary",
            "average-precision",
            (draw(60, 1).round(), BINARY[1]),
            lambda y, z: sklearn.average_precision_score(y, z[:, 0]),
        ),
        ("multi-label", "auc", LABELS, sklearn.roc_auc_score),
        ("multi-label", "average-precision", LABELS, sklearn.average_precision_score),
        ("multi-label", "macro-f1", LABELS, lambda y, z: sklearn.f1_score(y, z > 0, average="macro")),
        ("regression", "r2", TARGETS, lambda y, z: sklearn.r2_score(y.numpy(), z.numpy())),
        ("regression", "rmse", TARGETS, sklearn.root_mean_squared_error),
        ("regression", "mae", TARGETS, sklearn.mean_absolute_error),
        (
            "token-classification",
            "macro-f1",
            TOKENS,
            lambda y, z: sklearn.f1_score(y.flatten(), z.argmax(-1).flatten(), average="macro"),
        ),
        (
            "token-classification",
            "perplexity",
            TOKENS,
            lambda y, z: math.exp(sklearn.log_loss(y.flatten(), z.flatten(0, 1).double().softmax(-1))),
        ),
        (
            "next-character",
            "perplexity",
            CLASSES,
            lambda y, z: math.exp(sklearn.log_loss(y, z.double().softmax(-1))),
        ),
        (
            "segmentation",
            "iou",
            PIXELS,
            lambda y, z: sklearn.jaccard_score(y.flatten(), z.argmax(1).flatten(), average="macro"),
        ),
        (
            "segmentation",
            "dice",
            PIXELS,
            lambda y, z: sklearn.f1_score(y.flatten(), z.argmax(1).flatten(), average="macro"),
        ),
    ],
)
def test_values_are_those_of_scikit_learn(task, metric, batch, reference):
    outputs, labels = batch
    assert evaluated(task, metric, outputs, labels).value == pytest.approx(reference(labels, outputs), abs=1e-6)


@pytest.mark.parametrize(
    ("task", "metric", "batch"),
    [
        ("classification", "balanced-accuracy", CLASSES),
        ("classification", "macro-f1", CLASSES),
        ("binary", "f1", BINARY),
        ("multi-label", "macro-f1", LABELS),
        ("segmentation", "dice", PIXELS),
        ("regression", "mae", TARGETS),
    ],
)
def test_sums_over_clients_are_the_metric_of_all_examples(task, metric, batch):
    outputs, labels = batch
    clients = [evaluated(task, metric, outputs[part], labels[part]) for part in (slice(0, 5), slice(5, 30))]
    together = evaluated(task, metric, outputs[:30], labels[:30])
    assert Metric.total(clients).value == pytest.approx(together.value)


def test_every_task_has_its_metric_first_and_unknown_ones_are_refused():
    assert [next(iter(kind.metrics)) for kind in OUTPUTS.values()][:3] == ["accuracy", "accuracy", "auc"]
    with pytest.raises(ConfigError, match="did you mean 'macro-f1'"):
        Task("").measuring("macrof1", ())
    with pytest.raises(ConfigError, match="auc is no metric of the task regression: choose among r2, rmse, mae"):
        Task("regression").measuring("", ["auc"])
    with pytest.raises(
        ConfigError, match=r"macro-f1, auc, or, for two classes, set task=\"binary\" \(networks have one"
    ):
        Task("classification").measuring("average-precision", ())


def test_lower_errors_are_better():
    assert [direction(name) for name in ("auc", "rmse", "mae", "perplexity")] == [1, -1, -1, -1]
    tried = [Trial({"learning-rate": rate}, {0: error}) for rate, error in ((0.1, 2.0), (0.2, 1.0))]
    assert Search("local", 2, tried, {}, metric="rmse").best is tried[1]


def test_a_policy_covers_metrics_by_class():
    policy = Policy(frozenset({"metrics"}), least=10, deployed=True)
    task = Task("classification").measuring("auc", ["macro-f1"])
    with pytest.raises(Refused, match="macro-f1, which also sends numbers of examples by class, needs statistics"):
        policy.check_metrics(task)
    Policy(frozenset({"metrics", "statistics"})).check_metrics(task)
    policy.check_metrics(Task("binary").measuring("auc", ["average-precision"]))


def test_a_node_withholds_classes_with_few_examples_and_what_would_tell_their_number():
    policy = Policy(None, least=10, deployed=True)
    auc = evaluated("classification", "auc", draw(40, 3), torch.tensor([0] * 20 + [1] * 15 + [2] * 5))
    assert auc.behind == (20, 15, 5)
    assert policy.metric(auc).weights == (40.0, 40.0, 0.0)
    recalls = Metric((1.0, 1.0, 1.0), (20.0, 15.0, 5.0), (20, 15, 5))
    assert policy.metric(recalls, by_class=True).weights == (20.0, 0.0, 0.0)
    assert policy.metric(Metric((1.0,) * 4, (20.0, 15.0, 6.0, 5.0), (20, 15, 6, 5)), by_class=True).weights == (
        *(20.0, 15.0),
        *(0.0, 0.0),
    )


def test_the_largest_average_precision_is_one():
    """The server refuses more, which scikit-learn's sums of fractions can be."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        labels = np.append(rng.random(rng.integers(4, 200)) < 0.5, [False, True])
        outputs = labels + 0.5 * rng.random(len(labels))
        tensors = torch.tensor(outputs)[:, None], torch.tensor(labels).long()
        assert 1 - 1e-12 < evaluated("binary", "average-precision", *tensors).values[0] <= 1


def one_class_at_the_last(client):
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(client.partition_id))
    labels = (inputs[:, 0] > 0).long()
    if client.partition_id == 2:
        labels[40:] = 1
    return {"train": (inputs[:40], labels[:40]), "test": (inputs[40:], labels[40:])}


def model(client):
    return nn.Sequential(nn.Linear(4, 1))


@pytest.mark.parametrize(("metric", "columns"), [("auc", "labels"), ("average-precision", "labels"), ("r2", "targets")])
def test_a_client_without_the_metric_of_a_label_is_named(tmp_path, metric, columns):
    """Client 1's test examples have no positive one of label 1, or one value of target 1."""

    def data(client):
        inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(client.partition_id))
        labels = (inputs[:, :3] > 0).long() if columns == "labels" else inputs[:, :3]
        if client.partition_id == 1:
            labels[40:, 1] = 0
        return {"train": (inputs[:40], labels[:40]), "test": (inputs[40:], labels[40:])}

    settings = {"method": "fedavg", "clients": 2, "rounds": 1, "metric": metric}
    task = "multi-label" if columns == "labels" else "regression"
    arguments = {"model": lambda client: nn.Linear(4, 3), "data": data, "task": task}
    run = fedhet.run(settings, **arguments, out=tmp_path / "run", progress=False)
    (warning,) = run.summary["warnings"]
    assert warning.startswith(f"client 1 (1 of 2): their test examples have no {metric} for some {columns}, since")


def test_a_client_with_one_class_has_no_auc_and_is_named(tmp_path):
    settings = {"method": "fedavg", "clients": 3, "rounds": 2, "metric": "auc", "metrics": "f1,accuracy"}
    run = fedhet.run(
        settings,
        model=model,
        data=one_class_at_the_last,
        out=tmp_path / "run",
        progress=False,
    )
    assert run.summary["metric"] == "auc"
    assert "client 2 (1 of 3): their test examples have no auc" in run.summary["warnings"][0]
    assert str(run).splitlines()[0].endswith("; 1 of 3 clients have no auc")
    last = run.history[-1]
    assert last["undefined"]["received"] == ["2"]
    network = fedhet.load_model(run, 0, model=model)
    values, pooled = [], []
    for place in range(3):
        inputs, labels = one_class_at_the_last(ClientInfo(str(place), place, 3, None, {}))["test"]
        with torch.no_grad():
            outputs = network(inputs)[:, 0]
        pooled.append((labels, outputs > 0))
        if place < 2:
            values.append(sklearn.roc_auc_score(labels, outputs))
    assert run.summary["personal_auc"]["weighted"] == pytest.approx(np.mean(values))
    f1 = sklearn.f1_score(*(torch.cat(part) for part in zip(*pooled, strict=True)))
    assert last["received"]["further/f1"]["weighted"] == pytest.approx(f1)
    assert run.summary["further"]["f1"]["weighted"] == pytest.approx(f1)
    assert json.loads((tmp_path / "run/summary.json").read_text())["further"].keys() == {"f1", "accuracy"}


@pytest.mark.slow
def test_files_have_the_name_of_the_metric(tmp_path):
    settings = {"clients": 2, "rounds": 2, "metric": "auc", "metrics": "accuracy", "validation": 0.3, "keep-best": True}
    tuning = Tuning({"learning-rate": [0.1, 0.2]})
    functions = {"model": model, "data": lambda client: one_class_at_the_last(ClientInfo("0", 0, 3, None, {}))}
    fedhet.compare(["fedavg"], settings, seeds=[1], tuning=tuning, out=tmp_path / "both", jobs=1, **functions)
    folder = tmp_path / "both" / "fedavg-seed1"
    texts = {path.name: path.read_text() for path in (*folder.glob("*.*"), *(tmp_path / "both").glob("*.csv"))}
    first = {name: text.splitlines()[0].split(",") for name, text in texts.items() if name.endswith(".csv")}
    assert "auc" in first["clients.csv"]
    assert {"personal_auc", "best_auc"} < {*first["comparison.csv"]}
    assert "validation_auc" in first["tuning.csv"]
    summary = json.loads(texts["summary.json"])
    assert summary["personal_auc"]["weighted"] == summary["received_auc"]["weighted"]
    assert summary["best"]["validation_auc"] == summary["best"]["validation_accuracy"]
    # For programs that read runs of every task.
    assert summary["personal_accuracy"] == summary["personal_auc"]
    last = json.loads(texts["history.jsonl"].splitlines()[-1])["received"]
    assert [*last] == ["auc", "loss", "clients", "further/accuracy"]


def test_further_metrics_may_name_the_one_that_counts(tmp_path):
    settings = {"method": "fedavg", "clients": 2, "rounds": 1, "metrics": "balanced-accuracy,accuracy,f1,f1"}
    run = fedhet.run(settings, model=model, data=one_class_at_the_last, out=tmp_path / "run", progress=False)
    assert run.summary["metric"] == "accuracy"
    assert run.summary["further"].keys() == {"balanced-accuracy", "f1"}
