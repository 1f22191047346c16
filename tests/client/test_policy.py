"""The policy of a node: which messages it serves, how many examples are behind a number, and what errors say."""

import json
import math
import re
from datetime import datetime
from functools import partial
from itertools import cycle

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

import fedhet
from fedhet import data as datasets
from fedhet.algorithms.alignment.targets import pack
from fedhet.client import audit
from fedhet.client.app import make_client_app
from fedhet.client.policy import KINDS, Policy
from fedhet.config import configuration
from fedhet.data import PublicDataset
from fedhet.data.files import cache_folder
from fedhet.errors import ConfigError, DataError, FedhetError
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.flower.messages import Encoder, decode_arrays, read_reply, write_request
from fedhet.messages import Payload, Request, to_arrays
from fedhet.messages.protocol import DESCRIBE, FIRST, JOIN, with_public_dataset
from fedhet.methods import registry
from fedhet.methods.method import METRICS, STRUCTURE
from fedhet.server.app import serve
from fedhet.tasks import Task

pytestmark = pytest.mark.usefixtures("home")

SECRET = "patient 4711"  # pragma: allowlist secret


@pytest.fixture
def elsewhere(monkeypatch):
    """The server is on another machine."""
    monkeypatch.setattr("fedhet.server.federation.proof", lambda text: "guessed")


@pytest.fixture
def federate(tiny, new_watch):
    """Runs two rounds of a method on three nodes with 40 examples and more; `node` are settings of node 1."""

    def federate(name, node=None, *, model=None, data=None, task=None, clients=3, **settings):
        watch, grid = new_watch(), LocalGrid(make_client_app(model or tiny.model, data or forty, task=task), clients)
        grid._contexts[FIRST_NODE + 1].node_config.update(node or {})
        strategy = getattr(fedhet, name)(observers=[watch], rounds=2, **{"learning_rate": 0.1, **settings})
        strategy.start(grid)
        return watch, strategy

    return federate


def forty(client, few=0):
    """40 examples to train on and 20 to test on; the first `few` of the former have class 2."""
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(client.partition_id))
    labels = inputs[:, :2].argmax(1)
    labels[:few] = 2
    return (inputs[:40], labels[:40]), (inputs[40:], labels[40:])


def asked(grid, type, settings, question="", arrays=None, **request):
    """The answer of node 1 to a message by hand."""
    record = Encoder()(Payload(arrays or {}))
    request = Request(**{"question": question, "evaluate": True, **request})
    write_request(record, request, json.dumps({"method": "fedavg", **settings}))
    (reply,) = grid.send_and_receive([Message(record, FIRST_NODE + 1, type, group_id="1")])
    return reply


# ---- before anything is loaded


def test_a_message_of_another_strategy_is_in_the_audit_file(tmp_path):
    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), forty), 2)
    grid._contexts[FIRST_NODE + 1].node_config |= {"allow": "weights", "state-dir": str(tmp_path)}
    message = Message(RecordDict(), FIRST_NODE + 1, "train", group_id="1")
    (reply,) = grid.send_and_receive([message])
    (entry,) = audit.entries(tmp_path, datetime(2000, 1, 1).astimezone())
    assert entry["refused"] == reply.error.reason
    assert "the message is from another strategy" in reply.error.reason


@pytest.mark.parametrize("method", registry.own_methods())
def test_refusal_before_loading(method):
    def loaded(client):
        raise AssertionError("was loaded")

    grid = LocalGrid(make_client_app(loaded, loaded), 2)
    for allow, type in zip(("", *KINDS), cycle(["query", "train", "evaluate"]), strict=False):
        grid._contexts[FIRST_NODE + 1].node_config["allow"] = allow
        traits = registry.method(method).traits_of(configuration.resolve({"method": method}).options)
        sends = {*traits.sends.values()} - {METRICS, STRUCTURE}
        if not allow or sends - {allow}:
            reply = asked(grid, type, {"method": method})
            assert "this node allows" in str(reply.content["report"]["refusal"])


def test_default_policies():
    assert Policy.of({}, deployed=False) == Policy(None, 1, False)
    assert Policy.of({}, deployed=True) == Policy(None, 10, True)
    unlimited = {"max-per-hour": float("inf"), "dp-noise": 1.0, "dp-clip": 1.0, "dp-epsilon": float("inf")}
    assert Policy.of(unlimited, deployed=True).budget == float("inf")
    assert Policy.of({"min-examples": 3, "allow": "weights, metrics"}, deployed=True).allowed == {"weights", "metrics"}


@pytest.mark.parametrize("least", [0, 2.5, True])
def test_min_examples_must_be_whole(least):
    with pytest.raises(ConfigError, match="the node's min-examples is .* must be a whole number of at least 1"):
        Policy.of({"min-examples": least}, deployed=True)


@pytest.mark.parametrize(("type", "question"), [("query", "handshake"), ("query", FIRST), ("evaluate", "")])
def test_noise_needs_one_shared_model(type, question, caplog):
    """Noise is added to weights alone, and a server may skip the handshake."""
    noise = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), forty, mods=[noise]), 2)
    assert "refusal" in asked(grid, type, {"method": "fedproto"}, question).content["report"]
    assert "has no model that all clients share and the server averages, which a mod of Flower's needs" in caplog.text
    assert "refusal" not in asked(grid, type, {"method": "fedavg"}, question).content["report"]


@pytest.mark.usefixtures("elsewhere")
def test_the_log_names_scales_of_the_data(federate, caplog):
    caplog.set_level("INFO")
    federate("FedAvg")
    lines = [line for line in caplog.messages if "sent " in line]
    assert {"scales of the data (" in line for line in lines if "handshake" in line} == {True}
    assert not any("scales of the data (" in line for line in lines if "handshake" not in line)


@pytest.mark.usefixtures("elsewhere")
def test_audit_log(federate, caplog, tmp_path):
    caplog.set_level("INFO")
    node = tmp_path / "north"
    federate("FedAvg", {"allow": "weights,metrics", "min-examples": 5, "state-dir": str(node)})
    lines = [line for line in caplog.messages if line.startswith("client 1: ")]
    origin = re.compile(r" \[20\S+:\d\d, Flower's run \d+, app installed\]")
    assert all(origin.search(line) for line in lines[2:])
    lines = [re.sub(r"run [0-9a-f]+,", "run R,", origin.sub("", line)) for line in lines]
    assert lines.pop(0).startswith("client 1: its new secret seed is stored in ")
    assert lines.pop(0) == (
        "client 1: may send metrics, weights, from at least 5 examples, without dp-noise; trains on 40 of 40 examples "
        "in 7 groups"
    )
    assert lines == [
        "client 1: query handshake (fedavg, run R, round 0): sent numbers of examples (54 bytes), "
        "structure (362 bytes)",
        "client 1: query first (fedavg, run R, round 0): sent numbers of examples (54 bytes), structure (45 bytes), "
        "weights (204 bytes)",
        "client 1: train (fedavg, run R, round 1): sent metrics (270 bytes), structure (45 bytes), weights (204 bytes)",
        "client 1: train (fedavg, run R, round 2): sent metrics (270 bytes), structure (45 bytes), weights (204 bytes)",
        "client 1: evaluate (fedavg, run R, round 3): sent metrics (152 bytes), structure (45 bytes)",
    ]
    heading, total = audit.summary(node, audit.since("today"))
    assert re.fullmatch(r"client 1, run [0-9a-f]+ \(Flower's \d+\), app installed", heading)
    assert total.endswith(
        ": 5 messages, of which 0 were refused; sent numbers of examples (108 bytes), structure (542 bytes), "
        "weights (612 bytes), metrics (692 bytes)"
    )
    with (node / audit.FILE).open("a") as file:
        file.write('{"time"\n{"time": "2999-01-01"}\n')
    assert "is damaged" in audit.summary(node, audit.since("today"))[2]
    caplog.clear()
    federate("FedProto", {"allow": "weights", "state-dir": str(node)})
    assert "refused" in (node / audit.FILE).read_text()
    assert any("client 1: query: refused: this node allows only weights" in line for line in caplog.messages)
    modes = {path.stat().st_mode & 0o77 for path in node.rglob("*")}
    assert modes == {0}, "only the node's user can read what it writes"


def test_refused_messages_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "MOST", 5)
    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), forty), 2)
    grid._contexts[FIRST_NODE + 1].node_config.update({"allow": "weights", "state-dir": str(tmp_path)})
    path = tmp_path / audit.FILE
    for _ in range(6):
        asked(grid, "query", {}, "another", run="a")
    assert [(entry["times"], entry["run"]) for entry in audit.entries(tmp_path, audit.since("today"))] == [(6, "a")]
    assert refusal(asked(grid, "query", {}, "handshake", run="served")) == ""
    for number in range(20):  # each with a reason of its own
        asked(grid, "query", {}, f"question {number}", run=f"run {number}")
    *_, served, entry = path.read_text().splitlines()[:2]
    assert "served" in served + entry
    *others, last = audit.entries(tmp_path, audit.since("today"))
    assert len(others) == 6
    assert (last["refused"], last["times"], last["run"]) == (audit.FURTHER, 16, "")
    path.write_bytes(path.read_bytes()[:-5])  # the machine stopped
    asked(grid, "query", {}, "another", run="b")
    assert json.loads(path.read_text().splitlines()[-1])["client"] == "1"
    text = "".join(audit.summary(tmp_path, audit.since("today")))
    assert "7 messages" not in text
    assert "6 messages, of which 6 were refused" in text


def test_failures_that_share_a_line_count(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "MOST", 0)

    def data(client):
        raise ValueError(SECRET)

    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), data), 2)
    node = {"allow": "weights", "max-per-hour": 3, "state-dir": str(tmp_path)}
    grid._contexts[FIRST_NODE + 1].node_config.update(node)
    refusals = [refusal(asked(grid, "train", {}, run=str(number))) for number in range(5)]
    assert refusals[:3] == [audit.FAILED] * 3
    assert all(each.startswith("this node answers at most 3 messages in an hour") for each in refusals[3:])


@pytest.mark.parametrize("allow", [{}, {"allow": "metrics"}])
@pytest.mark.parametrize(
    ("limit", "told"), [({"max-bytes": 160}, "the reply has"), ({"max-per-hour": 1}, "this node answers at most 1")]
)
def test_limits_hold_for_metrics_and_on_the_same_machine(limit, told, allow, tmp_path, monkeypatch):
    """A reply with metrics has more bytes, of which none is of an array."""
    monkeypatch.setattr("fedhet.client.policy.proof", lambda text: "here")
    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), forty), 2)
    grid._contexts[FIRST_NODE + 1].node_config.update({**limit, **allow, "state-dir": str(tmp_path)})
    settings = {"method": "local"}
    assert refusal(asked(grid, "train", settings, run="a", evaluate=False, here="here")) == ""
    assert refusal(asked(grid, "train", settings, run="a", here="here")).startswith(told)


@pytest.mark.parametrize("fails", [False, True])
def test_messages_that_are_answered_at_the_same_time_count(fails, tiny, tmp_path):
    """The limit of answers in an hour holds for a message that was admitted before the others were answered."""

    def data(client):
        with (tmp_path / audit.FILE).open("a") as file:  # another process answers meanwhile
            file.write(json.dumps({"time": datetime.now().astimezone().isoformat(), "sent": {"weights": 1}}) + "\n")
        if fails:
            raise ValueError(SECRET)
        return forty(client)

    grid = LocalGrid(make_client_app(tiny.model, data), 2)
    node = {"allow": "weights", "max-per-hour": 1, "state-dir": str(tmp_path)}
    grid._contexts[FIRST_NODE + 1].node_config.update(node)
    report = asked(grid, "train", {}, run="a").content["report"]
    assert report["refusal"].startswith("this node answers at most 1 messages in an hour")
    assert not report["again"], "which would tell whether the message failed"
    *_, entry = audit.entries(tmp_path, audit.since("today"))
    assert entry["refused"] == report["refusal"]


@pytest.mark.parametrize(("epochs", "served"), [(2, True), (3, False)])
def test_evaluations_of_a_newcomer_are_limited_as_messages_are(epochs, served, tmp_path):
    """A server that chooses the weights would read a loss of each epoch."""
    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), forty), 2)
    node = {"allow": "weights,metrics", "max-per-hour": 6, "state-dir": str(tmp_path)}
    grid._contexts[FIRST_NODE + 1].node_config |= node
    arrays = {"model": to_arrays(nn.Linear(4, 3).state_dict())}
    reply = asked(grid, "query", {"unseen-epochs": epochs, "unseen-clients": 1}, JOIN, arrays, run="a")
    told = "max-per-hour in its node config allows fewer evaluations in an hour: reduce unseen-epochs"
    assert refusal(reply) == ("" if served else told)
    assert served == ("received-2-loss" in reply.content.get("metrics", {}))


def test_failures_count(tiny, tmp_path):
    """That a message fails can tell one bit of an example."""

    def data(client):
        raise ValueError(SECRET)

    grid = LocalGrid(make_client_app(tiny.model, data), 2)
    node = {"allow": "weights", "max-per-hour": 2, "state-dir": str(tmp_path)}
    grid._contexts[FIRST_NODE + 1].node_config.update(node)
    refusals = [refusal(asked(grid, "train", {}, run=str(number))) for number in range(4)]
    assert refusals[:2] == [audit.FAILED] * 2
    assert all(each.startswith("this node answers at most 2 messages in an hour") for each in refusals[2:])


@pytest.mark.parametrize("key", ["alow", "Allow", "min_examples", "dp-epsilonn", "dp_privacy", "statedir", "data_path"])
def test_misspelt_keys_are_refused(key):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '"):
        Policy.of({"allow": "metrics", key: "1"}, deployed=True)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("partitions", "examples"), [({}, 1442), ({"num-partitions": 2}, 582)])
def test_a_node_has_all_examples_by_default(partitions, examples, tmp_path):
    grid = LocalGrid(make_client_app(), 1)
    node = grid._contexts[FIRST_NODE].node_config
    del node["num-partitions"]
    node |= {"state-dir": str(tmp_path), **partitions}
    strategy = fedhet.Local(rounds=1, partition="classes", classes_per_client=4, architectures="mlp")
    strategy.start(grid)
    assert strategy.state.clients["0"].examples == examples


def test_nodes_beside_the_server_without_partition_id_have_all_examples(tmp_path):
    grid = LocalGrid(make_client_app(), 2)
    for number, context in enumerate(grid._contexts.values()):
        context.node_config.clear()
        context.node_config |= {"state-dir": str(tmp_path), "name": f"hospital-{number}"}
    strategy = fedhet.Local(rounds=1, clients=2, partition="classes", classes_per_client=4, architectures="mlp")
    strategy.start(grid)
    assert [client.examples for client in strategy.state.clients.values()] == [1442, 1442]


@pytest.mark.usefixtures("elsewhere")
def test_keys_without_effect_may_differ_between_runs_of_a_node(tmp_path):
    grid = LocalGrid(make_client_app(), 1)
    node = grid._contexts[FIRST_NODE].node_config
    node.clear()
    node |= {"state-dir": str(tmp_path), "name": "north", "allow": "weights,metrics"}
    for parts in ({"partition": "classes", "classes_per_client": 5}, {"partition": "dirichlet", "alpha": 9.0}, {}):
        strategy = fedhet.FedAvg(rounds=1, architectures="mlp", **parts)
        strategy.start(grid)
        assert strategy.state.clients["north"].examples == 1442
    with pytest.raises(FedhetError, match="but test-split changed"):
        fedhet.FedAvg(rounds=1, architectures="mlp", test_split="drawn").start(grid)


def test_users_functions_have_further_keys():
    Policy.of({"ward": 7, "dataset-path": "x", "hospital": "north"}, deployed=True)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("key", ["noise", "epsilon", "max-hourly"])
def test_without_functions_any_other_key_is_refused(key, tmp_path):
    """The node would have no noise or no limit, and its owner would not know."""
    grid = LocalGrid(make_client_app(), 1)
    grid._contexts[FIRST_NODE].node_config |= {"state-dir": str(tmp_path), key: 1.0}
    with pytest.raises(FedhetError, match=f"unknown key in the node config '{key}'; did you mean '"):
        fedhet.Local(rounds=1, architectures="mlp").start(grid)


# ---- the split of a node's data


@pytest.mark.usefixtures("elsewhere")
def test_node_settings_of_the_split():
    found = {}

    def data(client):
        found[client.name] = client.config.validation
        return forty(client)

    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), data), 2)
    grid._contexts[FIRST_NODE + 1].node_config["validation"] = 0.25
    strategy = fedhet.FedAvg(rounds=1, validation=0.5)
    strategy.start(grid)
    assert found == {"0": 0.5, "1": 0.25}
    assert [strategy.state.clients[name].examples for name in "01"] == [20, 30]


def test_split_seed(tiny):
    def parts(**node):
        grid = LocalGrid(make_client_app(), 2)
        context = grid._contexts[FIRST_NODE + 1]
        context.node_config.update(node)
        info = fedhet.setup.client_setup.ClientInfo("1", 1, 2, configuration.resolve({"seed": 3}), context.node_config)
        found = fedhet.setup.client_setup.data_of(info)
        return found.train.labels, len(found.train)

    assert torch.equal(parts()[0], parts(**{"split-seed": 3})[0])
    assert not torch.equal(parts()[0], parts(**{"split-seed": 4})[0])
    assert parts()[1] == parts(**{"split-seed": 4})[1]


@pytest.mark.parametrize("changed", [{"samples-per-client": 12}, {"seed": 1}])
def test_split_is_pinned_within_a_run(changed):
    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), forty), 2)
    first = {"validation": 0.3}
    assert refusal(asked(grid, "query", first, "handshake", run="a")) == ""
    assert refusal(asked(grid, "query", first | {"rounds": 9}, "handshake", run="a")) == ""
    (key,) = changed
    assert f"but {key} has changed from 0 to" in refusal(asked(grid, "query", first | changed, "handshake", run="a"))


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ({}, True),
        ({"allow": "weights"}, False),
        ({"allow": "weights", "partition": "classes"}, True),
        ({"allow": "weights,statistics"}, True),
        ({"allow": "weights,prototypes"}, True),
        ({"dp-noise": 1.0, "dp-clip": 1.0}, False),
        ({"dp-noise": 1.0, "dp-clip": 1.0, "partition": "classes"}, False),
    ],
)
def test_a_server_does_not_count_a_class_by_the_partition(policy, served, pooled, tmp_path):
    """Of one class for each client, the number of a node's examples is that of a class."""
    images, classes = load_digits(return_X_y=True)
    data = {"train": (images[:900], classes[:900]), "test": (images[900:], classes[900:])}
    app = make_client_app(lambda: nn.Linear(64, 10), data) if pooled else make_client_app()
    grid = LocalGrid(app, 2)
    node = {"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path), **policy}
    grid._contexts[FIRST_NODE + 1].node_config.update(node)
    settings = {} if pooled else {"dataset": "digits", "architectures": "mlp"}
    by_class = settings | {"partition": "classes", "classes-per-client": 1}
    told = refusal(asked(grid, "query", by_class, "handshake", run="a"))
    assert (told == "") == served
    if not served:
        assert told.startswith("partition = classes makes the number of the client's examples depend on their classes")
        without = {key: value for key, value in node.items() if key != "partition"}
        grid._contexts[FIRST_NODE + 1].node_config = without
        grid._contexts[FIRST_NODE + 1].state.clear()
        assert refusal(asked(grid, "query", settings, "handshake", run="b")) == "", "the refused one fixed no split"


@pytest.mark.parametrize("chosen", [{"head": "1"}, {"representation": "0"}])
def test_node_names_the_head(chosen):
    """A server that names the first layer asks for class means of inputs."""

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    grid = LocalGrid(make_client_app(model, forty), 2)
    settings = {"method": "fedproto", **chosen}
    assert asked(grid, "query", settings, "handshake", run="a").content["values"]["width"] == 4
    grid._contexts[FIRST_NODE + 1].node_config["head"] = "3"
    assert asked(grid, "query", settings, "handshake", run="b").content["values"]["width"] == 6


# ---- what a server may choose


@pytest.fixture
def node():
    """Node 1 of two, with `allow`, in a grid."""
    grid = LocalGrid(make_client_app(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), forty), 2)
    grid._contexts[FIRST_NODE + 1].node_config["allow"] = "weights,prototypes,posteriors"
    return grid


def refusal(reply):
    return str(reply.content["report"].get("refusal", ""))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"method": "fedprox"}, "method has changed from 'fedavg' to 'fedprox': start another run"),
        ({"method": "moon", "head": "0"}, "head has changed from '' to '0': start another run"),
        ({"method": "moon", "representation": "1"}, "representation has changed from '' to '1': start another run"),
        ({"optimizer": "adam"}, "optimizer has changed from 'sgd' to 'adam': start another run"),
        ({"local-epochs": 0}, "local-epochs has changed from 1 to 0: start another run"),
        ({"learning-rate": 5.0}, "learning-rate has changed from 0.1 to 5.0: start another run"),
        ({"samples-per-client": 12}, "samples-per-client has changed from 0 to 12: start another run"),
    ],
)
def test_settings_are_fixed_within_a_run(changed, told, node):
    first = {"learning-rate": 0.1, "lr-schedule": "cosine"}
    if changed.get("method") == "moon":
        first |= {"method": "moon", "moon.width": 0}
    assert refusal(asked(node, "train", first, run="a")) == ""
    node._contexts[FIRST_NODE + 1].state.clear()  # another run of Flower's
    assert refusal(asked(node, "train", first | {"rounds": 9}, run="a", round=2)) == "", "a resumed run"
    assert refusal(asked(node, "train", first | changed, run="a")) == (
        f"the first message of a run fixes its settings at this node, but {told}"
    )
    assert refusal(asked(node, "train", first | changed, run="b")) == "", "another run, as the message says"
    node._contexts[FIRST_NODE + 1].node_config.pop("allow")
    assert refusal(asked(node, "train", first, run="c")) == ""
    assert (refusal(asked(node, "train", first | changed, run="c")) == "") == ("samples-per-client" not in changed)


def test_a_changed_path_of_the_node_is_not_told(node, tmp_path):
    first = {"method": "local", "rounds": 1}
    config = node._contexts[FIRST_NODE + 1].node_config
    config["allow"] = "metrics"
    assert refusal(asked(node, "query", first, run="a", question="first")) == ""
    config["start-from"] = str(tmp_path / "patient 4711")
    told = refusal(asked(node, "query", first, run="a", question="first"))
    assert told.endswith("but start-from has changed: start another run")


@pytest.mark.parametrize("content", [b"{", b"\xff", None])
def test_nor_is_that_of_a_file_that_cannot_be_read(content, node, tmp_path):
    place = tmp_path / "patient 4711"
    node._contexts[FIRST_NODE + 1].node_config["state-dir"] = str(place)
    assert refusal(asked(node, "train", {}, run="a")) == ""
    file = place / "a" / "beginning" / "settings" / "1.json"
    file.unlink()
    file.mkdir() if content is None else file.write_bytes(content)
    assert refusal(asked(node, "train", {}, run="a")) == audit.FAILED


@pytest.mark.parametrize("type", ["train", "evaluate"])
@pytest.mark.parametrize("question", ["handshake", DESCRIBE, FIRST, JOIN])
def test_only_a_query_has_a_question(type, question, node):
    """A training that calls itself a handshake would change the settings, which handshakes do not fix."""
    node._contexts[FIRST_NODE + 1].node_config["allow"] += ",statistics,metrics"
    told = refusal(asked(node, type, {"method": "fedavg"}, question, run="a"))
    assert told == "only a query can have a question: install the server's version of fedhet on this node"


def test_epochs_are_those_of_the_settings(node):
    """A message cannot train longer or shorter than the settings, which the first message fixes."""
    sent = [
        asked(node, "train", {"local-epochs": 2}, run="a", epochs=epochs, closing=closing).content["model"]
        for epochs, closing in ((2, False), (0, False), (9, False), (9, True))
    ]
    trained, fewer, more, closing = ({name: array.data for name, array in model.items()} for model in sent)
    assert trained == fewer == more
    assert closing != trained, "closing-epochs is 0"


def test_handshakes_fix_no_settings(node):
    """The server completes its settings by what clients report."""
    for settings in ({"test-on": "both"}, {"learning-rate": 0.2}):
        assert refusal(asked(node, "query", settings, "handshake", run="a")) == ""
    assert refusal(asked(node, "train", {}, run="a")) == ""


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("size", [10.0, 1e4])
def test_received_prototypes_are_bounded(size, dtype, node):
    means = {"classes": np.arange(3), "means": np.full((3, 6), size, dtype)}
    told = refusal(asked(node, "train", {"method": "fedproto"}, arrays={"prototypes": means}, run="a"))
    assert (told == "") == (size < 1000)
    assert told in ("", LIMITED.format("prototypes", "1e+04", 1000))
    node._contexts[FIRST_NODE + 1].node_config.pop("allow")
    sent = {"prototypes": means}
    assert refusal(asked(node, "train", {"method": "fedproto"}, arrays=sent, run="b", evaluate=False)) == ""


def test_a_prototype_that_is_no_number_does_not_hide_others(node):
    means = np.full((3, 6), 1e4, np.float32)
    means[2] = np.nan
    sent = {"prototypes": {"classes": np.arange(3), "means": means}}
    assert "prototypes up to nan" in refusal(asked(node, "train", {"method": "fedproto"}, arrays=sent, run="a"))


@pytest.mark.parametrize("number", [-1, 2**16, 2**40])
def test_received_prototypes_are_of_possible_classes(number, node):
    """A client would allocate memory for all classes up to the largest one."""
    means = {"classes": np.array([0, number]), "means": np.zeros((2, 6), np.float32)}
    told = refusal(asked(node, "train", {"method": "fedproto"}, arrays={"prototypes": means}, run="a"))
    assert told.startswith("the server sent classes of prototypes that are not distinct numbers from 0 to 65535: ")


def test_public_inputs_are_compared_as_networks_get_them():
    """Bytes are scaled to [0, 1], and floats are not."""

    def data(client):
        (inputs, labels), _ = forty(client)
        return ((255 * inputs.sigmoid()).byte(), labels), ((255 * inputs.sigmoid()).byte(), labels)

    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), data), 2)
    grid._contexts[FIRST_NODE + 1].node_config["allow"] = "posteriors"
    for inputs, largest in ((torch.ones(2, 4).byte(), 0), (torch.ones(2, 4), 0), (torch.full((2, 4), 101.0), 101)):
        arrays = with_public_dataset(PublicDataset(inputs)).arrays
        told = refusal(asked(grid, "query", {"method": "feddf"}, "handshake", arrays, run="a"))
        assert told == (LIMITED.format("public inputs", largest, 100) if largest else "")


LIMITED = (
    "the server sent {0} up to {1}, but this node accepts at most {2}, by the size of its own: "
    "scale all clients' {0} alike, or, if training diverged, reduce learning-rate"
)


@pytest.mark.parametrize("noise", [False, True])
def test_received_public_inputs_and_scores_are_bounded(noise, node):
    if noise:
        pytest.importorskip("dp_accounting")
        node._contexts[FIRST_NODE + 1].node_config.update({"dp-noise": 1.0, "dp-clip": 1.0})
    settings = {"method": "feddf"}
    told = []
    for size in (1.0, 2e3):
        public = PublicDataset(torch.full((2, 4), size))
        arrays = with_public_dataset(public).arrays
        told.append(refusal(asked(node, "query", settings, "handshake", arrays, run="a")))
    assert told == ["", "" if noise else LIMITED.format("public inputs", "2e+03", 1000)]
    public = PublicDataset(torch.full((2, 4), 1.0))
    for size in () if noise else (1.0, 2e3):
        arrays = {"mean": pack(torch.full((2, 3), size)), "rows": {"rows": np.arange(2)}}
        told = refusal(asked(node, "train", settings, "", arrays, run="a", public=public.digest))
        assert told == ("" if size == 1.0 else LIMITED.format("scores", "2e+03", 1000))


@pytest.mark.parametrize("settings", [{"method": "fedmd"}, {"method": "fedharm"}, {"local.public": "mixed"}])
def test_public_training_must_be_allowed(settings, node):
    settings = {"method": "local"} | settings
    node._contexts[FIRST_NODE + 1].node_config["allow"] = "posteriors,descriptors,metrics"
    told = refusal(asked(node, "query", settings, "handshake"))
    assert told == (
        "this node allows only descriptors, metrics, posteriors (allow in its node config), but "
        f"{settings['method']} needs public-training: choose another method"
    )
    node._contexts[FIRST_NODE + 1].node_config["allow"] += ",public-training"
    assert "allow" not in refusal(asked(node, "query", settings, "handshake"))
    node._contexts[FIRST_NODE + 1].node_config["allow"] = "posteriors"
    assert "allow" not in refusal(asked(node, "query", {"method": "fedmd", "fedmd.public-epochs": 0}, "handshake"))


# ---- how many examples are behind a number


@pytest.mark.usefixtures("elsewhere")
def test_too_few_training_examples(federate, tiny):
    def data(client):
        train, test = forty(client)
        return (tuple(part[:9] for part in train), test) if client.name == "1" else (train, test)

    watch, _ = federate("FedAvg", data=data)
    assert [failure["reason"] for failure in watch.rows[0]["failures"]] == [
        "the client has 9 training examples, but its node requires at least 10 examples behind every number that it "
        "sends (min-examples): add training examples, or leave the client out"
    ]
    assert watch.rows[1]["participants"] == ["0", "2"]
    watch, _ = federate("FedAvg", {"min-examples": 9}, data=data)
    assert watch.rows[0]["failures"] == []


@pytest.mark.usefixtures("elsewhere")
def test_smallest_batch(federate):
    """Else a weight decay that forgets all other steps (1 / learning-rate) tells the examples of the last one."""
    sizes = []

    class Net(nn.Linear):
        def forward(self, inputs):
            sizes.extend([len(inputs)] * (self.training and torch.is_grad_enabled()))
            return super().forward(inputs)

    watch, _ = federate("FedAvg", model=lambda client: Net(4, 3), batch_size=13)
    assert [row["failures"] for row in watch.rows] == [[]] * len(watch.rows)
    assert {*sizes} - {2} == {13, 14}, "the 40th example joins a batch; a check passes two through a copy"
    watch, _ = federate("FedAvg", {"min-examples": 14}, batch_size=13)
    assert [failure["reason"] for failure in watch.rows[0]["failures"]] == [
        "batch-size is 13, but the client's node requires at least 14 examples in every training step (min-examples): "
        "increase batch-size"
    ]


@pytest.mark.usefixtures("elsewhere")
def test_too_few_test_examples(federate, caplog):
    def data(client):
        train, test = forty(client)
        return (train, tuple(part[:9] for part in test)) if client.name == "1" else (train, test)

    watch, _ = federate("FedAvg", data=data, validation=0.2)
    assert all(row["failures"] == [] for row in watch.rows)
    last = {row.client: row.accuracy for row in watch.clients if row.round == 2}
    assert [last[name] is None for name in "012"] == [False, True, False]
    assert "client 1 has 9 examples for the metric received, and its node requires at least 10" in caplog.text
    assert "metric validation-" in caplog.text, "a fifth of 40 is 8"
    assert "validation" not in watch.rows[1]


@pytest.mark.parametrize("task", [None, "regression"])
def test_under_noise_a_task_is_not_inferred_from_numbers(task, federate):
    """One of them decides between regression and a multi-label task."""
    pytest.importorskip("dp_accounting")

    def data(client):
        (train, _), (test, _) = forty(client)
        return (train, torch.rand(40, 2)), (test, torch.rand(20, 2))

    node = {"dp-noise": 1.0, "dp-clip": 1.0}
    watch, _ = federate("FedAvg", node, model=lambda: nn.Linear(4, 2), data=data, task=task)
    told = "".join(failure["reason"] for failure in watch.rows[0]["failures"])
    assert ("name it, as in make_client_app(..., task='regression')" in told) == (task is None)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("events", [9, 10])
def test_a_metric_of_few_events_is_not_sent(events, federate):
    """The loss of survival data is a sum over events."""

    def data(client):
        (train, _), (test, _) = forty(client)
        times = torch.stack([torch.arange(40.0), (torch.arange(40) < events).float()], 1)
        return (train, times), (test, times[:20])

    watch, _ = federate("FedAvg", model=lambda: nn.Linear(4, 1), data=data, task="survival")
    assert any(row.accuracy is not None for row in watch.clients) == (events == 10)


@pytest.mark.parametrize(("examples", "told"), [(1432, False), (1396, False), (1438, True)])
def test_two_metrics_do_not_tell_that_of_few_test_examples(examples, told, tmp_path):
    """The common test set has one example, ten or none beyond the client's own part of 358, 349 or 359."""
    grid = LocalGrid(make_client_app(), 1)
    node = {"allow": "metrics", "num-partitions": 1, "partition-id": 0, "state-dir": str(tmp_path)}
    (context,) = grid._contexts.values()
    context.node_config.update(node)
    split = {"test-split": "drawn", "test-share": 0.2, "samples-per-client": examples, "test-on": "both"}
    record = Encoder()(Payload())
    settings = {"method": "local", "dataset": "digits", "architectures": "mlp-20", "local-epochs": 1, **split}
    write_request(record, Request(run="a", round=1, epochs=1, evaluate=True), json.dumps(settings))
    (reply,) = grid.send_and_receive([Message(record, FIRST_NODE, "train", group_id="1")])
    metrics = reply.content["metrics"]
    assert ("trained-metric" in metrics, "common-trained-metric" in metrics) == (True, told)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["FedProto", "FD"])
def test_class_means_of_few_examples(name, federate, caplog):
    watch, strategy = federate(name, data=lambda client: forty(client, few=4))
    assert all(row["failures"] == [] for row in watch.rows)
    sent = [strategy.state.prototypes] if name == "FedProto" else list(strategy.state.own.values())
    assert all(own["classes"].tolist() == [0, 1] for own in sent)
    assert "does not send the means of classes [2], since it has fewer than 10 examples" in caplog.text
    watch, _ = federate(name, {"min-examples": 100})
    assert len(watch.rows[0]["failures"]) == 1
    watch, _ = federate(name, {"min-examples": 40}, clients=2, batch_size=40)
    assert all(row["failures"] == [] for row in watch.rows), "it sends the means of no class"


@pytest.mark.parametrize(("having", "told"), [([10, 20, 9, 0], [True, True, False, False]), ([1, 1], [False] * 2)])
def test_auc_of_few_examples(having, told):
    labels = torch.stack([torch.arange(40) < count for count in having], 1).float()
    metric = Task("multi-label").evaluate(torch.rand(40, len(having)), labels).metrics["auc"]
    assert metric.weights == tuple(float(count * (40 - count)) for count in having)
    found = Policy(None, 10).metric(metric)
    assert [weight > 0 for weight in found.weights] == told
    assert [math.isfinite(value) for value in found.values] == told, "not even the value of what weighs nothing"
    assert Policy().metric(metric).weights == metric.weights


@pytest.mark.parametrize("method", ["describe", "metric"])
def test_many_tokens_of_few_examples(method, tmp_path):
    """Two texts have all tokens of class 2, which are more than min-examples."""
    inputs = torch.randint(5, (60, 8), generator=torch.Generator().manual_seed(0))
    labels = inputs % 2
    labels[7:9] = labels[47:49] = 2

    def data():
        return (inputs[:40], labels[:40]), (inputs[40:], labels[40:])

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Embedding(5, 6), nn.Linear(6, 3))

    grid = LocalGrid(make_client_app(Net, data, task="token-classification"), 2)
    grid._contexts[FIRST_NODE + 1].node_config |= {"allow": "statistics,metrics,weights", "state-dir": str(tmp_path)}
    if method == "describe":
        settings = {"method": "local", "rounds": 0}
        (told,) = [decode_arrays(asked(grid, "query", settings, "describe", run="a").content["describe"])["classes"]]
    else:
        arrays = {"model": to_arrays(Net().state_dict())}
        reply = asked(grid, "evaluate", {"metric": "balanced-accuracy"}, arrays=arrays, run="a").content
        told = np.array(reply["metrics"]["received-weight"])
    assert told[2] <= 0, "12 tokens"
    assert (told[:2] <= 0).any(), "else the number of all tokens would tell them"


@pytest.mark.parametrize("node", [{"allow": "metrics,weights"}, {"min-examples": 10}])
@pytest.mark.parametrize("kept", [9, 10])
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("task", ["token-classification", fedhet.Task(loss=nn.CrossEntropyLoss(ignore_index=0))])
def test_examples_whose_labels_are_ignored_are_not_counted(task, part, kept, node, tmp_path):
    """A step, or a metric, of many examples is of the few that have a label."""
    classify = isinstance(task, fedhet.Task)
    inputs = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.ones_like(inputs[:, 0] if classify else inputs).long()
    begin, end = {"train": (0, 40), "test": (40, 60)}[part]
    labels[begin + kept : end] = 0 if classify else -100

    def data():
        return (inputs[:40], labels[:40]), (inputs[40:], labels[40:])

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(2 if classify else 1, 2)

        def forward(self, batch):
            return super().forward(batch if classify else batch[..., None])

    grid = LocalGrid(make_client_app(Net, data, task=task), 2)
    grid._contexts[FIRST_NODE + 1].node_config |= {"state-dir": str(tmp_path), **node}
    reply = asked(grid, "train", {}, arrays={"model": to_arrays(Net().state_dict())}, run="a", epochs=1).content
    if part == "train" and kept < 10:
        assert "the client has 9 training examples, but its node requires" in str(reply["report"]["refusal"])
        return
    assert reply["metrics"]["num-examples"] == (kept if part == "train" else 40)
    assert ("trained-metric" in reply["metrics"]) == (part == "train" or kept == 10)


@pytest.mark.parametrize(("task", "metric"), [("segmentation", "iou"), ("token-classification", "macro-f1")])
def test_a_network_that_predicts_a_rare_class_everywhere(task, metric, tmp_path):
    """The metric of the class would tell in how many places one example has it, and so would those of all others."""
    net, axes = partial(nn.Linear, 1, 3), (60, 4, 1)
    if task == "segmentation":
        net, axes = partial(nn.Conv1d, 1, 3, 1), (60, 1, 4)
    for places in (1, 2):
        labels = torch.randint(2, (60, 4), generator=torch.Generator().manual_seed(0))
        labels[50, :places] = 2

        def data(client, labels=labels):
            inputs = torch.zeros(axes)
            return (inputs[:40], labels[:40]), (inputs[40:], labels[40:])

        grid = LocalGrid(make_client_app(lambda: net(), data, task=task), 2)
        node = {"allow": "metrics,weights", "state-dir": str(tmp_path / str(places))}
        grid._contexts[FIRST_NODE + 1].node_config |= node
        arrays = {"model": {name: 0 * array for name, array in to_arrays(net().state_dict()).items()}}
        arrays["model"]["bias"][2] = 9
        metrics = asked(grid, "evaluate", {"metric": metric}, arrays=arrays, run="a").content["metrics"]
        told = [weight > 0 for weight in metrics["received-weight"]]
        assert (sum(told), told[2]) == (1, False)
        assert [math.isfinite(value) for value in metrics["received-metric"]] == told


def test_labels_that_few_examples_lack(tmp_path):
    labels = (torch.arange(40)[:, None] < torch.tensor([38, 20, 3, 40])).float()

    def data(client):
        inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        return (inputs, labels), (inputs, labels)

    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 4), data, task="multi-label"), 2)
    grid._contexts[FIRST_NODE + 1].node_config |= {"min-examples": 10, "state-dir": str(tmp_path)}
    reply = asked(grid, "query", {"method": "local", "rounds": 0}, "describe", run="a").content
    assert decode_arrays(reply["describe"])["classes"].tolist() == [-1, 20, -1, 40]
    # A network that predicts all labels for all examples would tell how many have a label.
    whole = {"model": to_arrays({"weight": torch.zeros(4, 4), "bias": torch.ones(4)})}
    reply = asked(grid, "evaluate", {"metric": "macro-f1"}, arrays=whole, run="b").content
    assert reply["metrics"]["received-weight"] == [0, 60, 0, 80]


def test_weight_of_a_loss_tells_no_rare_class():
    task = Task("classification", class_weights=[1, 9])
    labels = (torch.arange(100) < 12).long()
    assert Policy(None, 12).loss_weight(task, labels) == Policy().loss_weight(task, labels) == 88 + 9 * 12
    assert Policy(None, 13).loss_weight(task, labels) == 0
    assert Policy().loss_weight(Task("classification"), labels) == 0
    padded = torch.where(torch.arange(5) < 2, -100, labels[:, None])
    assert Policy().loss_weight(Task("token-classification"), padded) == 60


# ---- metrics


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["FedAvg", "Local"])
def test_rounded_metrics(name, federate):
    watch, strategy = federate(name)
    losses = [row.loss for row in watch.clients if row.loss is not None]
    assert losses
    assert all(loss == float(f"{loss:.4g}") for loss in losses)
    if name == "FedAvg":
        digits = [len(repr(float(value))) for value in strategy.state.model["0.weight"].flat]
        assert max(digits) > 8, "weights are not rounded"


def test_node_without_metrics(federate, caplog):
    watch, _ = federate("FedAvg", {"allow": "weights"})
    assert all(row["failures"] == [] for row in watch.rows)
    assert watch.rows[2]["participants"] == ["0", "1", "2"]
    accuracies = {row.client: row.accuracy for row in watch.clients if row.round == 2}
    assert [accuracies[name] is None for name in "012"] == [False, True, False]
    assert "client 1: its node sends no metrics (key allow of its node config), so" in caplog.text
    # Its steps depend on its classes; the sum of the others alone would be about other work than the run's.
    assert [row["work"] for row in watch.rows[1:]] == [None] * len(watch.rows[1:])


def test_the_best_round_is_unknown_without_metrics(tmp_path, caplog):
    settings = {"method": "local", "dataset": "digits", "architectures": "mlp", "clients": 2, "rounds": 2}
    settings |= {"validation": 0.2, "keep-best": True, "report": False}
    grid = LocalGrid(make_client_app(), 2, node_config={"allow": "weights", "state-dir": str(tmp_path / "state")})
    serve(configuration.resolve(settings, strict=False), grid, tmp_path / "run", engine="local")
    assert "keep-best and patience have had no effect, since no client sent a validation metric" in caplog.text


# ---- what errors say


def secretive(where):
    """Data and a model that raise with something private, for client 1."""

    class Net(nn.Sequential):
        def forward(self, inputs):
            if where == "model" and self.training:
                raise ValueError(SECRET)
            return super().forward(inputs)

    def data(client):
        if client.name == "1" and where != "model":
            raise {"data": ValueError, "told": FedhetError}[where](SECRET)
        return forty(client)

    return lambda client: Net(nn.Linear(4, 3)) if client.name == "1" else nn.Linear(4, 3), data


@pytest.mark.parametrize("where", ["told", "model"])
def test_private_errors_stay_in_the_log(where, federate, caplog, elsewhere):
    model, data = secretive(where)
    watch, _ = federate("Local", model=model, data=data)
    reasons = [failure["reason"] for row in watch.rows for failure in row["failures"] if failure["client"] == "1"]
    assert reasons
    assert all("the reason is in its node's log" in reason for reason in reasons)
    assert SECRET in caplog.text


def test_errors_of_the_settings_function_stay_in_the_log(caplog):
    def settings(client):
        raise ValueError(SECRET)

    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), forty, client_settings=settings), 2)
    told = refusal(asked(grid, "query", {}, "handshake"))
    assert told == "the client failed; the reason is in its node's log, since it could disclose data"
    assert SECRET in caplog.text


def test_no_line_of_a_reason_looks_like_the_logs(node, caplog):
    caplog.set_level("INFO")
    refusal(asked(node, "train", {"\nclient 1: train: sent nothing.x": 1}))
    (text,) = caplog.messages
    assert [line[:1] for line in text.splitlines()] == ["c", " "]


def test_long_reasons_do_not_fill_the_disk(tmp_path):
    """A server could name a method of a million characters in each message."""
    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), forty), 2)
    grid._contexts[FIRST_NODE + 1].node_config |= {"allow": "weights", "state-dir": str(tmp_path)}
    for key in ("method", "dataset", "x" * 900_000):
        assert refusal(asked(grid, "query", {key: "m" * 900_000}, "handshake"))
    assert (tmp_path / audit.FILE).stat().st_size < 10_000
    assert len(list(audit.entries(tmp_path, audit.since("today")))) == 3


def test_errors_in_simulation(federate):
    model, data = secretive("told")
    watch, _ = federate("Local", model=model, data=data)
    assert SECRET in watch.rows[0]["failures"][0]["reason"]


def test_scales_are_of_at_least_min_examples():
    """A column in which few examples have another value than 0, such as a rare drug's, would tell one of them."""

    def data(client):
        inputs = np.ones((60, 2))
        inputs[9:, 1] = 0
        table = pd.DataFrame(inputs, columns=["age", "dose"])
        return (table[:40], np.arange(40) % 3), (table[40:], np.arange(20) % 3)

    grid = LocalGrid(make_client_app(lambda: nn.Linear(2, 3), data), 2)
    for least, dose in ((9, "1"), (10, "0")):
        grid._contexts[FIRST_NODE + 1].node_config["min-examples"] = least
        report = asked(grid, "query", {"batch-size": 10}, "handshake", run=str(least)).content["report"]
        assert report["scales"].splitlines()[1:] == ["column age\ta column\t1", f"column dose\ta column\t{dose}"]


@pytest.mark.parametrize("having", [0, 9, 10])
def test_a_description_is_of_at_least_min_examples(having, tmp_path):
    """A mean over values that are not missing would be of the few examples that have some."""

    def data(client):
        (inputs, labels), test = forty(client)
        inputs[having:] = math.nan
        return (inputs, labels), test

    grid = LocalGrid(make_client_app(lambda: nn.Linear(4, 3), data), 2)
    grid._contexts[FIRST_NODE + 1].node_config |= {"allow": "statistics", "state-dir": str(tmp_path)}
    reply = asked(grid, "query", {"method": "local", "rounds": 0}, DESCRIBE)
    assert ("fewer than 10 of the client's training examples" in refusal(reply)) == (having == 9)


def test_a_description_names_classes_only():
    """By names of classes, numbers of examples are added; names of columns add nothing."""

    def data(client):
        table = pd.DataFrame(np.ones((60, 2)), columns=["age", "study of 4711"])
        labels = pd.Series(pd.Categorical(["ill", "well"] * 30))
        return (table[:40], labels[:40]), (table[40:], labels[40:])

    grid = LocalGrid(make_client_app(lambda: nn.Linear(2, 2), data), 2)
    grid._contexts[FIRST_NODE + 1].node_config["allow"] = "statistics"
    reply = asked(grid, "query", {"method": "local", "rounds": 0}, DESCRIBE)
    assert refusal(reply) == ""
    assert reply.content["report"]["names"] == "classes\till\twell"


def test_notes_stay_at_the_node(federate, elsewhere, caplog):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.made, self.last = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, inputs):
            return self.made(inputs) + 0 * self.last(inputs)

    federate("FedRep", model=lambda client: Odd())
    assert "client 1: the head was guessed" in caplog.text
    grid = LocalGrid(make_client_app(lambda: Odd(), forty), 2)
    assert read_reply(asked(grid, "query", {"method": "fedrep"}, "handshake")).report.note == ""


@pytest.mark.parametrize("classes", [2, 8])
@pytest.mark.parametrize("method", ["local", "feddf", "nearest-neighbour", "logistic-regression"])
def test_nothing_is_fitted_to_classes_of_few_examples(method, classes, caplog):
    """An estimator tells single examples; a network is not trained on them."""
    caplog.set_level("INFO")
    labels = np.arange(60) % classes

    def data(client):
        inputs = np.eye(60, dtype=np.float32)
        return (inputs[:40], labels[:40]), (inputs[40:], labels[40:])

    grid = LocalGrid(make_client_app(lambda: KNeighborsClassifier(1), data), 2)
    grid._contexts[FIRST_NODE + 1].node_config["allow"] = "posteriors,metrics"
    reason = refusal(asked(grid, "train", {"method": method}))
    assert ("no class of the client has 10 training examples" in reason) == (classes == 8), reason
    if classes == 8 and method == "local":
        grid = LocalGrid(make_client_app(lambda: nn.Linear(60, classes), data), 2)
        grid._contexts[FIRST_NODE + 1].node_config["allow"] = "weights"
        assert refusal(asked(grid, "query", {}, "handshake")) == ""
        assert "trains on 0 of 40 examples" in caplog.text


@pytest.mark.parametrize("classes", [2, 8])
def test_mixed_batches_have_whole_groups(classes):
    """Public examples, of which a server can choose many, do not single out private ones."""
    batches = []

    class Watched(nn.Linear):
        def forward(self, inputs):
            if self.training:
                batches.append(inputs[:, 0].long().tolist())
            return super().forward(inputs)

    def data(client):
        inputs = torch.arange(60.0)[:, None]
        labels = (inputs[:, 0] % classes).long()
        return (inputs[:40], labels[:40]), (inputs[40:], labels[40:])

    grid = LocalGrid(make_client_app(lambda: Watched(1, classes), data), 2)
    grid._contexts[FIRST_NODE + 1].node_config["allow"] = "metrics,public-training"
    settings = {"method": "local", "local.public": "mixed", "batch-size": 20, "learning-rate": 1e-6}
    public = PublicDataset(torch.arange(60.0, 100)[:, None], torch.arange(40) % classes)
    reply = asked(grid, "query", settings, "handshake", with_public_dataset(public).arrays)
    assert refusal(reply) == ""
    batches.clear()
    for number in (1, 2, 3):
        reply = asked(grid, "train", settings, round=number, expected=number - 2 or -1, epochs=1, public=public.digest)
        assert refusal(reply) == ""
    private = [{row for row in batch if row < 40} for batch in batches]
    assert all(len(rows) == 0 or len(rows) >= 10 for rows in private), private
    assert {row for rows in private for row in rows} == ({*range(40)} if classes == 2 else set())
    # Each public example once in an epoch; of classes without groups, no private ones.
    assert sorted(row for batch in batches for row in batch if row >= 60) == sorted([*range(60, 100)] * 3)


# ---- what a server cannot make a node do


def test_no_downloads_at_nodes(monkeypatch, tmp_path):
    def download(**_):
        raise AssertionError("was downloaded")

    monkeypatch.setattr(pytest.importorskip("torchvision.datasets"), "MNIST", download)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    reply = asked(LocalGrid(make_client_app(), 2), "query", {"method": "local", "dataset": "mnist"}, "handshake")
    assert "the reason is in its node's log" in str(reply.content["report"]["refusal"])
    with datasets.files.nothing_downloaded(tmp_path), pytest.raises(DataError, match="nodes do not download data sets"):
        datasets.load("mnist")
    assert not cache_folder().exists()


@pytest.mark.parametrize("limit", [1e12, "nan", 0, "-1"])
def test_invalid_memory_limits(limit, federate):
    watch, _ = federate("Local", {"memory-limit": limit})
    assert "must be a number of at least 1e-06 and at most 1e+09" in watch.rows[0]["failures"][0]["reason"]
