"""Requests that nobody honest sends: a client answers each in a sentence, and none ends it."""

import json
from copy import deepcopy

import numpy as np
import psutil
import pytest
import torch
from flwr.app import ConfigRecord, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.flower.messages import Encoder, decode_arrays, encode_arrays, read_reply, write_request
from fedhet.messages import Payload, Request
from fedhet.testing import PARTIAL, Case, Tampering, run
from tests.contract.privacy import Node, from_elsewhere, same_data
from tests.contract.runs import where

from ..contract.changes import changes
from ..test_contract import OF_METHOD

pytestmark = pytest.mark.usefixtures("home", "no_report")

DEEP = "[" * 100_000
METHODS = {
    "fedavg": {},
    "fedproto": {"fedproto.width": 32},
    "fedhenn": {"fedhenn.eta0": 1.0},
    "fedmd": {"optimizer": "sgd", "fedmd.public-epochs": 1, "fedmd.private-epochs": 0, "fedmd.public-batch": 32},
    "layer-average": {},
    "pfedhn": {},
}


def refusal(grid, settings="{}", request=None, arrays=None, type="query"):
    """Why a client does not serve a request by hand."""
    record = Encoder()(Payload(arrays or {}))
    write_request(record, Request(question="handshake"), settings)
    if request is not None:
        record["request"] = ConfigRecord({"settings": settings, "request": request})
    (reply,) = grid.send_and_receive([Message(record, FIRST_NODE, type, group_id="0")])
    assert not reply.has_error(), reply.error
    return str(reply.content["report"].get("refusal", ""))


@pytest.fixture
def grid(tiny):
    return LocalGrid(tiny.app(), 1)


# ---- what is no request


@pytest.mark.parametrize(
    ("settings", "request_text"),
    [
        *((text, None) for text in ("[]", "{", DEEP, '{"rounds": [1]}', "9" * 5000)),
        *(('{"method": "local"}', text) for text in ("[]", DEEP, '{"round": -1}', '{"run": "../x"}', '{"final": 1}')),
    ],
)
def test_invalid_settings_and_requests(settings, request_text, grid):
    reason = refusal(grid, settings, request_text)
    assert ("the request" if request_text else "the request's settings") in reason
    assert "reply" not in reason
    assert request_text or len(reason) < 200


@pytest.mark.parametrize(
    ("public", "reason"),
    [
        ({"labels": torch.arange(3)}, "the server's public dataset must have inputs"),
        ({"inputs": torch.tensor(1.0)}, "the server's public dataset must have inputs"),
        (
            {"inputs": torch.zeros(3, 4), "labels": torch.arange(2)},
            "must have inputs and as many labels, or only inputs",
        ),
        ({"inputs": torch.zeros(3, 5)}, "of shape [5], but this client's examples have inputs of shape [4]"),
    ],
)
def test_invalid_public_datasets(public, reason, grid):
    arrays = {"public": {name: tensor.numpy() for name, tensor in public.items()}}
    found = refusal(grid, json.dumps({"method": "fedhenn", "fedhenn.eta0": 1.0}), arrays=arrays)
    assert reason in found


# ---- requests that were changed


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Messages of an ordinary run of each method, one of each type and question that node 1 got."""
    runs = {}

    def messages(method):
        if method not in runs:
            found = {}

            def look(message, client, reply):
                if client == "1":
                    question = json.loads(message.content["request"]["request"])["question"]
                    found.setdefault((where(message)[1], question), message.content)

            folder = tmp_path_factory.mktemp("recorded") / "run"
            run(folder, Case.of(method, METHODS[method]).settings(PARTIAL, rounds=2), app=Tampering(after=look))
            runs[method] = [(type, content) for (type, _), content in found.items()]
        return runs[method]

    return messages


SMALL = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(-2, 2), st.sampled_from(["", "x", "é" * 300, "\x1b[31m"])
)


def attacked(messages, folder, examples):
    """Change one message after another, and look at what a node elsewhere answers."""
    served = {True: 0, False: 0}

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        st.integers(0, len(messages) - 1),
        changes(),
        st.dictionaries(st.integers(0, 60), SMALL, max_size=1),
        st.booleans(),
    )
    def one(number, change, fields, in_settings):
        type, sent = messages[number]
        table = json.loads(sent["request"]["settings" if in_settings else "request"])
        changed = {list(table)[pick % len(table)]: value for pick, value in fields.items()}
        both = {"settings": changed, "request": {}} if in_settings else {"settings": {}, "request": changed}
        content = from_elsewhere(deepcopy(sent), **both)  # what was recorded stays as it is
        if not fields:
            change(content)
        (reply,) = node.answers([(type, content)])
        node.context.state.clear()
        said = reply["report"].get("refusal")
        served[said is None] += 1
        if said is None:
            message = Message(reply, 1, "train")
            read_reply(message)
        else:
            assert 0 < len(str(said)) < 2000
            assert "client's reply" not in str(said)
            assert "Traceback" not in str(said)

    node = Node(same_data, None, folder)
    asked = [(type, from_elsewhere(sent, {}, {})) for type, sent in messages]
    assert all("refusal" not in reply["report"] for reply in node.answers(asked))
    one()
    return served


@pytest.mark.parametrize("method", ["fedhenn"])
def test_mutated_requests(method, recorded, tmp_path, in_a_run):
    served = attacked(recorded(method), tmp_path, 60)
    assert served[False] > 5


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_mutated_requests_at_length(method, recorded, tmp_path, in_a_run):
    served = attacked(recorded(method), tmp_path, 2000)
    assert min(served.values()) > 20


# ---- a few bytes that need much memory


def _many(array, count=2**22):
    """As many integers as a megabyte of bytes, all of which are the first one."""
    return np.full(count, array.flat[0], np.uint8)


GROWING = {
    "fedma": ("group", "rows", lambda rows: np.zeros((2**22, 0), np.float32)),
    "fedma-units": ("assignment", "units", _many),
    "fens": ("members", "architectures", lambda names: np.frombuffer(b"mlp\n" * 3000 + b"mlp", np.uint8)),
    "pfnm": ("assignments", "0", _many),
    "fedhenn": ("rad", "rows", _many),
    "feddf": ("next-rows", "rows", _many),
    "fedproto": ("prototypes", "classes", _many),
    "fedproto-means": ("prototypes", "means", lambda means: np.resize(means, (2**20, means.shape[1]))),
}
"""By method: the array of a message that a hostile server replaces, and by what."""


def exchanged(method, folder):
    """Type and content of all messages to client 1 in a run."""
    sent = []

    def look(message, client, reply):
        if client == "1":
            sent.append((where(message)[1], from_elsewhere(message.content, {}, {})))

    settings = {"local-epochs": 1, **OF_METHOD.get(method, {})}
    run(folder, Case.of(method, settings).settings(PARTIAL), app=Tampering(after=look))
    return sent


@pytest.mark.parametrize("case", GROWING)
def test_a_message_does_not_multiply_memory(case, tmp_path, in_a_run):
    """Each took a thousand times the bytes that the server sent, and could end the node."""
    method = case.partition("-")[0]
    group, name, change = GROWING[case]
    node = Node(same_data, None, tmp_path / "node")
    refusals = []
    for type, content in exchanged(method, tmp_path / "run"):
        if group in content:
            arrays = decode_arrays(content[group])
            grown = from_elsewhere(content, {}, {})
            grown[group] = encode_arrays(arrays | {name: change(arrays[name])})
            before = psutil.Process().memory_info().rss
            (reply,) = node.answers([(type, grown)])
            refusals.append(str(reply["report"]["refusal"]))
            assert psutil.Process().memory_info().rss - before < 2**28
        (reply,) = node.answers([(type, content)])
        assert "refusal" not in reply["report"], "the node goes on"
    assert refusals
    assert all(reason.startswith("the server sent") for reason in refusals)


def without(name):
    return lambda arrays: {other: array for other, array in arrays.items() if other != name}


@pytest.mark.parametrize(
    ("group", "change"),
    [
        ("members", without("architectures")),
        ("members", lambda arrays: arrays | {"architectures": np.ones((3, 2), np.float32)}),
        ("members", lambda arrays: arrays | {"architectures": np.frombuffer(b"\xff\xfe", np.uint8)}),
        ("aggregator", without("aggregator.0.weight")),
        ("aggregator", without("aggregator.2.bias")),
        ("aggregator", lambda arrays: arrays | {"aggregator.2.bias": arrays["aggregator.2.bias"][:3]}),
        ("aggregator", lambda arrays: arrays | {"aggregator.4.bias": arrays["aggregator.2.bias"]}),
    ],
)
def test_an_aggregator_that_does_not_fit_is_named(group, change, tmp_path, in_a_run):
    node = Node(same_data, None, tmp_path / "node")
    refusals = []
    for type, content in exchanged("fens", tmp_path / "run"):
        if "members" in content:
            changed = from_elsewhere(content, {}, {})
            changed[group] = encode_arrays(change(decode_arrays(content[group])))
            refusals += [str(reply["report"]["refusal"]) for reply in node.answers([(type, changed)])]
        assert "refusal" not in next(node.answers([(type, content)]))["report"]
    assert refusals
    assert all("the server sent an aggr" in refusal or "the server's aggr" in refusal for refusal in refusals)


def test_global_units_need_memory_of_other_layers(tmp_path, monkeypatch, in_a_run):
    sent = exchanged("fedma", tmp_path / "run")
    monkeypatch.setattr("fedhet.messages.protocol.memory", lambda: 8000)
    node = Node(same_data, None, tmp_path / "node")
    replies = [reply["report"].get("refusal", "") for reply in node.answers(sent)]
    assert any(str(reason).startswith("use a smaller model: the global units need") for reason in replies)


@pytest.mark.parametrize(("method", "group"), [("fedgh", "head"), ("fedma", "assignment"), ("fedma", "values")])
def test_what_a_message_lacks_is_named(method, group, tmp_path, in_a_run):
    sent = exchanged(method, tmp_path / "run")
    node = Node(same_data, None, tmp_path / "node")
    missing = []
    for type, content in sent:
        if group in content and type == "train":
            lacking = from_elsewhere(content, {}, {})
            del lacking[group]
            missing += node.answers([(type, lacking)])
        assert "refusal" not in next(node.answers([(type, content)]))["report"]
    lacks = {str(reply["report"]["refusal"]) for reply in missing}
    assert lacks
    assert all("the message lacks" in reason or "the server sent units of no group" in reason for reason in lacks)
