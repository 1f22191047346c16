"""Clients with estimators of scikit-learn in place of networks, against scikit-learn's own predictions."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.ensemble import (
    GradientBoostingClassifier,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingClassifier,
)
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeClassifier
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from torch import nn

import fedhet
from fedhet.cli import new_project
from fedhet.config import configuration
from fedhet.engines.superlink import _free_port, begin, command, end, environment_of_commands
from fedhet.errors import ConfigError, FedhetError, ModelError
from fedhet.flower.grid import LocalGrid
from fedhet.models.estimators import Estimator
from fedhet.results.history import read_clients
from fedhet.server.app import serve
from fedhet.setup.client_setup import ClientInfo
from fedhet.setup.user_functions import UserFunctions
from fedhet.testing import Run
from fedhet.utils.files import read_tensors
from fedhet.utils.randomness import derive_seed
from tests.simulations import run_on_ray

pytestmark = pytest.mark.usefixtures("home")

INPUTS, LABELS = load_breast_cancer(return_X_y=True)
INPUTS = (INPUTS - INPUTS.mean(0)) / INPUTS.std(0)
DATA = INPUTS, LABELS
SETTINGS = {"rounds": 2, "samples-per-client": 30, "report": False, "workers": 1, "client-batching": "off"}
FEDMD = {**SETTINGS, "method": "fedmd", "fedmd.public-epochs": 0, "public-samples": 60}
ESTIMATORS: list[Any] = [
    RandomForestClassifier(20),
    make_pipeline(StandardScaler(), LogisticRegression()),
    GradientBoostingClassifier(n_estimators=10),
    KNeighborsClassifier(3),
    LinearSVC(),
]
COUNT = len(ESTIMATORS) + 1


def model(client: ClientInfo) -> Any:
    number = client.partition_id
    assert number is not None
    if number < len(ESTIMATORS):
        return ESTIMATORS[number]
    return nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2))


def shares(settings: dict[str, Any], data: Any = DATA) -> dict[str, Any]:
    functions = UserFunctions(model, data)
    config = functions.adapted(configuration.configure(settings, supplied=functions.supplied))
    infos = [ClientInfo(str(number), number, config.clients, config) for number in range(config.clients)]
    assert functions.data_of is not None
    return {info.name: functions.data_of(info) for info in infos}


def seeded(estimator: Any, client: str) -> Any:
    """The estimator with the seed that the client gives it."""
    names = [name for name, value in estimator.get_params().items() if name.endswith("random_state") and value is None]
    seed = derive_seed(0, "estimator", client) % 2**32
    return clone(estimator).set_params(**dict.fromkeys(names, seed))


def accuracies(folder: Path) -> dict[str, float | None]:
    return {row.client: row.accuracy for row in read_clients(folder)}


def test_local_accuracy_is_that_of_scikit_learn(tmp_path):
    settings = {**SETTINGS, "method": "local", "clients": COUNT}
    done = fedhet.run(settings, model=model, data=DATA, out=tmp_path / "run")
    for client, data in shares(settings).items():
        if int(client) < len(ESTIMATORS):
            fitted = seeded(ESTIMATORS[int(client)], client).fit(data.train.inputs.numpy(), data.train.labels.numpy())
            assert accuracies(done.folder)[client] == fitted.score(data.test.inputs.numpy(), data.test.labels.numpy())
    assert sorted(path.name for path in (done.folder / "models").iterdir()) == [f"{COUNT - 1}.safetensors"]
    assert {row.architecture for row in read_clients(done.folder)} >= {"LogisticRegression", "LinearSVC"}


def test_mixed_training_is_a_fit_to_private_and_public_examples(tmp_path):
    settings = {**SETTINGS, "method": "local", "local.public": "mixed", "public-samples": 60, "clients": COUNT}
    done = fedhet.run(settings, model=model, data=DATA, out=tmp_path / "run")
    for client, data in shares(settings).items():
        if int(client) >= len(ESTIMATORS):
            continue
        kept = read_tensors(next((done.folder / "state" / "clients" / client).glob("2*"))) or {}
        inputs, labels = (next(kept[n] for n in kept if n.endswith(kind)).numpy() for kind in ("/inputs", "/labels"))
        assert inputs.shape == (60, 30)  # no private example
        pairs = [(data.train.inputs.numpy(), inputs), (data.train.labels.numpy(), labels)]
        fitted = seeded(ESTIMATORS[int(client)], client).fit(*map(np.concatenate, pairs))
        assert accuracies(done.folder)[client] == fitted.score(data.test.inputs.numpy(), data.test.labels.numpy())


def test_soft_targets_are_weighted_copies(tmp_path):
    """The last fit is that by hand: the client's examples, and each public one once for each class."""
    settings = {**FEDMD, "clients": COUNT}
    done = fedhet.run(settings, model=model, data=DATA, out=tmp_path / "run")
    for client, data in shares(settings).items():
        if int(client) >= len(ESTIMATORS):
            continue
        kept = read_tensors(next((done.folder / "state" / "clients" / client).glob("2*"))) or {}
        place = next(name for name in kept if name.endswith("/scores")).removesuffix("/scores")
        public, scores = kept[f"{place}/inputs"].numpy(), kept[f"{place}/scores"].float()
        soft = scores.softmax(1).numpy()
        inputs, labels, weights = [data.train.inputs.numpy()], [data.train.labels.numpy()], [np.ones(30)]
        fitted = seeded(ESTIMATORS[int(client)], client)
        arguments = {}
        if isinstance(fitted, KNeighborsClassifier):  # takes no weights
            inputs, labels = [*inputs, public], [*labels, soft.argmax(1)]
        else:
            inputs.append(np.repeat(public, 2, axis=0))
            labels.append(np.tile([0, 1], len(public)))
            weights.append(soft.reshape(-1))
            name = "logisticregression__sample_weight" if client == "1" else "sample_weight"
            arguments = {name: np.concatenate(weights)}
        fitted.fit(np.concatenate(inputs), np.concatenate(labels), **arguments)
        expected = fitted.score(data.test.inputs.numpy(), data.test.labels.numpy())
        assert accuracies(done.folder)[client] == expected


@pytest.mark.parametrize("method", ["local", "fedmd", "feddf"])
def test_resumed_and_in_workers(tmp_path, method):
    settings = {**(FEDMD if method == "fedmd" else SETTINGS), "method": method, "clients": COUNT, "rounds": 3}
    if method == "feddf":
        settings |= {"public-samples": 60, "feddf.teach": True, "feddf.server-steps": 5}
    whole = fedhet.run(settings, model=model, data=DATA, out=tmp_path / "whole")
    fedhet.run({**settings, "rounds": 2}, model=model, data=DATA, out=tmp_path / "part")
    fedhet.run({"rounds": 3, "workers": 2}, model=model, data=DATA, resume=tmp_path / "part")
    assert Run(tmp_path / "part").rows == Run(whole.folder).rows
    assert Run(tmp_path / "part").models == Run(whole.folder).models
    with pytest.raises(ConfigError, match="client 0 has an estimator, RandomForestClassifier, of which runs save no"):
        fedhet.load_model(whole, 0, model=model)


def test_regression(tmp_path):
    inputs, targets = load_diabetes(return_X_y=True)
    settings = {**SETTINGS, "method": "local", "clients": 3, "metric": "rmse"}
    for estimator in (Ridge(), RandomForestRegressor(10)):
        out = tmp_path / type(estimator).__name__
        done = fedhet.run(settings, model=estimator, data=(inputs, targets), out=out)
        for client, data in shares(settings, (inputs, targets)).items():
            fitted = seeded(estimator, client).fit(data.train.inputs.numpy(), data.train.labels.numpy()[:, 0])
            errors = fitted.predict(data.test.inputs.numpy()) - data.test.labels.numpy()[:, 0]
            assert accuracies(done.folder)[client] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-5)


def test_mean_predictions_of_numbers_are_labels_of_public_examples(tmp_path):
    """The last fit of a regression under fedmd is that by hand: the client's examples, and public ones with means."""
    inputs, targets = load_diabetes(return_X_y=True)
    settings = {**FEDMD, "clients": 2}
    done = fedhet.run(settings, model=Ridge(), data=(inputs, targets), out=tmp_path / "run")
    for client, data in shares(settings, (inputs, targets)).items():
        kept = read_tensors(next((done.folder / "state" / "clients" / client).glob("2*"))) or {}
        public, means = (next(kept[n] for n in kept if n.endswith(kind)).numpy() for kind in ("/inputs", "/scores"))
        assert means.shape == (60, 1)
        pairs = [(data.train.inputs.numpy(), public), (data.train.labels.numpy(), means)]
        fitted = Ridge().fit(*map(np.concatenate, pairs))
        expected = fitted.score(data.test.inputs.numpy(), data.test.labels.numpy())
        assert accuracies(done.folder)[client] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        (
            {"method": "fedavg"},
            {},
            "fedavg trains networks, .* estimator RandomForestClassifier: return a net",
        ),
        ({"method": "fedproto"}, {}, "fedproto trains networks, but .* choose local, fedmd or, for classes, feddf"),
        ({"start-from": "."}, {}, "start-from has no model of RandomForestClassifier, which no run saves"),
        ({}, {"task": fedhet.Task(class_weights=[1, 2])}, "is fitted without class weights and a loss of your own"),
        ({}, {"data": (INPUTS, np.stack([LABELS, LABELS], 1))}, "predicts one class or numbers for each example"),
        ({}, {"model": Ridge()}, "Ridge has no classes_ after fit, but the labels are classes: return a classifier"),
        ({}, {"data": (INPUTS, INPUTS[:, 0])}, "fitting RandomForestClassifier raised ValueError: Unknown label type"),
        ({}, {"data": (INPUTS, 1e6 * INPUTS[:, 0]), "model": Ridge()}, "inputs or targets are large .divide them"),
    ],
)
def test_refusals(tmp_path, settings, arguments, message):
    chosen = {**SETTINGS, "method": "local", "clients": 2, **settings}
    with pytest.raises(FedhetError, match=message):
        fedhet.run(chosen, **{"model": ESTIMATORS[0], "data": DATA, **arguments}, out=tmp_path / "run")


@pytest.mark.parametrize("networks", [False, True])
def test_keys_of_training_are_said_to_have_no_effect(tmp_path, networks):
    settings = {**SETTINGS, "method": "local", "clients": 2, "learning-rate": 0.1, "local-epochs": 2, "save-every": 1}
    first = COUNT - 2 if networks else 0
    done = fedhet.run(
        settings,
        model=lambda client: [*ESTIMATORS, nn.Linear(30, 2)][first + client.partition_id],
        data=DATA,
        out=tmp_path / "run",
    )
    sentence = "learning-rate, local-epochs: without effect, since all clients have estimators"
    warnings = done.summary["warnings"]
    assert any(line.startswith(sentence) for line in warnings) == (not networks)
    files = "client 0: keep-best and save-every save no file" if networks else "2 clients (0, 1): keep-best and"
    assert any(line.startswith(files) for line in warnings)
    assert [file.name for file in (tmp_path / "run").glob("models/round-1/*")] == ["1.safetensors"] * networks


@pytest.mark.parametrize(
    "estimator",
    [RandomForestClassifier(8, random_state=0), GaussianNB(), LinearSVC(), SVC(), RidgeClassifier()],
    ids=lambda estimator: type(estimator).__name__,
)
@pytest.mark.parametrize("classes", [2, 4])
def test_auc_is_that_of_scikit_learn(tmp_path, estimator, classes):
    """Ties of trees, probabilities near 0, and scores of classifiers without probabilities count as they are."""
    inputs, labels = load_digits(n_class=classes, return_X_y=True)
    noise = np.random.default_rng(0).normal(scale=8, size=inputs.shape)
    inputs = (inputs + noise)[:, :40]
    train, test = (inputs[:100], labels[:100]), (inputs[100:], labels[100:])
    settings = {"method": "local", "clients": 1, "rounds": 1, "report": False, "metric": "auc", "metrics": "accuracy"}
    done = fedhet.run(settings, model=estimator, data=lambda client: (train, test), out=tmp_path / "run")
    fitted = clone(estimator).fit(*train)
    if hasattr(fitted, "predict_proba"):
        scores = fitted.predict_proba(test[0])
    else:  # the logits of two classes are 0 and the score
        scores = fitted.decision_function(test[0])
        scores = torch.from_numpy(np.stack([0 * scores, scores], 1) if classes == 2 else scores).softmax(1).numpy()
    columns = [1] if classes == 2 else range(classes)
    expected = np.mean([roc_auc_score(test[1] == column, scores[:, column]) for column in columns])
    # An SVC votes by pairs of classes, which in a few rows disagrees with its scores; then the vote counts.
    tolerance = 0.01 if isinstance(estimator, SVC) and classes > 2 else 1e-9
    assert done.summary["personal_auc"]["weighted"] == pytest.approx(expected, abs=tolerance)
    further = Run(done.folder).rows[-1]["scores"]["received/accuracy"]["0"]
    assert further[0] == [pytest.approx(fitted.score(*test))]


def test_a_class_that_an_estimator_never_saw_is_a_tie() -> None:
    """Probabilities of scikit-learn for float32 add up to 1 only up to rounding, from which no order follows."""
    inputs = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    labels = inputs[:, :3].argmax(1)
    model = Estimator(LogisticRegression())
    model.outputs = 3
    model.fit(inputs[labels != 1], labels[labels != 1], threads=1)
    scores = model(inputs).log_softmax(1).round(decimals=13)[:, 1]  # as the metric auc reads them
    assert roc_auc_score(labels == 1, scores) == 0.5


def test_a_refused_fit_leaves_the_fit_before() -> None:
    inputs, labels = torch.eye(4), torch.arange(4) % 2
    model = Estimator(Ridge())
    model.outputs = 2
    model.fit(inputs, torch.ones(4, dtype=torch.long), threads=1)  # one class: a constant
    before = model(inputs)
    with pytest.raises(ModelError, match="Ridge has no classes_ after fit, but the labels are classes"):
        model.fit(inputs, labels, threads=1)
    assert torch.equal(model(inputs), before)


class FromZero(GaussianNB):
    """Takes only classes that are numbered from 0, as XGBoost's classifiers do."""

    def fit(self, inputs: Any, labels: Any, sample_weight: Any = None) -> Any:
        if not np.array_equal(classes := np.unique(labels), np.arange(len(classes))):
            raise ValueError(f"Invalid classes inferred from unique values of `y`.  Got {classes}")
        return super().fit(inputs, labels, sample_weight)


@pytest.mark.parametrize("method", ["local", "fedmd"])
def test_numbers_of_classes_that_an_estimator_refuses(tmp_path, method):
    settings = {**(FEDMD if method == "fedmd" else SETTINGS), "method": method, "clients": 4, "partition": "classes"}
    data = load_digits(return_X_y=True)
    runs = [
        fedhet.run(settings, model=kind(), data=data, out=tmp_path / kind.__name__) for kind in (GaussianNB, FromZero)
    ]
    one, other = (read_clients(run.folder) for run in runs)
    assert [row.accuracy for row in other] == [row.accuracy for row in one]
    assert not runs[1].summary.get("never_took_part")


@pytest.mark.parametrize("metric", ["macro-f1", "auc"])
def test_clients_without_a_class_take_part(tmp_path, metric):
    """Of examples that the configuration splits, all clients' estimators have all classes."""
    settings = {**SETTINGS, "method": "local", "clients": 4, "partition": "classes", "metric": metric}
    done = fedhet.run(settings, model=GaussianNB(), data=load_digits(return_X_y=True), out=tmp_path / "run")
    assert not done.summary.get("never_took_part")


def test_whole_numbers_and_one_column(tmp_path):
    """A regression's labels may be integers, also -1, and inputs one number for each example."""
    inputs = np.random.default_rng(0).normal(size=80)
    labels = np.round(5 * inputs).astype(int)
    train, test = (inputs[:50], labels[:50]), (inputs[50:], labels[50:])
    settings = {"method": "local", "clients": 1, "rounds": 1, "report": False}
    done = fedhet.run(
        settings, model=Ridge(), data=lambda client: (train, test), task="regression", out=tmp_path / "run"
    )
    expected = Ridge().fit(train[0][:, None], train[1]).score(test[0][:, None], test[1])
    assert done.summary["personal_r2"]["weighted"] == pytest.approx(expected)


def test_one_class_and_a_logit(tmp_path):
    def data(client: ClientInfo) -> Any:
        rows = np.flatnonzero(LABELS == 1)[:40] if client.name == "0" else np.arange(100)
        return (INPUTS[rows], LABELS[rows]), (INPUTS[300:], LABELS[300:])

    settings = {"method": "local", "clients": 2, "rounds": 1, "report": False}
    done = fedhet.run(settings, model=LogisticRegression(), data=data, task="binary", out=tmp_path / "run")
    right = LogisticRegression().fit(INPUTS[:100], LABELS[:100]).score(INPUTS[300:], LABELS[300:])
    assert accuracies(done.folder) == {"0": np.mean(LABELS[300:] == 1), "1": right}


def test_large_numbers_keep_their_digits(tmp_path):
    """Integers above 2^24 as inputs, and predictions of targets of which float32 has not all digits."""

    def data(client: ClientInfo) -> Any:
        inputs = (1000 * INPUTS[:, :3]).astype(np.int64) + 2**40
        targets = 3000.0 + (inputs[:, 0] - 2**40) * 2e-6
        return (inputs[:200], targets[:200]), (inputs[200:], targets[200:])

    settings = {"method": "local", "clients": 1, "rounds": 1, "report": False}
    estimator = make_pipeline(StandardScaler(), LinearRegression())
    done = fedhet.run(settings, model=estimator, data=data, out=tmp_path / "run")
    assert done.summary["personal_r2"]["weighted"] == pytest.approx(1, abs=1e-6)


def test_outputs_before_a_fit(tmp_path):
    """Equal scores, or the mean target: zeros would have a loss of 1e16 here, by which the client was refused."""
    estimator = Estimator(RandomForestClassifier())
    estimator.outputs = 3
    assert torch.equal(estimator(torch.ones(2, 5)), torch.zeros(2, 3))
    targets = 1e8 + INPUTS[:, :2].astype(np.float64)
    data = (INPUTS[:200], targets[:200]), (INPUTS[200:], targets[200:])
    settings = {"method": "local", "clients": 1, "rounds": 1, "report": False}
    done = fedhet.run(settings, model=LinearRegression(), data=lambda _: data, out=tmp_path / "run")
    constant = np.broadcast_to(targets[:200].mean(0), targets[200:].shape)
    assert done.history[1]["received"]["r2"]["weighted"] == pytest.approx(r2_score(targets[200:], constant))


def test_a_node_sends_scores_and_metrics_only(tmp_path):
    """A node with a policy: what leaves it are posteriors and metrics, and its files have no pickle."""
    config = configuration.resolve({"preset": "own", **FEDMD, "clients": 3}, supplied={"model", "data"})
    app = fedhet.make_client_app(model=model, data=DATA)
    node = {"allow": "posteriors,metrics", "min-examples": 5, "state-dir": str(tmp_path / "state")}
    grid = LocalGrid(app, 3, node_config=node)
    public = shares({**FEDMD, "clients": 3})["0"].public
    serve(config.replace(state_dir=str(tmp_path / "state")), grid, tmp_path / "run", engine="local", public=public)
    run = Run(tmp_path / "run")
    assert [row["failures"] for row in run.rows] == [[]] * len(run.rows)
    assert {row.architecture for row in read_clients(tmp_path / "run")} >= {"RandomForestClassifier"}
    assert not [path for path in (tmp_path / "state").rglob("*") if path.suffix in (".pkl", ".pickle", ".joblib")]


@pytest.mark.parametrize("method", ["gradient-boosting", "logistic-regression"])
def test_a_classifier_of_the_method_has_no_state_to_lose(tmp_path, method, caplog):
    """The clients' estimators are not fitted under such a method, and its clients are listed under its name."""
    settings = {**SETTINGS, "method": method, "clients": 3, "rounds": 2}
    done = fedhet.run(settings, model=model, data=DATA, out=tmp_path / "run")
    assert "lost" not in caplog.text
    assert not any(row.get("lost_state") for row in Run(done.folder).rows)
    assert {row.architecture for row in read_clients(done.folder)} == {method}


@pytest.mark.long
def test_on_ray(tmp_path):
    settings = {"preset": "own", **FEDMD, "clients": 3}
    fedhet.run(settings, model=model, data=DATA, out=tmp_path / "local")
    config = configuration.resolve(settings, supplied={"model", "data"})
    run_on_ray(tmp_path / "ray", config, model=model, data=DATA)
    assert Run(tmp_path / "ray").rows == Run(tmp_path / "local").rows


APP = """
import fedhet
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from torch import nn

ROWS, LABELS = load_breast_cancer(return_X_y=True)
ROWS = (ROWS - ROWS.mean(0)) / ROWS.std(0)


def my_model(client):
    if client.partition_id == 0:
        return HistGradientBoostingClassifier(min_samples_leaf=5)
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))


def my_data(client):
    rows, test = slice(100 + client.partition_id, 200, 2), slice(200, None)
    return {"train": (ROWS[rows], LABELS[rows]), "test": (ROWS[test], LABELS[test]), "public": ROWS[:100]}


app = fedhet.make_client_app(model=my_model, data=my_data)
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of Flower's commands, with a SuperLink `nodes` and two SuperNodes."""
    port = _free_port()
    environment = environment_of_commands() | {"FLWR_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    (tmp_path / "config.toml").write_text(f'[superlink.nodes]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    words = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    words.append("--disable-runtime-dependency-installation")
    processes = [begin(words, tmp_path, environment, tmp_path / "superlink.log")]
    patience = time.monotonic() + 60
    try:
        while subprocess.run([command("flwr"), "list", "nodes"], env=environment, capture_output=True).returncode:
            assert time.monotonic() < patience
            time.sleep(1)
        for number in range(2):
            config = f"name='{number}' partition-id={number} num-partitions=2 state-dir='{tmp_path / str(number)}'"
            words = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
            words += ["--port", str(_free_port()), "--node-config", f"{config} allow='posteriors,metrics'"]
            processes.append(begin(words, tmp_path, environment, tmp_path / f"{number}.log"))
        yield environment
    finally:
        for process in reversed(processes):
            end(process)


@pytest.mark.long
def test_at_nodes_as_in_a_simulation(tmp_path: Path, nodes: dict[str, str]) -> None:
    app = tmp_path / "app"
    new_project.write(app, flower=True)
    (app / "client_app.py").write_text(APP)
    (app / "server_app.py").write_text(
        "import fedhet\nfrom client_app import ROWS\napp = fedhet.make_server_app(public=ROWS[:100])\n"
    )
    project = (app / "pyproject.toml").read_text()
    functions: dict[str, Any] = {}
    exec(APP, functions)
    for method in ("local", "fedmd", "feddf", "gradient-boosting"):
        settings = {
            "preset": "own",
            "method": method,
            "rounds": 2,
            "clients": 2,
            "device": "cpu",
            "wait-for-clients": 60.0,
        }
        if method == "fedmd":
            settings["fedmd.public-epochs"] = 0
        if method == "feddf":
            settings |= {"feddf.teach": True, "feddf.server-steps": 20}
        out = tmp_path / "runs" / method
        lines = [f"{key} = {json.dumps(value)}" for key, value in {**settings, "out": str(out)}.items()]
        text = "\n".join([project.partition("[tool.flwr.app.config]")[0], "[tool.flwr.app.config]", *lines])
        (app / "pyproject.toml").write_text(text)
        words = [command("flwr"), "run", str(app), "nodes", "--stream"]
        done = subprocess.run(words, cwd=tmp_path, env=nodes, capture_output=True, text=True, check=False)
        assert (out / "summary.json").is_file(), done.stdout + done.stderr
        here = fedhet.run(
            settings, model=functions["my_model"], data=functions["my_data"], out=tmp_path / f"{method}-here"
        )
        assert Run(out).summary["status"] == "completed"
        assert not [row for row in Run(out).rows if row["failures"] or row.get("lost_state")]
        # A node with a policy draws its own batches.
        assert accuracies(out) == pytest.approx(accuracies(here.folder), abs=0.02)
        boosted = "gradient-boosting" if method == "gradient-boosting" else "HistGradientBoostingClassifier"
        assert boosted in {row.architecture for row in read_clients(out)}
    assert not list(tmp_path.rglob("*.pkl"))
    assert sorted(path.name for path in tmp_path.glob("[01]/*/models/*")) == ["1.safetensors"] * 3


NAMED = ["age", "bmi", "bp"]


def of_hospital(client: ClientInfo) -> Any:
    """A table whose columns have another order at hospital 1."""
    rng = np.random.default_rng(client.partition_id)
    table = pd.DataFrame(rng.normal(size=(80, 3)) * [1, 20, 300], columns=NAMED)
    labels = (table["age"] + table["bp"] / 300 > 0).astype(int)
    table = table[NAMED[::-1]] if client.partition_id == 1 else table
    return (table[:40], labels[:40]), (table[40:], labels[40:])


@pytest.mark.parametrize("method", ["local", "feddf"])
@pytest.mark.parametrize(
    "estimator",
    [
        make_pipeline(ColumnTransformer([("scaled", StandardScaler(), ["bp", "bmi"])]), KNeighborsClassifier(3)),
        StackingClassifier([("one", KNeighborsClassifier(3)), ("other", GaussianNB())], cv=3),
    ],
)
def test_columns_have_their_names(tmp_path: Path, estimator: Any, method: str) -> None:
    """A pipeline asks for columns by name; a stack has no `predict` before it is fitted."""

    def data(client: ClientInfo) -> Any:
        train, test = of_hospital(client)
        return {"train": train, "test": test, "public": train[0]}

    settings = {"method": method, "clients": 2, "rounds": 1, "report": False, "workers": 1}
    done = fedhet.run(settings, model=estimator, data=data, out=tmp_path / "run", progress=False)
    expected = {}
    for number in range(2):
        train, test = of_hospital(ClientInfo(str(number), number, 2, configuration.resolve({})))
        expected[str(number)] = clone(estimator).fit(*train).score(*test)
    assert accuracies(done.folder) == pytest.approx(expected)


class Positional(GaussianNB):
    """Asks for columns by place, which a data frame does not allow."""

    def fit(self, inputs: Any, labels: Any) -> Any:
        return super().fit(inputs[:, :2], labels)


def test_any_error_of_a_fit_is_told(tmp_path: Path) -> None:
    settings = {"method": "local", "clients": 2, "rounds": 1, "report": False, "workers": 1}
    with pytest.raises(FedhetError, match="fitting Positional raised InvalidIndexError"):
        fedhet.run(settings, model=Positional(), data=of_hospital, out=tmp_path / "run", progress=False)


@pytest.mark.parametrize(("threshold", "said"), [(0.5, False), (0.1, True)])
def test_a_threshold_that_metrics_do_not_use_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, threshold: float, said: bool
) -> None:
    """Metrics are those of the most probable class, also if `predict` chooses another one."""
    from sklearn.model_selection import FixedThresholdClassifier

    estimator = FixedThresholdClassifier(GaussianNB(), threshold=threshold)
    settings = {"method": "local", "clients": 2, "rounds": 1, "report": False, "workers": 1}
    with caplog.at_level("WARNING", "flwr"):
        done = fedhet.run(settings, model=estimator, data=of_two_classes, out=tmp_path / "run", progress=False)
    assert ("predict of FixedThresholdClassifier does not choose the most probable class" in caplog.text) == said
    for client, accuracy in accuracies(done.folder).items():
        train, test = of_two_classes(ClientInfo(client, int(client), 2, configuration.resolve({})))
        fitted = clone(estimator).fit(*train)
        assert accuracy == (fitted.predict_proba(test[0]).argmax(1) == test[1]).mean()
        assert said or accuracy == fitted.score(*test)


class WithoutPredict:
    """A classifier with probabilities alone."""

    def fit(self, inputs: Any, labels: Any) -> "WithoutPredict":
        self.inner = GaussianNB().fit(inputs, labels)
        self.classes_ = self.inner.classes_
        return self

    def predict_proba(self, inputs: Any) -> Any:
        return self.inner.predict_proba(inputs)


class OfAColumn(GaussianNB):
    """A classifier whose predictions are a column, as those of CatBoost."""

    def predict(self, X: Any) -> Any:
        return super().predict(X)[:, None]


class AloneOfAColumn:
    """A classifier without probabilities, whose predictions are a column."""

    def fit(self, inputs: Any, labels: Any) -> "AloneOfAColumn":
        self.inner = OfAColumn().fit(inputs, labels)
        self.classes_ = self.inner.classes_
        return self

    def predict(self, inputs: Any) -> Any:
        return self.inner.predict(inputs)


@pytest.mark.parametrize("kind", [WithoutPredict, OfAColumn, AloneOfAColumn])
def test_the_form_of_predictions_changes_no_metric(tmp_path: Path, kind: Any) -> None:
    settings = {"method": "local", "clients": 2, "rounds": 1, "report": False, "workers": 1}
    common = {"data": of_two_classes, "progress": False}
    plain = fedhet.run(settings, model=GaussianNB(), **common, out=tmp_path / "plain")
    done = fedhet.run(settings, model=kind(), **common, out=tmp_path / "run")
    assert accuracies(done.folder) == accuracies(plain.folder)
    assert "warnings" not in done.summary


def of_two_classes(client: ClientInfo) -> Any:
    generator = np.random.default_rng(client.partition_id)
    inputs = generator.normal(size=(60, 2))
    labels = (inputs[:, 0] + generator.normal(size=60) > 0).astype(int)
    return (inputs[:30], labels[:30]), (inputs[30:], labels[30:])
