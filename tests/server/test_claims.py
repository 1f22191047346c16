"""Numbers of examples that clients claim: limits, refusals, and warnings."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.errors import FedhetError
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.messages import Payload, Reply, Report
from fedhet.messages.protocol import Measured
from fedhet.server.claims import limit_claims, name_largest
from fedhet.server.run import Round, Run
from fedhet.testing import Case, Tampering, run
from fedhet.utils.statistics import Metric

pytestmark = pytest.mark.usefixtures("home")
HUGE = 10**15
CLIENTS = 4
EXAMPLES = 32


def claiming(number, key="num-examples", client="2"):
    """A client app in which one client claims so many examples, in all of its replies."""

    def change(message, name, reply):
        if name != client or not reply.has_content() or "metrics" not in reply.content:
            return
        reply.content["metrics"][key] = number
        if key == "num-examples" and "classes" in reply.content:
            counts = decode_arrays(reply.content["classes"])["counts"].copy()
            counts[counts.argmax()] += number - counts.sum()
            reply.content["classes"] = encode_arrays({"counts": counts})
        if key == "num-examples" and "prototypes" in reply.content:
            arrays = decode_arrays(reply.content["prototypes"])
            counts = arrays["counts"].copy()
            counts[counts.argmax()] += number - counts.sum()
            reply.content["prototypes"] = encode_arrays(arrays | {"counts": counts})

    return Tampering(after=change)


def done(folder, app, method="fedavg", own=None, **keys):
    settings = {"clients": CLIENTS, "rounds": 1, "samples-per-client": EXAMPLES, "momentum": 0.0}
    return run(folder, Case.of(method, own or {}).settings(settings, **keys), app=app)


@pytest.mark.parametrize("limit", [{"clip_norm": 1e6}, {"aggregation": "median"}, {}])
def test_a_claim_is_limited_to_ten_times_the_median_claim(limit, tmp_path, no_report):
    """Weights of updates, of the training loss, and of metrics; without a limit, the client is named."""
    runs = [done(tmp_path / str(number), claiming(number), **limit) for number in (EXAMPLES * 10, HUGE)]
    equal = [each.models["global.safetensors"] for each in runs]
    losses = [each.row(1)["train_loss"] for each in runs]
    assert (equal[0] == equal[1]) == (losses[0] == losses[1]) == bool(limit)
    warnings = [line for each in runs for line in each.summary.get("warnings", ())]
    named = "claims of 1000000000000000 (client 2) training examples have more than half of all weight of a round"
    assert any(line.startswith(named) for line in warnings) == (not limit)


def test_several_clients_that_outweigh_the_others_are_named(caplog):
    run = SimpleNamespace(warn_once=logging.getLogger("fedhet").warning)
    name_largest(run, {"0": 20.0, "1": 9e14, "2": 20.0, "3": 1e15}, "test examples")
    name_largest(run, {"0": 20.0, "1": 30.0, "2": 40.0, "3": 60.0}, "training examples")
    (line,) = caplog.messages
    assert line.startswith("claims of 900000000000000 (client 1) and 1000000000000000 (client 3) test examples")
    assert line.endswith("of a round: if they cannot be true, set max-examples to refuse them")


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedproto", {"fedproto.width": 8}),
        ("fedgen", {"fedgen.server-steps": 2}),
        ("pfnm", {}),
        ("heterofl", {"heterofl.widths": "1,0.5"}),
        ("inclusivefl", {"inclusivefl.depths": "2,1", "inclusivefl.blocks": "body.5", "architectures": "cnn-3-2"}),
        ("lora", {"lora.train-head": True}),
        ("fedkd", {}),
    ],
)
def test_every_method_limits_claims(method, own, tmp_path, no_report):
    """A limited claim is the same for any claim above the limit, also in counts of examples by class."""

    def arrays(number):
        made = done(tmp_path / f"{number:g}", claiming(number), method, own, clip_norm=1e6)
        assert made.failures == []
        (content,) = made.checkpoint.values()
        return {name: np.frombuffer(value[2], value[0]) for name, value in content.items() if isinstance(value, tuple)}

    one, other = arrays(10**9), arrays(10**12)
    for name in one:
        if one[name].dtype.kind == "f":
            np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_claims_beyond_max_examples_are_refused(tmp_path, no_report):
    for key, kind in (("num-examples", "training"), ("test-examples", "test")):
        made = done(tmp_path / kind, claiming(HUGE, key), max_examples=1000)
        (failure,) = made.rows[0]["failures"]
        assert failure == {
            "client": "2",
            "reason": f"the client claims 1000000000000000 {kind} examples, and max-examples is 1000: raise it if the "
            "client has so many",
        }
    assert done(tmp_path / "more", claiming(HUGE), max_examples=HUGE).failures == []


@pytest.mark.parametrize("clients", [1, 2])
def test_one_of_two_clients_is_not_named(clients, tmp_path, no_report):
    app = claiming(HUGE, client="0")
    made = run(tmp_path / "run", Case.of("fedavg", {}).settings(clients=clients, rounds=1), app=app)
    assert "warnings" not in made.summary


def test_a_report_names_the_client(tmp_path):
    settings = Case.of("fedavg", {}).settings(rounds=1, report=True)
    run_locally(configuration.resolve(settings), tmp_path / "run", app=claiming(HUGE))
    assert "claims of 1000000000000000 (client 2) training examples" in (tmp_path / "run" / "report.html").read_text()


def replies(weights, examples, values=None):
    """Replies of clients with these weights of the metric and numbers of test examples."""
    made = {}
    for place, (weight, count) in enumerate(zip(weights, examples, strict=True)):
        metric = Metric((values[place] if values else 0.5,), (float(weight),))
        reply = Reply(
            10, Payload(), Report(str(place)), test_examples=count, measured={"received": Measured(metric, 1.0)}
        )
        made[str(place)] = reply
    return made


@pytest.mark.parametrize(
    ("metric", "weights", "examples", "expected"),
    [
        ("accuracy", [20, 30, 1e15], [20, 30, 25], [20, 30, 25]),
        ("accuracy", [0, 30, 25], [20, 30, 25], [0, 30, 25]),
        ("auc", [80, 220, 1e15], [20, 30, 20], [80, 220, 100]),
        ("iou", [1280, 1900, 1e15], [20, 30, 20], [1280, 1900, 20 * 10 * 64]),
    ],
)
def test_a_metric_has_the_weight_of_the_test_examples(metric, weights, examples, expected):
    settings = configuration.resolve({"method": "fedavg"})
    task = {"accuracy": "classification", "auc": "multi-label", "iou": "segmentation"}[metric]
    run = Run(method=None, config=settings, state=None, task=task, metric=metric, round=Round(1))
    answers = replies(weights, examples)
    limit_claims(run, answers)
    found = [reply.measured["received"].metric.weights[0] for reply in answers.values()]
    assert found == pytest.approx(expected, rel=0.02)
    assert found[:2] == weights[:2]


def test_a_false_weight_of_a_metric_does_not_make_the_runs_accuracy(tmp_path, no_report):
    def change(message, name, reply):
        if name == "2" and reply.has_content() and "received-weight" in reply.content.get("metrics", {}):
            reply.content["metrics"]["received-weight"] = [1e15]
            reply.content["metrics"]["received-metric"] = [1.0]

    accuracy = done(tmp_path / "run", Tampering(after=change)).summary["personal_accuracy"]
    assert accuracy["weighted"] == pytest.approx(accuracy["mean"], abs=0.05)
    assert accuracy["max"] == 1.0
    assert json.dumps(accuracy["weighted"]) != "1.0"


def test_the_key_is_checked():
    with pytest.raises(FedhetError, match="max-examples"):
        configuration.resolve({"method": "fedavg", "max-examples": -1})


def test_weights_of_losses_are_limited(tmp_path, no_report):
    """A loss's weight, by class weights or ignored labels, is a claim like a number of examples."""
    for key, place in (("train-weight", "train_loss"), ("received-loss-weight", "received")):
        runs = [done(tmp_path / f"{key}{number}", claiming(number, key), clip_norm=1e6) for number in (1e7, 1e8)]
        assert runs[0].row(1)[place] == runs[1].row(1)[place]
