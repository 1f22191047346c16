"""The content of requests and replies comes back as it was sent."""

import math
from itertools import count

import numpy as np
import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict

from fedhet.errors import FedhetError
from fedhet.flower.insides import identify
from fedhet.flower.messages import name_in, read_reply, read_request, write_refusal, write_reply, write_request
from fedhet.messages import LostState, Payload, Reply, Report, Request, WireError
from fedhet.messages.payload import Fields
from fedhet.messages.protocol import Measured
from fedhet.utils.files import plain_name, write_text
from fedhet.utils.statistics import Metric, Work

pytestmark = pytest.mark.usefixtures("in_a_run")


def message(record):
    return Message(record, dst_node_id=1, message_type="train")


def test_a_request_comes_back_with_the_settings():
    record, request = RecordDict(), Request(round=3, expected=2, epochs=4, evaluate=True, question="first", run="ab")
    write_request(record, request, '{"method": "fedavg"}')
    assert read_request(record) == (request, '{"method": "fedavg"}')


@pytest.mark.parametrize(
    "report",
    [
        Report("3"),
        Report("north", lost_state=0),
        Report(
            "3",
            metric="auc",
            architecture="mlp",
            partition_id=3,
            partitions=10,
            own_data=True,
            spec={"a.b": ((2, 3), "float32"), "n": ((), "int64")},
            public="0f",
            public_size=64,
        ),
    ],
)
def test_a_report_comes_back(report):
    assert Report.of(report.fields()) == report


def test_a_reply_comes_back_with_metrics_by_label():
    measured = {
        "received": Measured(Metric((0.5,), (12.0,)), 0.25, 30.5),
        "common-trained": Measured(Metric((0.5, 0.75), (3.0, 4.0)), 0.5),
    }
    payload = Payload({"model": {"w": np.ones(2)}}, {"eta": 0.1})
    reply = Reply(14, payload, Report("3"), test_examples=6, train_loss=0.75, measured=measured)
    record = write_reply(reply)
    assert record["metrics"]["common-trained-metric"] == [0.5, 0.75]
    assert record["metrics"]["common-trained-weight"] == [3.0, 4.0]
    back = read_reply(message(record))
    assert (back.client, back.examples, back.test_examples, back.train_loss) == ("3", 14, 6, 0.75)
    assert back.measured == measured
    assert back.payload.values == payload.values
    assert np.array_equal(back.arrays["model"]["w"], payload.arrays["model"]["w"])
    assert back.report == reply.report


def test_a_label_that_weighs_nothing_travels():
    reply = Reply(14, Payload(), Report("3"), measured={"received": Measured(Metric((math.nan,), (0.0,)), 0.5)})
    metric = read_reply(message(write_reply(reply))).measured["received"].metric
    assert math.isnan(metric.value)
    assert metric.weights == (0.0,)


@pytest.mark.parametrize(
    "change",
    [
        {"received-weight": [1.0, 2.0]},
        {"received-weight": 1.0},
        {"received-metric": 0.5},
        {"received-metric": [-1e200]},  # the spread of r2 over clients is of squares
    ],
)
def test_a_metric_without_its_weights_or_of_huge_values_is_damaged(change):
    measured = {"received": Measured(Metric((0.5,), (1.0,)), 0.5)}
    record = write_reply(Reply(14, Payload(), Report("3"), measured=measured))
    record["metrics"] = MetricRecord({**record["metrics"], **change})
    with pytest.raises(WireError, match="client's reply is damaged: received-metric is"):
        read_reply(message(record))


def test_a_refusal_is_an_error_with_its_reason():
    refused = message(write_refusal("3", "the disk is full"))
    with pytest.raises(FedhetError, match="the disk is full") as caught:
        read_reply(refused)
    assert not isinstance(caught.value, LostState)
    assert name_in(refused) == "3"
    with pytest.raises(LostState, match="no public dataset"):
        read_reply(message(write_refusal("3", "no public dataset", lost=True)))


def test_errors_without_name_or_reason():
    asked = message(RecordDict())
    identify(asked, count(1))
    for error, told in ((Error(2, "out of order"), "failed: out of order"), (Error(2), "failed: error code 2")):
        failed = Message(error, reply_to=asked)
        assert name_in(failed) == ""
        with pytest.raises(FedhetError, match=told):
            read_reply(failed)


@pytest.mark.parametrize(
    "change", [{"steps": -1}, {"forwards": 1.5}, {"private-steps": [1]}, {"validation-examples": -2}]
)
def test_counts_that_are_none_are_damaged(change):
    record = write_reply(Reply(14, Payload(), Report("3"), validation_examples=3, work=Work(4, 5, 60)))
    back = read_reply(message(record))
    assert (back.validation_examples, back.work) == (3, Work(4, 5, 60))
    record["metrics"] = MetricRecord({**record["metrics"], **change})
    with pytest.raises(WireError, match=f"reply: {next(iter(change))} is"):
        read_reply(message(record))


@pytest.mark.parametrize("name", ["north", "Müller-Klinik", "é" * 100, "x" * 200, "a.b"])
def test_names_that_a_file_can_have_come_through(name, tmp_path):
    assert Report.of({"client": name}).client == name
    write_text(tmp_path / f"{name}.safetensors", "")  # by way of a temporary file, whose name is longer


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", ".hidden", "a/b", "a\\b", "a ", "a\nb", "\x1b[2J", "\ud800", "x" * 201, "é" * 101),
        *("Public", "global", "account.json", "audit.jsonl"),
    ],
    ids=range(15),
)
def test_names_that_a_file_cannot_have_are_refused(name):
    """In bytes, as file systems count; neither hidden, nor a folder that a state folder has already."""
    assert not plain_name(name)
    with pytest.raises(WireError, match="must be a name that a file can have|must be text of at most 200"):
        Report.of({"client": name})


@pytest.mark.parametrize("field", ["metric", "architecture", "device", "note"])
def test_what_a_client_says_in_words_is_printable(field):
    for text in ("\x1b[2J", "\u202ekrow", "a\nb", "\x00"):
        with pytest.raises(WireError, match=f"{field} is .*, but must be printable text of one line"):
            Report.of({"client": "0", field: text})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("w", "float32,1000000000,0"),
        ("w", "float32,"),
        ("w", "float32" + ",1" * 33),
        ("w", "object,3"),
        ("", "float32,3"),
        ("x" * 2001, "float32,3"),
    ],
)
def test_invalid_specifications_are_refused(key, value):
    with pytest.raises(WireError, match="must be an array's dtype and shape, such as float32,2,3, under a printable"):
        Report.of({"client": "0", f"spec.{key}": value})
    assert Report.of({"client": "0", "spec.count": "int64", "spec.w": "float32,1"}).spec == {
        "count": ((), "int64"),
        "w": ((1,), "float32"),
    }


def test_too_many_arrays_are_refused():
    with pytest.raises(WireError, match="but the limit is 32768"):
        Report.of({"client": "0"} | {f"spec.{number}": "float32" for number in range(2**15 + 1)})


def test_long_values_are_refused_briefly():
    fields = Fields({"slots": [0] * 10**6, "words": "x" * 10**6, "text": ["\x1b"]})
    for key in ("slots", "words", "text"):
        with pytest.raises(WireError, match=f"{key} is ") as caught:
            fields.count(key)
        assert len(str(caught.value)) < 300
