"""A client's files: states, and models that are loaded again, start another run, and are saved on the way."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedhet
from fedhet.client import ClientStore
from fedhet.client.state import LEAST_FILES, LEAST_FREE
from fedhet.client_apps.fedproto import ByPrototype
from fedhet.config import configuration
from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.methods import registry
from fedhet.models.representation import Representation
from fedhet.results.history import final_clients, read_clients
from fedhet.utils.files import PACKED, read_tensors, write_arrays

pytestmark = pytest.mark.usefixtures("home", "no_report")

SETTINGS = {"clients": 3, "rounds": 2, "local-epochs": 1, "workers": 1, "learning-rate": 0.05}


def _normalised(client=None):
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def _deeper():
    return nn.Sequential(*_normalised()[:3], nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _wider():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def _run(tiny, out, method, model=_normalised, **settings):
    chosen = {"method": method, **SETTINGS, **settings}
    return fedhet.run(chosen, model=model, data=tiny.data, out=out, progress=False)


def _accuracies(tiny, run, model):
    """The accuracy of each loaded network on the client's test part, by client."""
    found = {}
    for number in range(SETTINGS["clients"]):
        network = fedhet.load_model(run, number, model=model, data=tiny.data)
        assert not network.training
        inputs, labels = tiny.data(type("Client", (), {"partition_id": number}))[1]
        with torch.no_grad():
            found[str(number)] = (network(inputs).argmax(1) == labels).float().mean().item()
    return found


@pytest.mark.parametrize(
    ("method", "settings", "batch_norm"),
    [
        *(
            (method, settings, batch_norm)
            for method, settings in (
                ("fedavg", {}),
                ("fedma", {"rounds": 0}),
                ("pfnm", {}),
                ("flha-ghn", {}),
                ("fedhenn", {"fedhenn.setting": "homogeneous", "fedhenn.eta0": 0.0}),
                ("heterofl", {"heterofl.widths": "1,0.5"}),
            )
            for batch_norm in ("aggregate", "local", "re-estimate")
        ),
        ("flha-ghn", {"flha-ghn.refine": "none", "learning-rate": 0.01}, "aggregate"),
        ("fedhenn", {"fedhenn.eta0": 0.0}, None),  # statistics are not sent, so batch-norm has no effect
        ("fedproto", {"fedproto.width": 5, "fedproto.predict": "head"}, None),
        ("lora", {"lora.ranks": "2,1", "lora.layers": "0"}, "aggregate"),
        ("fjord", {"fjord.widths": "1,0.5"}, "re-estimate"),
        ("fedrolex", {"fedrolex.widths": "1,0.5"}, "aggregate"),
        ("depthfl", {"depthfl.depths": "2,1"}, "local"),
    ],
)
def test_a_loaded_network_has_the_reported_accuracy(tiny, tmp_path, method, settings, batch_norm):
    model = _deeper if method == "depthfl" else _normalised
    chosen = {"batch-norm": batch_norm} if batch_norm else {}
    run = _run(tiny, tmp_path / "run", method, model, **chosen, **settings)
    reported = {each.client: each.accuracy for each in final_clients(read_clients(run.folder))}
    assert _accuracies(tiny, run, model) == pytest.approx(reported, abs=1e-6)


def _blocks(client=None):
    hidden = (layer for _ in range(2) for layer in (nn.Linear(6, 6), nn.ReLU()))
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), *hidden, nn.Linear(6, 3))


OF_METHOD = {
    "depthfl": {"depthfl.depths": "3,2,1"},
    "fedharm": {"fedharm.blocks": "0,3,5,7"},
    "fedma": {"rounds": 0},
    "fedmd": {"fedmd.private-epochs": 1},
    "fedrep": {"local-epochs": 3},
    "flha-ghn": {"learning-rate": 0.01},
    "inclusivefl": {"inclusivefl.depths": "2,1", "inclusivefl.blocks": "3"},
}


@pytest.mark.parametrize("method", sorted(registry.methods()))
def test_loaded_networks_of_every_method_predict_what_was_scored(tiny, tmp_path, method):
    """After the last round, and of the clients' own in each round; without the clients' data."""

    def data(client):
        train, test = tiny.data(client)
        return {"train": train, "test": test, "public": tiny.data(type("Other", (), {"partition_id": 9}))[0]}

    settings = {**SETTINGS, "method": method, "save-every": 1, "test-on": "local", **OF_METHOD.get(method, {})}
    if not registry.client_side(configuration.resolve(settings, strict=False).method_name).trains_network:
        del settings["local-epochs"], settings["learning-rate"]
        run = fedhet.run(settings, model=_blocks, data=data, out=tmp_path / "run", progress=False)
        with pytest.raises(ConfigError, match=f"has no networks: {method} predicts by a classifier of scikit-learn"):
            fedhet.load_model(run, 0, model=_blocks)
        return
    run = fedhet.run(settings, model=_blocks, data=data, out=tmp_path / "run", progress=False)
    rows = read_clients(run.folder)
    places = {tmp_path / "run": final_clients(rows)}
    for path in (tmp_path / "run" / "models").glob("round-*/[0-9].safetensors"):
        places[path.parent] = [row for row in rows if path.parent.name == f"round-{row.round}"]
    for place, scores in places.items():
        for row in scores:
            inputs, labels = tiny.data(type("Client", (), {"partition_id": int(row.client)}))[1]
            with torch.no_grad():
                right = (fedhet.load_model(place, row.client, model=_blocks)(inputs).argmax(1) == labels).sum().item()
            assert right == pytest.approx(row.accuracy * len(labels), abs=1e-6)


def test_prototypes_predict_their_classes_only():
    phi = Representation(nn.Sequential(nn.Linear(4, 2, dtype=torch.float64), nn.Linear(2, 3, dtype=torch.float64)))
    network = ByPrototype(phi, torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([1, -1, 0])).eval()
    assert network.scores(torch.tensor([[3.0, 4.0]])).tolist() == [[0, -1e4, -25]]
    assert network.scores(torch.tensor([[300.0, 400.0]])).tolist() == [[-(495.0**2), -2 * 500.0**2, -(500.0**2)]]
    inputs = torch.randn(30, 4, dtype=torch.float64)
    program = torch.export.export(network, (inputs[:3],), dynamic_shapes=({0: torch.export.Dim("n")},))
    for exported in (program.module(), torch.jit.trace(network, inputs[:3])):
        assert torch.allclose(exported(inputs), network(inputs))


class _Sum(nn.Module):
    """A network with two named inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.head((one + other).relu())


def test_a_predictor_of_named_inputs_is_exported_by_their_names(tmp_path):
    inputs = {"one": torch.randn(20, 4), "other": torch.randn(20, 4)}
    part = inputs, torch.arange(20) % 3
    settings = {"method": "fedproto", "clients": 2, "rounds": 1, "report": False}
    run = fedhet.run(settings, model=_Sum, data=lambda: (part, part), out=tmp_path / "run", progress=False)
    network = fedhet.load_model(run, 0, model=_Sum)
    exported = torch.export.export(network, (), inputs).module()
    assert torch.allclose(exported(**inputs), network(**inputs))


def test_only_the_network_of_a_method_with_two_starts_another_run(tiny, tmp_path):
    first = _run(tiny, tmp_path / "first", "fedmrl", rounds=1)
    second = _run(tiny, tmp_path / "second", "local", rounds=1, **{"start-from": str(first.folder)}, seed=7)
    one, other = (read_tensors(run.folder / "models" / "0.safetensors") for run in (first, second))
    assert {"method/tensors/projector.weight", "method/tensors/small.head.weight"} < one.keys()
    assert other.keys() == _normalised().state_dict().keys()
    network = fedhet.load_model(first, 0, model=_normalised)
    inputs = torch.randn(5, 4)
    program = torch.export.export(network, (inputs,))
    for exported in (program.module(), torch.jit.trace(network, inputs)):
        assert torch.allclose(exported(inputs), network(inputs))


def test_a_run_starts_from_the_models_of_another(tiny, tmp_path):
    first = _run(tiny, tmp_path / "first", "local")
    second = _run(tiny, tmp_path / "second", "local", **{"start-from": str(first.folder), "learning-rate": 1e-9})
    for number in range(3):
        one, other = (read_tensors(run.folder / "models" / f"{number}.safetensors") for run in (first, second))
        assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one if "weight" in name)
    averaged = _run(tiny, tmp_path / "averaged", "fedavg")
    kept = {"start-from": f"{averaged.folder}/models", "learning-rate": 1e-9, "batch-norm": "local"}
    third = _run(tiny, tmp_path / "third", "fedavg", **kept)
    one, other = (read_tensors(run.folder / "models" / "global.safetensors") for run in (averaged, third))
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in other if "weight" in name)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("local", {"start-from": "missing"}, "start-from = .*missing is no folder"),
        (
            "fedavg",
            {"start-from": "run"},
            "global.safetensors.*give a run with a global model.*, or set shared-init = false",
        ),
        ("local", {"start-from": "run"}, r"client 0's Sequential does not fit .*0.safetensors: its 3.weight is"),
        ("flha-ghn", {"start-from": "run"}, "start-from has no effect with method = flha-ghn"),
    ],
)
def test_what_cannot_start_a_run_is_named(tiny, tmp_path, monkeypatch, method, settings, message):
    monkeypatch.chdir(tmp_path)
    _run(tiny, tmp_path / "run", "local", rounds=1)
    with pytest.raises(FedhetError, match=message):
        _run(tiny, tmp_path / "next", method, _wider, **settings)
    if "shared-init" in message:  # the advice works
        advised = {**settings, "shared-init": False, "batch-norm": "local"}
        assert _run(tiny, tmp_path / "advised", method, rounds=1, **advised).summary["failures"] == 0


def test_models_are_saved_every_few_rounds(tiny, tmp_path):
    def models(run):
        folder = run.folder / "models"
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")}

    own = {f"{number}.safetensors" for number in range(3)}
    run = _run(tiny, tmp_path / "own", "local", rounds=5, **{"save-every": 2})
    assert models(run) == own | {f"round-{n}/{name}" for n in (2, 4) for name in own}
    again = fedhet.run({"rounds": 6}, resume=run.folder, model=_normalised, data=tiny.data, progress=False)
    assert models(again) == own | {f"round-{n}/{name}" for n in (2, 4, 6) for name in own}
    shared = _run(tiny, tmp_path / "shared", "fedavg", rounds=2, **{"save-every": 1})
    assert models(shared) == {"global.safetensors", "round-1/global.safetensors", "round-2/global.safetensors"}
    last, two = (read_tensors(shared.folder / f"models/{name}global.safetensors") for name in ("", "round-2/"))
    assert all(torch.equal(last[name], two[name]) for name in last)


@pytest.mark.parametrize(
    ("client", "model", "message"),
    [
        ("7", _normalised, r"has no model of client 7 \(there: 0, 1, 2\)"),
        ("0", None, "used your own model .*: call load_model with model="),
        ("0", lambda: nn.Linear(4, 3), "client 0's Linear does not fit .*: its .* missing"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_named(tiny, tmp_path, client, model, message):
    run = _run(tiny, tmp_path / "run", "local", rounds=1)
    with pytest.raises((ConfigError, FedhetError), match=message):
        fedhet.load_model(str(Path(run.folder)), client, model=model)


# ---- states


def test_kept_states(tmp_path):
    store = ClientStore(tmp_path, "", "0")
    store.save(1, {"w": torch.tensor(1.0)}, after=-1)
    store.save(2, {"w": torch.tensor(2.0)}, after=1)
    # The answers of rounds 2 and 3 were lost: the server still names round 1.
    store.save(3, {"w": torch.tensor(3.0)}, after=1)
    store.save(4, {"w": torch.tensor(4.0)}, after=1)
    assert sorted(path.name for path in (tmp_path / "clients" / "0").iterdir()) == ["1.safetensors", "4.safetensors"]
    assert store.load(1)["w"] == 1
    store.save(7, {"w": torch.tensor(7.0)}, after=4)
    assert store.load(1) is None
    assert store.load(4)["w"] == 4


def test_messages_at_the_same_time_have_one_first(tmp_path):
    """Of the first messages of a run that a node answers together, one fixes the settings for all."""
    for run in map(str, range(20)):
        together = threading.Barrier(4)

        def first(rate, run=run, together=together):
            together.wait()
            return ClientStore(tmp_path, run, "0").first("settings", {"learning-rate": rate})["learning-rate"]

        with ThreadPoolExecutor(4) as pool:
            assert len({*pool.map(first, range(4))}) == 1


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_flipped_bit(tmp_path, kind):
    store = ClientStore(tmp_path, "", "0")
    store.save(1, tensors := {"m": torch.ones(3) > 0, "w": torch.ones(3, 2).to(kind), "n": torch.tensor(1)}, after=-1)
    assert all(each.dtype == tensors[name].dtype and each.equal(tensors[name]) for name, each in store.load(1).items())
    path = tmp_path / "clients" / "0" / "1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FedhetError, match=r"1\.safetensors is damaged, since its digest does not match its content"):
        read_tensors(path)
    assert store.load(1) is None


@pytest.mark.parametrize(
    "kinds", ["3", "[1]", "{", '{"a": ["foo", [4]]}', '{"a": ["load", [4]]}', '{"a": ["float32", [-1]]}']
)
def test_a_file_with_a_right_digest_and_wrong_metadata_is_damaged(kinds, tmp_path):
    path = tmp_path / "0.safetensors"
    write_arrays(path, {PACKED: np.zeros(4, np.uint8)}, metadata={PACKED: kinds})
    with pytest.raises(FedhetError, match=r"0\.safetensors is damaged"):
        read_tensors(path)


def test_runs_cannot_fill_the_disk_with_small_files(tmp_path, monkeypatch):
    """A server that gives each message the name of another run makes a node write a file each time."""
    ClientStore(tmp_path, "first", "north").first("settings", {"seed": 0})
    disk = SimpleNamespace(
        f_files=10**6, f_favail=LEAST_FILES - 1, f_bavail=10**9, f_blocks=10**9, f_bfree=10**9, f_frsize=4096
    )
    monkeypatch.setattr("fedhet.client.state.os.statvfs", lambda _: disk)
    with pytest.raises(FedhetError, match="or room for 10,000 files, left: make room"):
        ClientStore(tmp_path, "second", "north").first("settings", {"seed": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    disk.f_files = 0  # as of a file system without a limit
    ClientStore(tmp_path, "second", "north").first("settings", {"seed": 0})


@pytest.mark.parametrize("call", ["save", "keep", "write_model"])
def test_a_run_cannot_fill_the_disk_of_a_node(call, tmp_path, monkeypatch):
    """A simulation's folder is the user's own."""
    arguments = {
        "save": (1, {"x": torch.zeros(1000)}),
        "keep": (PublicDataset(torch.zeros(10, 100)),),
        "write_model": ({"x": torch.zeros(1000)}, "", ""),
    }[call]
    keys = {"after": -1} if call == "save" else {}
    free = SimpleNamespace(free=int(LEAST_FREE) + 3999)
    monkeypatch.setattr("fedhet.client.state.shutil.disk_usage", lambda _: free)
    with pytest.raises(FedhetError, match="the node's disk would have less than 1 GB"):
        getattr(ClientStore(tmp_path, "run", "north"), call)(*arguments, **keys)
    assert not [*tmp_path.rglob("*.safetensors")]
    getattr(ClientStore(tmp_path, "", "north"), call)(*arguments, **keys)
    free.free += 1
    getattr(ClientStore(tmp_path, "run", "north"), call)(*arguments, **keys)


def test_a_client_without_a_model_of_its_own_is_cut_from_the_global_model_with_its_data(tiny, tmp_path):
    def network(client=None, hidden=6):
        return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    run = _run(tiny, tmp_path / "run", "heterofl", lambda client: network(hidden=7 if client.partition_id == 2 else 6))
    assert [failure["client"] for failure in run.history[0]["failures"]] == ["2"]
    with pytest.raises(ConfigError, match=r"client 2 has a part of the global model.*load_model with data=\.\.\."):
        fedhet.load_model(run, 2, model=network)
    assert fedhet.load_model(run, 2, model=network, data=tiny.data)(torch.zeros(2, 4)).shape == (2, 3)
