"""Answers of single clients that would cost all others the run: sizes, places and first weights."""

import json
import re

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, RecordDict
from torch import nn

import fedhet
from fedhet.algorithms.hypernets.design import start
from fedhet.client.app import make_client_app
from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.errors import FedhetError
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.models.copies import without_memory
from fedhet.setup import client_setup
from fedhet.testing import Case, Run, Tampering, run
from tests.small import SMALL

pytestmark = pytest.mark.usefixtures("home", "no_report")


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedavg", {}),
        ("fedproto", {"fedproto.width": 9}),
        ("fens", {}),
        ("flha-ghn", {"optimizer": "adam", "learning-rate": 0.005}),
        ("heterofl", {"heterofl.widths": "1,0.5"}),
        ("inclusivefl", SMALL["inclusivefl"]),
        ("layer-average", {}),
        ("lora", {"lora.aggregate": "stack", "lora.train-head": True}),
        ("pfedhn", {}),
    ],
)
@pytest.mark.parametrize("far", [1e4, 1e8])
def test_numbers_that_are_far_too_large_do_not_end_a_run(method, own, far, tmp_path):
    """Neither as initial weights, which the first client sends, nor as updates."""

    def after(message, name, reply):
        if name == "0" and reply.has_content():
            for key, group in reply.content.array_records.items():
                arrays = decode_arrays(group).items()
                huge = {k: np.full_like(a, far) if a.dtype.kind == "f" else a for k, a in arrays}
                reply.content[key] = encode_arrays(huge)

    done = run(tmp_path / "run", Case.of(method, own).settings(clients=4, rounds=4), app=Tampering(after=after))
    assert (done.summary["status"], done.failures) == ("completed", [])
    assert [cut["client"] for cut in done.row(3)["cut"]] == ["0"]


def test_the_scale_of_a_client_does_not_outweigh_others_changes(tmp_path):
    def after(message, name, reply):
        spec = [key[5:] for key in reply.content.get("report", {}) if key.startswith("spec.")]
        if name == "0" and spec:
            reply.content["starts"] = encode_arrays({key: np.array([0, 9], np.float32) for key in spec})

    done = run(tmp_path / "run", Case.of("pfedhn", {}).settings(clients=4, rounds=2), app=Tampering(after=after))
    assert [[cut["client"] for cut in done.row(number)["cut"]] for number in (1, 2)] == [["0"], ["0"]]


def test_a_weight_of_its_own_is_refused(tmp_path):
    def after(message, name, reply):
        if name == "1" and message.metadata.message_type == "train":
            reply.content["metrics"]["weight"] = 1e9

    done = run(tmp_path / "run", Case.of("fedavg", {}).settings(rounds=1), app=Tampering(after=after))
    (failure,) = done.row(1)["failures"]
    assert (failure["client"], failure["reason"][:38]) == ("1", "the client's reply has a weight, which")


def test_arrays_that_the_method_does_not_use_are_refused(tmp_path):
    def after(message, name, reply):
        if name == "1" and message.metadata.message_type == "train":
            reply.content["more"] = encode_arrays({"values": np.zeros(1000, np.float32)})

    done = run(tmp_path / "run", Case.of("fedavg", {}).settings(rounds=1), app=Tampering(after=after))
    (failure,) = done.row(1)["failures"]
    assert failure["client"] == "1"
    assert failure["reason"].startswith("the client sends the arrays 'more', which fedavg has no use for: check its")


def test_a_reply_without_content_is_refused_in_a_sentence(tmp_path):
    def after(message, name, reply):
        if name == "1" and message.metadata.message_type == "train":
            vars(reply)["_content"] = None

    done = run(tmp_path / "run", Case.of("fedavg", {}).settings(rounds=1), app=Tampering(after=after))
    (failure,) = done.row(1)["failures"]
    assert failure["reason"] == "the client's reply has neither content nor an error: check the client's mods"


@pytest.mark.parametrize("error", [False, True])
def test_a_reason_of_a_failure_has_one_line(error, tmp_path):
    text = "no\nINFO client 0: all is well" + "!" * 10**5

    def after(message, name, reply):
        if name == "1" and message.metadata.message_type == "train":
            vars(reply)["_error" if error else "_content"] = (
                Error(0, text) if error else RecordDict({"report": ConfigRecord({"client": "1", "refusal": text})})
            )

    done = run(tmp_path / "run", Case.of("fedavg", {}).settings(rounds=1), app=Tampering(after=after))
    (failure,) = done.row(1)["failures"]
    assert "no INFO client 0: all is well!" in failure["reason"]
    assert len(failure["reason"]) < 2100


def saying(byzantine, /, **said):
    """A client app in which one client's handshake says something else of it."""

    def change(message, name, reply):
        if name == byzantine and message.metadata.message_type == "query" and reply.has_content():
            reply.content["report"].update(said)

    return Tampering(after=change)


@pytest.mark.parametrize("classes", ["zero\tx", "zero", "zero\t1\t2", "zero\t-1", "zero\t" + "9" * 5000])
def test_damaged_numbers_by_class_are_refused_before_the_client_is_admitted(classes, tmp_path):
    run_locally(Case.of("fedavg", {}).config(rounds=1), tmp_path / "run", app=saying("1", classes=classes))
    (failure,) = Run(tmp_path / "run").rows[0]["failures"]
    assert "numbers of examples by class are damaged" in failure["reason"]
    assert Run(tmp_path / "run").row(1)["participants"] == ["0", "2"]


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "1e999"])
def test_a_scale_that_is_no_number_is_refused(size, tmp_path):
    app = saying("1", scales=f"inputs\tbytes\t{size}")
    run_locally(Case.of("fedavg", {}).config(rounds=1), tmp_path / "run", app=app)
    (failure,) = Run(tmp_path / "run").rows[0]["failures"]
    assert (failure["client"], "scales of the client's inputs are damaged" in failure["reason"]) == ("1", True)


@pytest.mark.parametrize(("entry", "value"), [("numbers", 3e9), ("numbers", np.inf), ("classes", np.nan)])
def test_descriptions_have_large_numbers_of_values(entry, value, tmp_path):
    """20,000 colour images of 224 x 224 pixels have three billion values."""

    def after(message, name, reply):
        if name == "1" and "describe" in reply.content.array_records:
            arrays = decode_arrays(reply.content["describe"])
            told = arrays[entry].astype(np.float64)
            told[4] = value
            reply.content["describe"] = encode_arrays(arrays | {entry: told})

    run_locally(Case.of("local", {}).config(rounds=0), tmp_path / "run", app=Tampering(after=after))
    row = Run(tmp_path / "run").rows[0]
    if np.isfinite(value):
        assert row["data"]["1"]["values"] == value
    else:
        assert [failure["client"] for failure in row["failures"]] == ["1"]
        assert "description of its data is damaged" in row["failures"][0]["reason"]
    assert {"0", "2"} <= row["data"].keys()


@pytest.mark.parametrize(
    ("name", "values"), [("received/<b>", [1.0]), ("received/f1", []), ("other", [1.0]), ("scratch-99", [1.0])]
)
def test_evaluations_that_nobody_asked_for_are_refused(name, values, tmp_path):
    def after(message, client, reply):
        if client == "1" and message.metadata.message_type == "train":
            said = {f"{name}-metric": values, f"{name}-weight": values, f"{name}-loss": 1.0}
            reply.content["metrics"].update(said)

    done = run(tmp_path / "run", Case.of("fedavg", {}).settings(rounds=1), app=Tampering(after=after))
    (failure,) = done.row(1)["failures"]
    assert (failure["client"], failure["reason"][:42]) == ("1", f"the client's evaluation {name!r} must have 0"[:42])


def test_one_client_without_the_common_test_set_is_refused(tmp_path):
    settings = {"preset": "fedharm/digits.toml", "clients": 3, "rounds": 1, "workers": 1}
    run_locally(configuration.resolve(settings), tmp_path / "run", app=saying("0", **{"common-test": False}))
    done = Run(tmp_path / "run")
    assert (done.failures, done.summary["status"]) == ([(0, "0")], "completed")
    assert done.summary["common"]


@pytest.mark.parametrize(("place", "refused"), [([5, 10**15], True), ([5, 99_999], False), ([1, 7], False)])
def test_false_partition(place, refused, tmp_path):
    config = Case.of("fedavg", {}).config(rounds=1)
    run_locally(config, tmp_path / "run", app=saying("1", **{"partition-id": place[0], "partitions": place[1]}))
    done = Run(tmp_path / "run")
    assert done.summary["status"] == "completed"
    assert [client for _, client in done.failures] == ["1"] * refused


@pytest.mark.parametrize(
    ("method", "array", "why"),
    [
        (
            "fedavg",
            "float32,11",
            "equal architectures, and this client's differs .*: its head.bias is float32.11., the other's is.",
        ),
        ("lg-fedavg", "float32,11", "averages the head's bias over clients, .* float32.11. and client 1's is float"),
        ("lg-fedavg", "float64,10", "averages the head's bias over clients, .* float64.10. and client 1's"),
    ],
)
def test_majority_decides_shapes(method, array, why, tmp_path):
    """One client that comes first with an array of another kind has nobody else refused."""
    config = Case.of(method, {}).config(rounds=1)
    run_locally(config, tmp_path / "run", app=saying("0", **{"spec.head.bias": array}))
    (failure,) = Run(tmp_path / "run").rows[0]["failures"]
    assert failure["client"] == "0"
    assert re.search(why, failure["reason"])


def test_a_name_belongs_to_the_node_that_had_it_first(monkeypatch):
    """Also if this node returns later than others that claim the name; the name of a node that is gone is free."""
    monkeypatch.setattr("fedhet.server.federation.Federation.simulated", False)
    grid, strategy = LocalGrid(make_client_app(), 4), fedhet.FedAvg(samples_per_client=20)
    for context in grid._contexts.values():
        context.node_config["partition-id"] %= 2

    def admitted(*nodes):
        monkeypatch.setattr(grid, "get_node_ids", lambda: [FIRST_NODE + node for node in nodes])
        strategy.admission.admit()
        return {client: node - FIRST_NODE for client, node in strategy.federation.nodes.items()}

    strategy.federation.grid = grid
    assert admitted(1, 2) == {"0": 2, "1": 1}
    assert admitted(0, 1, 2) == {"0": 2, "0 (2)": 0, "1": 1}
    assert admitted(1) == {"1": 1}
    assert admitted(0, 1, 2) == {"0": 2, "0 (2)": 0, "1": 1}
    assert admitted(3) == {"1": 3}
    assert admitted(1, 3) == {"1": 1, "1 (2)": 3}
    assert "node 103 takes part as client 1 (2), since another node has the name 1: each" in [*strategy.run.told][-1]
    strategy.federation.nodes = {"x" * 200: 4}
    with pytest.raises(FedhetError, match="two nodes have the name x{200}: give"):
        strategy.federation.name_for(5, "x" * 200)


GHN = {"optimizer": "adam", "learning-rate": 0.005}


def refusal(method, own, folder, *, client="1", rounds=1, **said):
    """Why that client is refused, which alone is, in a run that completes with all others."""
    config = Case.of(method, own).config(rounds=rounds)
    run_locally(config, folder / "run", app=saying(client, **said))
    done = Run(folder / "run")
    assert done.summary["status"] == "completed"
    assert [number for number, _ in done.failures] == [0]
    assert done.row(1)["participants"] == [name for name in ("0", "1", "2") if name != client]
    return done.rows[0]["failures"][0]["reason"]


@pytest.mark.parametrize(("key", "shape"), [("heads.x.weight.base", "float32,3,3"), ("zz", "float32,60000,60")])
def test_unknown_hypernetwork_arrays_are_refused(key, shape, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "fedhet.strategies.flha_ghn.start", lambda *told, **how: drawn.append(told[0]) or start(*told, **how)
    )
    why = "the client's digest of the hypernetwork's arrays is "
    assert why in refusal("flha-ghn", GHN, tmp_path, **{f"spec.{key}": shape})
    assert key not in drawn


@pytest.mark.parametrize(
    ("method", "own", "name"),
    [
        ("fedproto", {"fedproto.width": 9}, "width"),
        ("fd", {}, "width"),
        ("fedgh", {"fedgh.width": 9}, "outputs"),
        ("fedmd", {"fedmd.public-epochs": 0}, "outputs"),
        ("lora", {}, "backbone"),
    ],
)
def test_majority_decides_common_values(method, own, name, tmp_path):

    def after(message, who, reply):
        if who == "0" and message.metadata.message_type == "query" and reply.has_content():
            if name == "outputs":
                reply.content["report"][name] = 3
            elif name == "backbone":
                reply.content["values"][name] = "body.1"
            else:
                reply.content["values"] = ConfigRecord({**reply.content.get("values", {}), name: 3})

    run_locally(Case.of(method, own).config(rounds=1), tmp_path / "run", app=Tampering(after=after))
    done = Run(tmp_path / "run")
    assert done.failures == [(0, "0")]
    (failure,) = done.rows[0]["failures"]
    assert re.fullmatch(r"the client's .* is .*, and the other clients have .*: .*", failure["reason"])


def test_large_networks_must_be_sent(tmp_path, monkeypatch):
    """Clients that have such networks send them once; one that only says so is refused."""
    monkeypatch.setattr("fedhet.server.handshake.UNSEEN", 0)
    assert "the client's network: " in refusal("pfedhn", {}, tmp_path, **{"spec.body.1.weight": "float32,30,300"})


def test_memory_is_checked_before_networks_are_made(tmp_path, monkeypatch):
    """Of a hypernetwork it holds several copies of what it writes for a client."""
    monkeypatch.setattr("fedhet.messages.protocol.memory", lambda: 4 * 10**9)
    why = refusal("pfedhn", {}, tmp_path, **{"spec.body.1.weight": "float32,10000,10000"})
    assert why.startswith(
        "use a smaller model: the server needs memory for the client's network: 3.2 GB; a client may take 1 GB"
    )


@pytest.mark.parametrize("method", ["fml", "fedmrl", "fedkd", "pfedhn", "ensemble"])
def test_refusals_that_leave_one_client_end_the_run(method, tmp_path):
    own = {"test-on": "both"} if method == "ensemble" else {}
    config = Case.of(method, own).config(rounds=1, clients=2)
    with pytest.raises(FedhetError, match=r"only client 0 was admitted, and [a-z]+ needs at least two"):
        run_locally(config, tmp_path / "run", app=saying("1", metric="auc"))


LABELLED = [("fedharm", {"fedharm.align": "spectral"}), ("fedmd", {}), ("local", {"local.public": "mixed"})]


@pytest.mark.parametrize(("method", "own"), LABELLED)
def test_too_few_outputs_for_public_labels_are_refused(method, own, tmp_path):
    def model(client):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3 if client.name == "1" else 10))

    def data(client):
        parts = client_setup.data_of(client)
        most = 3 if client.name == "1" else 10
        return [
            (part.inputs[part.labels < most], part.labels[part.labels < most]) for part in (parts.train, parts.test)
        ]

    config = Case.of(method, own).config(rounds=2).replace(origins={})  # the data are the configured ones
    run_locally(config, tmp_path / "run", app=make_client_app(model, data))
    done = Run(tmp_path / "run")
    assert done.failures == [(0, "1")]
    reason = done.rows[0]["failures"][0]["reason"]
    assert "the client cannot learn from the public dataset: its labels go from 0 to 9" in reason


def test_claimed_architectures_are_checked_without_memory(tmp_path, monkeypatch):
    """A client names an architecture of gigabytes: the server finds out that it has another without its weights."""
    built = []

    def build(name, input_shape, classes):
        made = models_build(name, input_shape, classes)
        built.append((name, {tensor.device.type for tensor in made.state_dict().values()}))
        return made

    models_build = client_setup.models.build
    config = Case.of("ensemble", {"test-on": "both"}).config(rounds=1)
    with monkeypatch.context() as patched:
        patched.setattr("fedhet.setup.client_setup.models.build", build)
        run_locally(config, tmp_path / "run", app=saying("1", architecture="mlp-100"))
    done = Run(tmp_path / "run")
    assert [client for _, client in done.failures] == ["1"]
    assert [where for name, where in built if name == "mlp-100"] == [{"meta"}]


@pytest.mark.parametrize("name", ["torchvision/resnet18", "torchvision/regnet_y_128gf"])
def test_networks_of_libraries_are_checked_without_memory(name):
    """Also one that computes the sizes of its layers from tensors; it would have 2.6 GB."""
    network = without_memory(lambda: client_setup.models.build(name, (3, 32, 32), 10))
    assert {tensor.device.type for tensor in network.parameters()} == {"meta"}


def test_names_of_one_client_leave_room_for_the_classes_of_others(tmp_path):
    """Else classes in another order would be averaged."""
    long = "\n".join("\t".join([f"columns.{part}", *["x" * 999] * 260]) for part in range(4))
    classes = {str(client): "\t".join(["classes", *"abcdefghij"[client:], *"abcdefghij"[:client]]) for client in (1, 2)}

    def change(message, name, reply):
        if message.metadata.message_type == "query" and reply.has_content():
            reply.content["report"]["names"] = {"0": long.ljust(2**20 - 1, "x")}.get(
                name, classes.get(name, classes["1"])
            )

    config = Case.of("fedavg", {}).config(rounds=1, clients=4)
    run_locally(config, tmp_path / "run", app=Tampering(after=change))
    done = Run(tmp_path / "run")
    assert [client for _, client in done.failures] == ["0", "2"]
    assert done.summary["names"] == {"classes": [*"bcdefghija"]}


def test_robust_choice_of_first_weights(around):

    def after(where, reply):
        if where[1:] == ("first", "0"):
            group = decode_arrays(reply.content["model"])
            reply.content["model"] = encode_arrays({k: a + np.float32(0.1) for k, a in group.items()})

    def first(rule, byzantine):
        strategy = fedhet.FedAvg(rounds=1, aggregation=rule)
        strategy.handshake(LocalGrid(around(after=after if byzantine else None), 4))
        return strategy.state.model

    honest = first("mean", byzantine=False)
    for rule in ("mean", "median", "krum", "norm-clipped"):
        found = first(rule, byzantine=True)
        assert json.dumps({k: a.tolist() for k, a in found.items()}) == json.dumps(
            {k: a.tolist() for k, a in honest.items()}
        )
