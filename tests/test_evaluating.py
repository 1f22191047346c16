"""Evaluation of saved models and descriptions of data, against plain loops and pooled statistics."""

import csv
import shutil

import numpy as np
import pandas
import pandas as pd
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from torch import nn

import fedhet
from fedhet.client.app import make_client_app
from fedhet.engines.evaluating import evaluation_only, reported
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.methods import registry
from fedhet.results.absences import absences
from fedhet.results.description import data_table, pooled
from fedhet.results.history import read_clients
from fedhet.server.federation import Federation
from fedhet.setup.client_setup import ClientInfo

pytestmark = pytest.mark.usefixtures("home", "no_report")

SETTINGS = {"clients": 3, "rounds": 2, "learning-rate": 0.3, "batch-size": 16}


def drawn(place, number):
    generator = torch.Generator().manual_seed(place)
    inputs = torch.randn(number, 6, generator=generator)
    return inputs, (inputs[:, :3] + place * torch.randn(number, 3, generator=generator)).argmax(1)


def data(client):
    inputs, labels = drawn(client.partition_id, 100)
    return {"train": (inputs[:60], labels[:60]), "test": (inputs[60:], labels[60:])}


def new_data(client):
    """Only new test examples."""
    inputs, labels = drawn(10 + client.partition_id, 50)
    return {"test": (inputs, labels)}


def network(client):
    width = 4 + client.partition_id
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def equal_network(client):
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def accuracy(network, inputs, labels):
    with torch.no_grad():
        return float((network(inputs).argmax(1) == labels).double().mean())


def table(seed, columns=(0, 1, 2, 3, 4, 5), classes=("ant", "bee", "cat"), lacking=""):
    """Rows of a table and a column of classes by name, without those of the class `lacking`."""
    inputs, labels = drawn(seed, 60)
    names = pd.Series(np.array(["ant", "bee", "cat"])[labels])
    frame = pd.DataFrame(inputs.numpy(), columns=list("uvwxyz"))[["uvwxyz"[place] for place in columns]]
    kept = names != lacking
    return frame[kept], names[kept].astype(pd.CategoricalDtype(list(classes)))


def tables(client):
    return table(client.partition_id), table(10 + client.partition_id)


@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_new_examples_are_aligned_with_the_network_by_name(tmp_path, method):
    run = fedhet.run({"method": method, **SETTINGS}, model=equal_network, data=tables, out=tmp_path / "run")

    def scores(**changes):
        data = {"test": table(20, **changes)}
        return fedhet.evaluate(run, model=equal_network, data=data, out=tmp_path / "scores").table

    whole, without_ant = scores(), scores(lacking="ant")
    assert scores(columns=(3, 4, 5, 0, 1, 2), classes=("cat", "ant", "bee")) == whole != without_ant
    assert scores(lacking="ant", classes=("bee", "cat")) == without_ant
    for kind in ("columns", "classes"):

        def other(client, kind=kind):
            frame, labels = table(client.partition_id)
            if kind == "columns":
                part = frame.rename(columns={"u": "U"}), labels
            else:
                part = frame, labels.cat.rename_categories({"ant": "ape"})
            return part, part

        with pytest.raises(FedhetError, match=f"the data's {kind} are .*, but the network's are"):
            fedhet.evaluate(run, model=equal_network, data=other)
        settings = {"method": method, **SETTINGS, "rounds": 0, "start-from": str(run.folder)}
        with pytest.raises(FedhetError, match=f"the {kind} of the network in"):
            fedhet.run(settings, model=equal_network, data=other, out=tmp_path / kind)


@pytest.fixture
def trained(tmp_path):
    def trained(method, model):
        return fedhet.run({"method": method, **SETTINGS}, model=model, data=data, out=tmp_path / "run", progress=False)

    return trained


def test_models_by_clients_are_those_of_a_plain_loop(trained):
    run = trained("local", network)
    table = fedhet.evaluate(run, {"metrics": "macro-f1"}, model=network, data=new_data)
    for model in range(3):
        alone = fedhet.load_model(run, model, model=network)
        for client in range(3):
            assert table.value(model, client) == pytest.approx(accuracy(alone, *drawn(10 + client, 50)))
    rows = list(csv.DictReader((run.folder / "evaluation.csv").open()))
    assert [rows[5][name] for name in ("model", "client", "predictions")] == ["1", "2", "50"]
    assert float(rows[5]["accuracy"]) == table.value(1, 2)
    assert {"evaluation.html", "evaluation.png"} <= {path.name for path in run.folder.iterdir()}


class Parts(nn.Module):
    """A network of two tensors."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, left, right):
        return self.head(torch.cat([left, right], 1))


class Logits(nn.Module):
    """A network that returns what networks of Hugging Face return."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        return {"logits": self.head(inputs), "hidden": inputs}


@pytest.mark.parametrize("method", ["local", "fedavg", "fedproto"])
@pytest.mark.parametrize(
    ("model", "form"),
    [
        (Parts, lambda inputs: {"left": inputs[:, :2], "right": inputs[:, 2:]}),
        (Parts, lambda inputs: (inputs[:, :2], inputs[:, 2:])),
        (Logits, lambda inputs: inputs),
    ],
    ids=["dict", "tuple", "logits"],
)
def test_networks_of_several_inputs_or_outputs_score_as_in_their_run(tmp_path, method, model, form):
    def parts(client):
        return {name: (form(inputs), labels) for name, (inputs, labels) in data(client).items()}

    run = fedhet.run({"method": method, **SETTINGS}, model=model, data=parts, out=tmp_path / "run", progress=False)
    result = fedhet.evaluate(run, model=model, data=parts)
    for row in read_clients(run.folder)[-3:]:
        assert result.value("global" if method == "fedavg" else row.client, row.client) == pytest.approx(row.accuracy)


def test_the_task_of_a_run_need_not_be_named_again(tmp_path):
    def patients(client):
        inputs, _ = drawn(client.partition_id, 60)
        labels = torch.stack([inputs[:, 0].exp(), torch.arange(60) % 3 / 3 > 0], 1)
        return {"train": (inputs[:40], labels[:40]), "test": (inputs[40:], labels[40:])}

    model = lambda: nn.Linear(6, 1)  # noqa: E731
    arguments = {"model": model, "data": patients, "task": "survival"}
    run = fedhet.run({"method": "local", **SETTINGS}, **arguments, out=tmp_path / "run", progress=False)
    assert fedhet.evaluate(run, model=model, data=patients).table == fedhet.evaluate(run, **arguments).table


def test_a_run_of_a_configured_data_set_is_evaluated_as_it_was_scored(tmp_path):
    run = fedhet.run({"method": "local", "clients": 2, "rounds": 1}, out=tmp_path / "run", progress=False)
    table = fedhet.evaluate(run)
    assert [table.value(client, client) for client in ("0", "1")] == pytest.approx(
        [row.accuracy for row in read_clients(run.folder) if row.round == 1]
    )


def test_the_global_model_is_evaluated_everywhere_and_what_does_not_fit_is_named(trained):
    def narrow(client):
        inputs, labels = drawn(client.partition_id, 50)
        return {"test": (inputs[:, :4] if client.partition_id == 2 else inputs, labels)}

    run = trained("fedavg", equal_network)
    table = fedhet.evaluate(run, model=equal_network, data=narrow)
    alone = fedhet.load_model(run, 0, model=equal_network)
    assert table.value("global", 1) == pytest.approx(accuracy(alone, *drawn(1, 50)))
    assert table.value("global", 2) is None
    assert "model global at client 2: " in table.refused["global", "2"]
    with pytest.raises(ConfigError, match="learning-rate cannot be changed"):
        fedhet.evaluate(run, {"learning-rate": 1.0}, model=equal_network, data=narrow)
    with pytest.raises(ConfigError, match="used arguments of your own: pass data=..., too"):
        fedhet.evaluate(run, model=equal_network)


def test_new_labels_are_scored_in_the_runs_task(trained):
    run = trained("fedavg", equal_network)
    inputs, labels = drawn(7, 50)
    with pytest.raises(FedhetError, match="its labels are 0 or 1 for each output .*: give class numbers"):
        fedhet.evaluate(run, model=equal_network, data={"test": (inputs, nn.functional.one_hot(labels, 3))})


def test_evaluations_of_a_runs_folders_of_models_are_kept(trained, tmp_path):
    run = trained("local", network).folder
    shutil.copytree(run / "models", tmp_path / "best")
    (tmp_path / "best").rename(run / "models" / "best")
    for place in (run, run / "models" / "best"):
        assert fedhet.evaluate(place, model=network, data=data).folder == place
        assert (place / "evaluation.csv").is_file()


@pytest.mark.parametrize(("method", "model"), [("fedavg", equal_network), ("local", network)])
def test_a_run_without_rounds_only_evaluates(trained, tmp_path, method, model):
    run = trained(method, model)
    settings = {"method": method, **SETTINGS, "rounds": 0, "start-from": str(run.folder)}
    again = fedhet.run(settings, model=model, data=data, out=tmp_path / "again", progress=False)
    assert again.history[-1]["scores"] == run.history[-1]["scores"]
    assert again.history[-1]["work"]["steps"] == 0


def test_a_binary_fedproto_is_evaluated_by_its_prototypes_and_not_without_them(tmp_path):
    """Its saved models return a logit, as the network does; `rounds = 0` would evaluate the heads."""

    def binary(client):
        return {part: (inputs, labels % 2) for part, (inputs, labels) in data(client).items()}

    def network(client):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    settings = {"method": "fedproto", "clients": 2, "rounds": 2, "workers": 1, "report": False}
    run = fedhet.run(settings, model=network, data=binary, task="binary", out=tmp_path / "run", progress=False)
    matrix = fedhet.evaluate(run, model=network, data=binary)
    last = {row.client: row.accuracy for row in read_clients(run.folder) if row.accuracy is not None}
    assert {client: matrix.value(client, client) for client in last} == pytest.approx(last, abs=1e-6)
    with pytest.raises(FedhetError, match="predicts by more: run fedhet evaluate on the earlier run"):
        fedhet.run({**settings, "rounds": 0, "start-from": str(run.folder)}, model=network, data=binary, task="binary")


@pytest.mark.parametrize(
    ("method", "model", "more"), [("fedgh", network, {}), ("fedsimclr", equal_network, {"shared-init": False})]
)
def test_a_run_without_rounds_names_a_method_that_replaces_or_trains_parts(tmp_path, method, model, more):
    settings = {"method": method, **SETTINGS, **more, "start-from": "", "clients": 2}
    run = fedhet.run(settings, model=model, data=data, out=tmp_path / "run", progress=False)
    again = {**settings, "rounds": 0, "start-from": str(run.folder)}
    outcome = fedhet.run(again, model=model, data=data, out=tmp_path / "again", progress=False)
    assert outcome.summary["personal_accuracy"] is None
    assert f"but {method} predicts by more: run fedhet evaluate" in outcome.history[-1]["failures"][0]["reason"]


def with_statistics(client):
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("method", "normalised", "by"),
    [
        ("heterofl", True, "heterofl"),
        ("heterofl", False, "local"),
        ("fedrolex", False, "fedrolex"),
        ("fedrolex", True, "fedrolex"),
    ],
)
def test_parts_of_a_network_are_continued_but_evaluated_only_as_they_were(tmp_path, method, normalised, by):
    """Client 1 has half of the units, in each round others under FedRolex and all `by` local; its statistics too."""
    model = with_statistics if normalised else equal_network
    settings = {**SETTINGS, "method": method, f"{method}.widths": "1,0.5", "clients": 2, "report": False}
    arguments = {"model": model, "data": data, "progress": False}
    run = fedhet.run(settings, **arguments, out=tmp_path / "run")
    following = fedhet.run({**settings, "start-from": str(run.folder)}, **arguments, out=tmp_path / "following")
    assert not following.summary.get("never_took_part")
    only = {**settings, "method": by, "rounds": 0, "start-from": str(run.folder)}
    if by == "local":
        only.pop(f"{method}.widths")
        only["min-clients"] = 2
    with pytest.raises(FedhetError, match="client 1: rounds = 0 evaluates whole networks, but the client has a part"):
        fedhet.run(only, **arguments, out=tmp_path / "again")
    own = run.history[-1]["scores"]["received"]
    table = fedhet.evaluate(run, model=model, data=data)
    assert [table.value(client, client) for client in own] == [values[0][0] for values in own.values()]
    assert table.refused["global", "0"].startswith("model global at client 0: the client's own model is its part of it")


def test_a_network_of_the_server_is_named_as_not_evaluated(tmp_path):
    settings = {**SETTINGS, "method": "feddf", "clients": 2, "public-samples": 20, "feddf.server-steps": 2}
    run = fedhet.run({**settings, "samples-per-client": 20}, out=tmp_path / "run", progress=False)
    assert (run.folder / "models" / "global.safetensors").is_file()
    table = fedhet.evaluate(run)
    assert {*table.scores} == {"0", "1"}
    assert (
        "global at client 1: it is a network of the server, which fedhet.load_model does"
        in table.refused["global", "1"]
    )


@pytest.fixture
def elsewhere(monkeypatch):
    """Nodes do not trust the server, which is on another machine, and the server has no access to their disks."""
    monkeypatch.setattr("fedhet.server.federation.proof", lambda text: "guessed")
    monkeypatch.setattr(Federation, "simulated", False)


def test_nodes_evaluate_the_servers_global_model_within_their_policy(trained, elsewhere, new_watch, tmp_path):
    """A node's own `start-from` can be of a run without a global model, and `allow` needs no statistics."""
    run = trained("fedavg", equal_network)
    settings = {**SETTINGS, "method": "local"}
    own = fedhet.run(settings, model=equal_network, data=data, out=tmp_path / "own", progress=False)
    watch = new_watch()
    grid = LocalGrid(make_client_app(equal_network, data), 3)
    grid._contexts[FIRST_NODE].node_config["allow"] = "weights"
    grid._contexts[FIRST_NODE + 1].node_config |= {"allow": "weights,metrics", "start-from": str(own.folder)}
    strategy = fedhet.FedAvg(observers=[watch], rounds=0, start_from=str(run.folder), seed=1)
    strategy.start(grid)
    alone = fedhet.load_model(run, 0, model=equal_network)
    scores = watch.rows[-1]["scores"]["received"]
    assert scores.keys() == {"1", "2"}, "node 0 sends no metrics"
    assert [row["failures"] for row in watch.rows] == [[], []]
    for place in (1, 2):
        inputs, labels = data(ClientInfo(str(place), place, 3, None, {}))["test"]
        assert scores[str(place)][0] == [pytest.approx(accuracy(alone, inputs, labels), abs=1e-4)]


@pytest.mark.parametrize("method", ["lg-fedavg", "heterofl"])
def test_nodes_do_not_evaluate_networks_of_random_weights(method, tmp_path, elsewhere, new_watch):
    """The server's global model is not all of a client's network, and the node's own `start-from` has none."""
    settings = {**SETTINGS, "method": method, "report": False}
    run = fedhet.run(settings, model=equal_network, data=data, out=tmp_path / "run", progress=False)
    shutil.copytree(run.folder, tmp_path / "own")
    (tmp_path / "own" / "models" / "global.safetensors").unlink(missing_ok=True)
    grid = LocalGrid(make_client_app(equal_network, data), 3)
    for number in range(3):
        grid._contexts[FIRST_NODE + number].node_config["start-from"] = str(tmp_path / "own")
    strategy = registry.strategy(method)(observers=[new_watch()], rounds=0, start_from=str(run.folder), seed=1)
    with pytest.raises(FedhetError, match="no client can take part"):
        strategy.start(grid)


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "local"])
def test_an_evaluation_on_an_engine_has_the_table_of_models_by_clients(trained, tmp_path, method):
    run = trained(method, equal_network)
    alone = fedhet.evaluate(run, model=equal_network, data=data, out=tmp_path / "alone")
    config = evaluation_only(run.folder, {})
    done = fedhet.run(config, model=equal_network, data=data, out=tmp_path / "again", progress=False)
    result = reported(done.folder, config)
    models = {"global"} if method == "fedavg" else {"0", "1", "2"}
    assert {*result.scores} == models
    for model in models:
        for client in {"0", "1", "2"} if model == "global" else {model}:
            assert result.value(model, client) == pytest.approx(alone.value(model, client), abs=1e-4)
    assert {path.suffix for path in done.folder.glob("evaluation.*")} == {".csv", ".html", ".png"}
    assert result.metric == alone.metric
    (done.folder / "summary.json").unlink()
    assert reported(done.folder, config) is None, "the results are on the server's machine"


def table_with_gaps(client):
    inputs, labels = drawn(client.partition_id, 60 + 10 * client.partition_id)
    inputs = 1000 + inputs * (1 + client.partition_id)
    inputs[:12, 0] = torch.nan
    return {"train": (inputs, labels), "test": (inputs[20:40], labels[20:40])}


def linear(client):
    return nn.Linear(6, 3)


def test_a_description_equals_pooled_statistics(tmp_path):
    settings = {"method": "local", "rounds": 0, "clients": 3}
    run = fedhet.run(settings, model=linear, data=table_with_gaps, out=tmp_path / "run", progress=False)
    inputs, labels = (
        torch.cat(parts).numpy()
        for parts in zip(*(table_with_gaps(ClientInfo("", k, 3, None, {}))["train"] for k in range(3)), strict=True)
    )
    values = inputs[~np.isnan(inputs)].astype(float)
    assert [row["failures"] for row in run.history] == [[], []]
    assert run.summary["personal_accuracy"] is None, "a description has no score, of some clients or of new networks"
    together = run.summary["data"]["all"]
    assert (together["train"], together["test"], together["shape"]) == (len(labels), 60, [6])
    assert together["missing"] == np.isnan(inputs).any(1).sum()
    assert together["classes"] == np.bincount(labels, minlength=3).tolist()
    assert (together["mean"], together["std"]) == (pytest.approx(values.mean()), pytest.approx(values.std()))
    assert together["range"] == [pytest.approx(values.min()), pytest.approx(values.max())]
    with pytest.raises(FedhetError, match="row 0 contain nan"):
        fedhet.run({**settings, "rounds": 1}, model=linear, data=table_with_gaps, out=tmp_path / "b", progress=False)


@pytest.mark.parametrize("empty", [[1], [0, 1]])
def test_a_client_without_values_leaves_the_others_range(empty, new_watch):
    def data(client):
        inputs, labels = drawn(client.partition_id, 60)
        if client.partition_id in empty:
            inputs[:] = torch.nan
        return (inputs, labels), (inputs, labels)

    watch = new_watch()
    fedhet.Local(observers=[watch], rounds=0).start(LocalGrid(make_client_app(linear, data), 2))
    together = pooled(watch.rows[0]["data"])
    values = drawn(0, 60)[0] if len(empty) == 1 else torch.zeros(0)
    assert together["range"] == ([float(values.min()), float(values.max())] if len(values) else None)
    assert together["mean"] == pytest.approx(float(values.mean()) if len(values) else 0.0)


def lacking(client):
    """Examples without one class, so that clients number the others differently."""
    inputs, labels = drawn(client.partition_id, 60)
    kept = labels != client.partition_id
    texts = pandas.Categorical([("bag", "coat", "dress")[label] for label in labels[kept]])
    return (inputs[kept], texts), (inputs[kept], texts)


def test_nodes_descriptions_are_added_by_name(elsewhere, new_watch):
    watch = new_watch()
    fedhet.Local(observers=[watch], rounds=0).start(LocalGrid(make_client_app(linear, lacking), 2))
    together = pooled(watch.rows[0]["data"])
    counts = [np.bincount(drawn(k, 60)[1], minlength=3) * (np.arange(3) != k) for k in range(2)]
    assert dict(zip(together["names"], together["classes"], strict=True)) == {
        "coat": counts[0][1],
        "dress": counts[0][2] + counts[1][2],
        "bag": counts[1][0],
    }


def test_a_description_adds_classes_by_name(tmp_path):
    """The network has an output for each class."""
    settings = {"method": "local", "rounds": 0, "clients": 2}
    run = fedhet.run(settings, model=linear, data=lacking, out=tmp_path / "run", progress=False)
    counts = [np.bincount(drawn(k, 60)[1], minlength=3) * (np.arange(3) != k) for k in range(2)]
    together = run.summary["data"]["all"]
    assert dict(zip(together["names"], together["classes"], strict=True)) == {
        "coat": counts[0][1],
        "dress": counts[0][2] + counts[1][2],
        "bag": counts[1][0],
    }
    *_, (name, *_, classes) = data_table(run.summary["data"]["clients"])
    assert (name, classes.startswith(f"coat {counts[0][1]}, dress ")) == ("all", True)
    assert set(run.summary["classes"]["1"]) == {"bag", "dress"}


def test_a_node_describes_its_data_within_its_policy(elsewhere, new_watch):
    def few(client):
        inputs, labels = drawn(client.partition_id, 60)
        inputs[:3, 0] = torch.nan
        return {"train": (inputs, torch.tensor([0] * 40 + [1] * 17 + [2] * 3)), "test": (inputs[:20], labels[:20])}

    watch = new_watch()
    grid = LocalGrid(make_client_app(linear, few), 3)
    grid._contexts[FIRST_NODE].node_config["allow"] = "weights,metrics"
    grid._contexts[FIRST_NODE + 1].node_config["min-examples"] = 10
    fedhet.Local(observers=[watch], rounds=0).start(grid)
    row = watch.rows[0]
    assert row["data"].keys() == {"1", "2"}
    assert "needs statistics: others are described" in row["failures"][0]["reason"]
    assert next(absences(watch.rows, "trained", shared=False)).startswith("1 of 3 clients took no part")
    told = row["data"]["1"]
    assert (told["train"], told["missing"], told["range"]) == (60, None, None)
    assert told["values"] == 60 * 6, "without those that are missing, it would tell their number"
    assert told["classes"] == [40, None, None], "the number of those left out is known, so the next class is, too"
    assert pooled(row["data"])["classes"] == [80, None, None]


def test_a_method_that_settles_its_rounds_starts_from_models_that_predict_by_more(tmp_path):
    """FedMA's `rounds = 0` is as many as a pass needs, so the run trains."""
    settings = {**SETTINGS, "clients": 2, "rounds": 2}
    run = fedhet.run(
        {**settings, "method": "fens"}, model=equal_network, data=data, out=tmp_path / "run", progress=False
    )
    again = {"method": "fedma", "clients": 2, "rounds": 0, "start-from": str(run.folder), "report": False}
    outcome = fedhet.run(again, model=equal_network, data=data, out=tmp_path / "again", progress=False)
    assert outcome.summary["status"] == "completed"


class Functional(nn.Module):
    """A network with an activation that is not a module."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, inputs):
        return self.head(torch.relu(self.first(inputs)))


class OtherFunctional(Functional):
    def forward(self, inputs):
        return self.head(torch.tanh(self.first(inputs)))


OtherFunctional.__qualname__ = OtherFunctional.__name__ = "Functional"


def with_tanh():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(("model", "other"), [(lambda: equal_network(0), with_tanh), (Functional, OtherFunctional)])
@pytest.mark.parametrize("method", ["local", "fedavg", "fedproto"])
def test_a_model_with_another_activation_is_noted(trained, tmp_path, caplog, method, model, other):
    """Its arrays fit, but it does not predict as the run's model did."""
    run = trained(method, model)
    note = "client 1's model has other modules, options or functions"
    settings = {"method": method, **SETTINGS, "start-from": str(run.folder)}
    for network, noted in ((model, False), (other, True)):
        caplog.clear()
        fedhet.load_model(run, 1, model=network)
        assert (note in caplog.text) == noted
        caplog.clear()
        fedhet.evaluate(run, model=network, data=data)
        assert (note in caplog.text) == noted
        started = fedhet.run(settings, model=network, data=data, out=tmp_path / str(noted), progress=False)
        assert any("model has other modules" in warning for warning in started.summary.get("warnings", [])) == noted
    with pytest.raises(FedhetError, match="the client's network changed since this run began"):
        fedhet.run({"rounds": 3}, model=other, data=data, resume=run.folder)


def test_clients_without_a_file_of_their_model_are_named(tmp_path, caplog):
    """A forest takes part in a run, but the table has no row for it."""

    def model(client):
        return RandomForestClassifier(5) if client.partition_id == 1 else network(client)

    run = fedhet.run({"method": "local", **SETTINGS}, model=model, data=data, out=tmp_path / "run", progress=False)
    scores = fedhet.evaluate(run, model=model, data=data)
    assert [row[0] for row in scores.table] == ["model", "0", "2"]
    printed = [line.split() for line in str(scores).splitlines()]
    assert [printed[0], *printed[2:]] == [*scores.table, [str(scores.folder)]], "what print shows"
    assert scores.warnings == ["no row for 1: there is no file of an estimator, or of a client without a round"]
    assert scores.warnings[0] in caplog.text
    assert scores.warnings[0] in (run.folder / "evaluation.html").read_text()
