"""The policy of a node for a user's own Flower app (`fedhet.guard`)."""

import hashlib
import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedhet
from fedhet.client import audit
from fedhet.errors import ConfigError
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.flower.messages import write_request
from fedhet.messages import Request

pytestmark = pytest.mark.usefixtures("home", "no_report")


def records(examples=40):
    metrics = MetricRecord({"loss": 0.123456, "each": [0.55554, 1.0], "num-examples": examples})
    return {"arrays": ArrayRecord({"w": Array(torch.ones(3).numpy())}), "metrics": metrics}


def answering(content):
    """An app that answers every message with the records that `content` returns."""
    app = ClientApp()

    def answer(message, context):
        return Message(RecordDict(content()), reply_to=message)

    for category in (app.train, app.evaluate, app.query):
        category()(answer)
    return app


def asked(app, type="train", content=None, **node):
    """The reply of a node to a message."""
    grid = LocalGrid(app, 1)
    grid._contexts[FIRST_NODE].node_config.update({key.replace("_", "-"): value for key, value in node.items()})
    (reply,) = grid.send_and_receive([Message(content or RecordDict(), FIRST_NODE, type, group_id="1")])
    return reply


def reason(reply):
    return reply.error.reason if reply.has_error() else ""


def test_without_a_policy_messages_pass():
    app = fedhet.guard(answering(lambda: records(examples=1)))
    assert dict(asked(app).content) == records(examples=1)


@pytest.mark.parametrize("type", ["train", "evaluate", "query"])
def test_allowed_kinds_pass(type, caplog):
    caplog.set_level("INFO")
    reply = asked(fedhet.guard(answering(records)), type, allow="weights,metrics")
    assert reply.content["arrays"] == records()["arrays"]
    assert dict(reply.content["metrics"]) == {"num-examples": 40, "loss": 0.1235, "each": [0.5555, 1.0]}
    (line,) = [line for line in caplog.messages if line.startswith("client 0: ")]
    assert line.startswith(f"client 0: {type}: sent weights (")
    assert "of 40 examples [" in line
    assert line.endswith("app installed]")


def test_metrics_are_left_out_unless_they_are_allowed():
    reply = asked(fedhet.guard(answering(records)), allow="weights")
    assert dict(reply.content["metrics"]) == {"num-examples": 40}


def test_other_kinds_are_refused():
    content = {**records(), "notes": ConfigRecord({"text": "patient 4711"})}
    app = fedhet.guard(answering(lambda: content))
    told = "this node allows only metrics (allow in its node config), but the app needs weights: leave out arrays, or "
    assert reason(asked(app, allow="metrics")) == told + "let the node's owner allow its kind"
    assert "but the app needs an undeclared kind (notes): leave out notes, or" in reason(asked(app, allow="weights"))
    declared = fedhet.guard(answering(lambda: content), {"arrays": "prototypes", "notes": "statistics"})
    assert "needs prototypes" in reason(asked(declared, allow="weights,statistics"))
    assert asked(declared, allow="prototypes,statistics").content["notes"] == content["notes"]
    assert "this node allows nothing to be sent" in reason(asked(app, allow=""))


@pytest.mark.parametrize("examples", [9, 0, float("nan")])
def test_few_examples(examples):
    told = reason(asked(fedhet.guard(answering(lambda: records(examples))), allow="weights"))
    assert told == (
        f"the app's reply is of {examples} examples, but its node requires at least 10 (min-examples): return the "
        "metric num-examples, and add examples if they are fewer"
    )
    assert reason(asked(fedhet.guard(answering(lambda: records(10))), allow="weights")) == ""
    assert "is of 0 examples" in reason(asked(fedhet.guard(answering(dict)), min_examples=1))
    further = {"further": MetricRecord({"num-examples": examples})}
    assert "requires at least 10" in reason(
        asked(fedhet.guard(answering(lambda: records() | further)), allow="weights")
    )


def test_size_and_rate(tmp_path):
    app = fedhet.guard(answering(records))
    node = {"allow": "weights,metrics", "state_dir": str(tmp_path)}
    refusal = reason(asked(app, max_bytes=100, **node))
    assert re.match(
        r"the reply has \d+ bytes, but its node sends at most 100 \(max-bytes in its node config\): ", refusal
    )
    assert [reason(asked(app, max_per_hour=2, **node)) for _ in range(2)] == ["", ""]
    refusal = reason(asked(app, max_per_hour=2, **node))
    assert refusal.startswith("this node answers at most 2 messages in an hour (max-per-hour in its node config): ")
    heading, total = audit.summary(tmp_path, audit.since("today"))
    assert heading.startswith("client 0, run of another app (Flower's ")
    assert "4 messages, of which 2 were refused; sent weights (" in total


def test_failures_count(tmp_path):
    def fails():
        raise ValueError("patient 4711")

    app = fedhet.guard(answering(fails))
    reasons = [reason(asked(app, allow="weights", max_per_hour=1, state_dir=str(tmp_path))) for _ in range(2)]
    assert reasons[0] == audit.FAILED
    assert reasons[1].startswith("this node answers at most 1 messages in an hour")


@pytest.mark.parametrize("fails", [False, True])
def test_rate_of_messages_that_are_answered_at_the_same_time(fails, tmp_path):
    together = threading.Barrier(3)

    def answered_last():
        together.wait()
        if fails:
            raise ValueError("patient 4711")
        return records()

    app = fedhet.guard(answering(answered_last))
    with ThreadPoolExecutor(3) as pool:
        replies = [pool.submit(asked, app, allow="weights", max_per_hour=2, state_dir=str(tmp_path)) for _ in range(3)]
    told = sorted(reason(reply.result())[:36] for reply in replies)
    assert told == [audit.FAILED[:36] * fails] * 2 + ["this node answers at most 2 messages"]


def test_private_errors_stay_in_the_log(caplog):
    def fail():
        raise ValueError("patient 4711")

    told = reason(asked(fedhet.guard(answering(fail)), allow="weights"))
    assert told == "the client failed; the reason is in its node's log, since it could disclose data"
    assert "patient 4711" in caplog.text


def test_private_training_is_not_the_apps():
    told = reason(asked(fedhet.guard(answering(records)), dp_noise=1.0, dp_clip=1.0))
    assert told == "this node trains with dp-noise: create the app with fedhet.make_client_app"


def test_listed_apps(tmp_path, monkeypatch, caplog):
    bundle = tmp_path / "apps" / "me.hospital.1.0.0.12345678"
    (bundle / "__pycache__").mkdir(parents=True)
    (bundle / "client.py").write_text("x = 1")
    (bundle / "__pycache__" / "client.pyc").write_text("written by Python")
    listed = hashlib.sha256(f"client.py:{hashlib.sha256(b'x = 1').hexdigest()}".encode()).hexdigest()
    monkeypatch.syspath_prepend(bundle)
    caplog.set_level("INFO")
    own = fedhet.make_client_app(lambda: nn.Linear(4, 3), lambda: None)
    request = RecordDict()
    write_request(request, Request(), json.dumps({"method": "fedavg"}))
    refusals = [
        reason(asked(fedhet.guard(answering(records)), allow_apps="1234")),
        str(asked(own, content=request, allow_apps="1234").content["report"]["refusal"]),
    ]
    for refusal in refusals:
        assert refusal == (
            f"this node runs only the apps that its owner has listed (allow-apps), and not {listed}: let the owner "
            "read the app's files, and add this hash"
        )
    assert reason(asked(fedhet.guard(answering(records)), allow_apps=f"1234,{listed}")) == ""
    assert f"app {listed}]" in caplog.text
    (bundle / "client.py").write_text("x = 2")
    assert "runs only the apps" in reason(asked(fedhet.guard(answering(records)), allow_apps=listed))


def test_an_error_that_quotes_the_server_forges_no_line_of_the_log(caplog):
    app = ClientApp()

    @app.train()
    def train(message, context):
        raise ValueError(f"no task {message.content['config']['task']}")

    content = RecordDict({"config": ConfigRecord({"task": "a\n\x1b[92mINFO \x1b[0m: client 0: train: sent nothing"})})
    assert "in its node's log" in reason(asked(fedhet.guard(app), content=content, allow="weights"))
    lines = logging.Formatter().format(next(record for record in caplog.records if record.exc_info)).splitlines()
    assert [line for line in lines if "sent nothing" in line] == [
        "    \\x1b[92mINFO \\x1b[0m: client 0: train: sent nothing (test_guard.py, line "
        f"{train.__code__.co_firstlineno + 2})"
    ]
    assert all(line.startswith("    ") for line in lines[1:])
    caplog.clear()
    assert "in its node's log" in reason(
        asked(fedhet.guard(app), content=RecordDict({"config": ConfigRecord({"task": "a" * 10**6})}), allow="weights")
    )
    assert sum(len(logging.Formatter().format(record)) for record in caplog.records) < 10**5


def test_under_strategies_of_flower_and_fedhet():
    app = ClientApp()

    @app.train()
    @app.evaluate()
    def answer(message, context):
        arrays = ArrayRecord({name: Array(array.numpy()) for name, array in message.content["arrays"].items()})
        metrics = MetricRecord({"eval_acc": 0.5, "eval_loss": 1.0, "num-examples": 40})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def started(app, strategy):
        grid = LocalGrid(app, 2)
        for context in grid._contexts.values():
            context.node_config["allow"] = "weights,metrics"
        return strategy.start(grid, ArrayRecord(nn.Linear(4, 3).state_dict()), num_rounds=1)

    for own in (app, fedhet.guard(app)):
        both = fedhet.wrap(own, lambda: nn.Linear(4, 3))
        for strategy in (FedAvg(), fedhet.FedAvg(rounds=1)):
            assert started(both, strategy).arrays
    assert started(fedhet.guard(app), FedAvg()).arrays
    both = fedhet.wrap(answering(records), lambda: nn.Linear(4, 3))
    assert "but the app needs weights" in reason(asked(both, allow="metrics"))
    assert "the reason is in its node's log" in reason(asked(both, alow="metrics"))


def test_the_advice_about_fedhets_strategies():
    request = RecordDict()
    write_request(request, Request(), json.dumps({"method": "fedavg"}))
    told = reason(asked(fedhet.guard(answering(records)), content=request, allow="weights"))
    assert told == "fedhet's strategies need fedhet.wrap(app, model)"


def test_mistakes_of_users():
    with pytest.raises(ConfigError, match=r"app must be a flwr.clientapp.ClientApp, not str"):
        fedhet.guard("app")
    with pytest.raises(ConfigError, match="kind of a record"):
        fedhet.guard(ClientApp(), {"arrays": "metrics"})
