"""The decisions of a node: where it writes, what leaves it, and what it does with a network that diverges."""

import json
import os
import re
from urllib.parse import unquote

import psutil
import pytest
import torch
from torch import nn

import fedhet
from fedhet.client import policy, state
from fedhet.config import configuration
from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.messages import Request
from fedhet.utils.files import read_tensors, state_folder
from fedhet.utils.machine import cores, proof

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def federate(tiny, new_watch):
    """Runs two rounds of a method on three nodes; `nodes` are settings of a node by its number."""

    def federate(name, model=None, nodes=None, clients=3, data=None, task=None, **settings):
        watch, grid = new_watch(), LocalGrid(tiny.app(model, data, task=task), clients)
        for index, own in (nodes or {}).items():
            grid._contexts[FIRST_NODE + index].node_config.update(own)
        strategy = getattr(fedhet, name)(observers=[watch], **{"rounds": 2, "learning_rate": 0.1, **settings})
        strategy.start(grid)
        return watch, strategy

    return federate


# ---- where its data are


def test_data_path_is_data():
    config = {"partition-id": 0, "num-partitions": 2}
    both = config | {"data": "/data/chest", "data-path": "/data/chest"}  # a user's data function may read either
    assert policy.with_data(config | {"data-path": "/data/chest"}) == both
    assert policy.with_data(config | {"data": "/data/chest"}) == policy.with_data(both) == both
    assert policy.with_data(config) == config


def test_contradicting_data_folders(federate):
    nodes = {0: {"data": "/data/one", "data-path": "/data/other"}}
    watch, _ = federate("FedAvg", nodes=nodes)
    reasons = [failure["reason"] for row in watch.rows for failure in row["failures"]]
    assert "the node config has different folders for data and data-path: set only one of them" in reasons


# ---- where it writes


def test_paths_of_a_remote_server_are_ignored(federate, tmp_path, home, monkeypatch):
    chosen = tmp_path / "chosen by the server"
    federate("Local", state_dir=str(chosen))
    (run,) = chosen.iterdir()
    assert {path.name for path in run.iterdir()} == {"beginning", "clients", "models"}
    monkeypatch.setattr("fedhet.server.federation.proof", lambda text: "guessed")
    federate("Local", state_dir=str(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()
    (run,) = (path for path in (home / ".fedhet" / "state").iterdir() if path.is_dir())
    assert {path.name for path in run.iterdir()} == {"beginning", "clients", "models"}
    assert {path.stem for path in (run / "models").iterdir()} == {"0", "1", "2"}


def test_a_proof_is_of_no_use_in_another_run(federate, tmp_path, home, monkeypatch):
    """All clients receive it, and one of them may be a server one day."""
    monkeypatch.setattr("fedhet.server.federation.proof", lambda text: proof(text.replace("1 ", "2 ", 1)))
    federate("Local", state_dir=str(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()


def test_paths_in_a_cluster(federate, tmp_path, monkeypatch):
    """Though the key by which a server proves itself is on the server's machine alone."""
    monkeypatch.setattr("fedhet.client.app.cluster_machine", lambda: "node7")
    monkeypatch.setattr("fedhet.server.federation.proof", lambda text: "guessed")
    shared = tmp_path / "shared"
    with pytest.raises(FedhetError, match=rf"on machine node7: the folder {shared}/\w+ for the clients' state"):
        federate("Local", state_dir=str(shared))
    monkeypatch.setattr("fedhet.server.handshake.simulated", lambda grid: True)  # whose server makes the folder
    federate("Local", state_dir=str(shared))
    (run,) = shared.iterdir()
    assert {path.name for path in run.iterdir()} == {"beginning", "clients", "models"}


def test_node_state_dir(federate, tmp_path):
    federate("Local", nodes={1: {"state-dir": str(tmp_path / "mine")}}, state_dir=str(tmp_path / "servers"))
    assert [path.stem for path in (tmp_path / "mine").glob("*/models/*")] == ["1"]
    assert {path.stem for path in (tmp_path / "servers").glob("*/models/*")} == {"0", "2"}


def test_runs_in_one_folder_keep_separate_state(federate, tmp_path):
    """Though all else is alike: state is kept by what the server drew for the run."""

    def states():
        return {path: path.read_bytes() for path in tmp_path.rglob("clients/*/*.safetensors")}

    federate("Local", state_dir=str(tmp_path))
    first = states()
    federate("Local", state_dir=str(tmp_path), learning_rate=0.01)
    assert first
    assert first.items() < states().items()


def test_threads_are_capped_at_cores(federate, monkeypatch):
    asked = []
    monkeypatch.setattr("fedhet.client.clients.torch.set_num_threads", asked.append)
    federate("Local", threads_per_client=1024)
    assert set(asked) <= {cores()}


@pytest.mark.parametrize("name", ["con", "%63on", "Łódź?"])
def test_portable_file_names(name, federate, tmp_path):
    watch, _ = federate("Local", nodes={1: {"name": name}}, state_dir=str(tmp_path / "state"))
    assert {*watch.rows[1]["participants"]} == {"0", "2", name}
    (run,) = (tmp_path / "state").iterdir()
    stems = {path.stem for path in (run / "models").iterdir()}
    assert {unquote(stem) for stem in stems} == {"0", "2", name}
    for stem in stems:
        assert not re.search(r'[<>:"/\\|?*]|[. ]$', stem)
        assert not re.match(r"(con|nul)(\.|$)", stem, re.IGNORECASE)


@pytest.mark.parametrize("field", ["run", "public"])
def test_hostile_names_in_requests(field, federate, monkeypatch):
    hostile = {"run": "../../up", "public": "/etc/passwd"}[field]
    monkeypatch.setattr("fedhet.server.federation.Request", lambda *a, **more: Request(*a, **{**more, field: hostile}))
    with pytest.raises(FedhetError, match=f"{field} is .*must be a name that a file can have"):
        federate("Local")


def test_server_paths_of_data_and_presets(tmp_path, in_a_run):
    (tmp_path / "secret.toml").write_text('password = "1234"')
    chosen = {"method": "fedmd", "public-samples": 9, "dataset": "mnist", "data": str(tmp_path)}
    assert configuration.at_node(json.dumps(chosen), (), here=True).data == str(tmp_path)
    assert configuration.at_node(json.dumps(chosen), (), here=False).data == ""
    out = os.path.relpath(tmp_path / "secret", configuration.run_configs())
    with pytest.raises(ConfigError) as told:
        configuration.at_node(json.dumps({"preset": out}), (), here=False)
    assert "unknown preset" in str(told.value)
    assert "password" not in str(told.value)


def test_node_name_with_path(federate):
    watch, _ = federate("Local", nodes={0: {"name": "../1"}})
    assert "'../1' is not a valid file name" in watch.rows[0]["failures"][0]["reason"]


def test_damaged_public_dataset(tmp_path):
    public, store = PublicDataset(torch.arange(12.0).view(3, 4)), state.ClientStore(tmp_path, "", "0")
    store.keep(public)
    path = tmp_path / "public" / f"{public.digest}.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-1] + b"x", whole[:20], b""):
        path.write_bytes(damaged)
        with pytest.raises(state.LostState, match="no public dataset"):
            store.public_dataset(public.digest)
        assert not path.exists()
    store.keep(public)
    assert path.read_bytes() == whole


def test_removal_of_old_runs(federate, home):
    federate("Local")
    base = state_folder("", "")
    (old,) = base.iterdir()
    (base / "public").mkdir()
    (base / "public" / "a.safetensors").touch()
    for path in [*old.rglob("*"), *(base / "public").iterdir()]:
        os.utime(path, (0, 0))
    (base / "not ours").mkdir()
    federate("Local")  # whose handshake removes it
    assert not old.exists()
    assert len([*base.iterdir()]) == 3
    assert state.remove_old(base, 1) == []


def test_a_run_that_has_just_begun_in_another_process_stays(tmp_path):
    (tmp_path / "run" / "beginning" / "digests").mkdir(parents=True)
    assert state.remove_old(tmp_path, 1) == []
    os.utime(tmp_path / "run", (0, 0))
    assert state.remove_old(tmp_path, 1) == [tmp_path / "run"]


def test_removal_does_not_follow_links(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.safetensors").touch()
    os.utime(elsewhere / "a.safetensors", (0, 0))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "public").symlink_to(elsewhere)
    assert state.remove_old(tmp_path / "base", 1) == []
    assert (elsewhere / "a.safetensors").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("partition-id", "third"), ("num-partitions", 2**62), ("split-seed", "x"), ("split-seed", 2.5)]
)
def test_numbers_of_the_split_must_be_whole(key, value, federate):
    watch, _ = federate("Local", nodes={0: {key: value}})
    reason = watch.rows[0]["failures"][0]["reason"]
    assert f"the node's {key} is {value!r}, but must be a whole number of at least " in reason


# ---- how much it may take


def test_client_beyond_memory_limit(federate, tiny):
    def greedy(client):
        if client.name == "1":
            torch.ones(10**9)
        return tiny.data(client)

    most = psutil.Process().memory_info().data / 1e9 + 1
    watch, _ = federate("FedAvg", data=greedy, nodes={n: {"memory-limit": most} for n in range(3)})
    reason = (
        f"the client needs more memory than its node allows (memory-limit = {most} GB): raise the limit or choose a "
        "smaller model"
    )
    assert watch.rows[0]["failures"] == [{"client": "1", "reason": reason}]
    assert watch.rows[2]["participants"] == ["0", "2"]
    assert torch.ones(10**9, dtype=torch.uint8)[-1] == 1, "the limit is that of a client at work"


# ---- what leaves it


@pytest.mark.parametrize(
    ("method", "allow", "reason"),
    [
        (
            "FedAvg",
            "features, prototypes",
            "only features, prototypes (allow in its node config), but fedavg needs weights",
        ),
        ("FedProto", "", "allows nothing to be sent"),
        ("FedProto", "prototype", "did you mean 'prototypes'"),
        ("PFNM", "weights", "pfnm needs statistics"),
    ],
)
def test_disallowed_kinds_are_refused(method, allow, reason, federate):
    watch, _ = federate(method, nodes={1: {"allow": allow}}, clients=3)
    (failure,) = watch.rows[0]["failures"]
    assert failure["client"] == "1"
    assert reason in failure["reason"]
    assert watch.rows[1]["participants"] == ["0", "2"]


# ---- networks that diverge, and of other dtypes


@pytest.mark.parametrize("name", ["Local", "FedAvg"])
def test_diverging_client(name, federate, tiny):
    def data(client):
        (inputs, labels), test = tiny.data(client)
        return (inputs * (1e20 if client.name == "1" else 1), labels), test

    watch, _ = federate(name, data=data)
    failed = {failure["client"]: failure["reason"] for failure in watch.rows[1]["failures"]}
    assert failed.keys() == {"1"}
    assert "diverged" in failed["1"]
    assert "a lower learning-rate than 0.1 may help" in failed["1"]


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_weights_are_refused(federate, tiny):
    with pytest.raises(FedhetError, match="a Sequential whose 0.weight cannot be sent, as it is empty, complex"):
        federate("Local", lambda client: tiny.model().to(torch.complex64))


# ---- what it trains with


def _train_rows(watch):
    return [row for row in watch.rows if row["participants"]]


@pytest.mark.parametrize(
    ("own", "steps"),  # client 0 has 14 examples, 1 batch of 32; so have the others
    [
        ({"local-epochs": 3}, 3 + 1 + 1),
        ({"batch-size": 2}, 7 + 1 + 1),
        ({"learning-rate": 1e-9}, 3),
        ({"device": "cpu"}, 3),
    ],
)
def test_a_node_trains_with_its_own_settings(federate, tiny, new_watch, own, steps):
    watch, _ = federate("FedAvg", nodes={0: own}, max_local_epochs=4)
    assert [row["work"]["steps"] for row in _train_rows(watch)] == [steps] * 2

    def client_settings(client):
        return own if client.partition_id == 0 else {}

    simulated, app = new_watch(), tiny.app(client_settings=client_settings)
    fedhet.FedAvg(observers=[simulated], rounds=2, learning_rate=0.1, max_local_epochs=4).start(LocalGrid(app, 3))
    assert simulated.repeatable == watch.repeatable


def test_the_server_bounds_the_epochs_of_nodes(federate):
    watch, _ = federate("FedAvg", nodes={0: {"local-epochs": 5}}, max_local_epochs=4, local_epochs=2)
    reasons = [failure["reason"] for row in watch.rows for failure in row["failures"]]
    assert len(reasons) == 1
    assert reasons[0].startswith("this node's local-epochs = 5 is above the server's bound of 4: reduce it")
    watch, _ = federate("FedAvg", nodes={0: {"local-epochs": 1}}, local_epochs=2)  # fewer are always allowed
    assert [row["work"]["steps"] for row in _train_rows(watch)] == [1 + 2 + 2] * 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"rounds": 3}, "client_settings returned {'rounds': 3}, but must return a dict with some of local-epochs"),
        (3, "client_settings returned 3, but must return a dict"),
        ({"local_epochs": 9}, "this node's local-epochs = 9 is above the server's bound of 1"),
        ({"batch_size": 0}, "batch-size = 0: must be at least 1"),
    ],
)
def test_settings_of_clients_that_cannot_be_used(tiny, tmp_path, returned, message):
    functions = {"model": tiny.model, "data": tiny.data, "client_settings": lambda client: returned}
    settings = {"method": "fedavg", "clients": 2, "local-epochs": 1, "workers": 1}
    with pytest.raises(FedhetError, match=message):
        fedhet.run(settings, **functions, out=tmp_path / "run", progress=False)


def test_a_resumed_run_needs_its_clients_settings(tiny, tmp_path):
    functions = {"model": tiny.model, "data": tiny.data}
    settings = {"method": "fedavg", "clients": 2, "rounds": 1, "local-epochs": 1, "workers": 1, "report": False}
    fedhet.run(
        settings, **functions, client_settings=lambda client: {"batch-size": 4}, out=tmp_path / "run", progress=False
    )
    with pytest.raises(ConfigError, match="used your own client_settings"):
        fedhet.run({"rounds": 2}, **functions, resume=tmp_path / "run", progress=False)


# ---- its network and data


def test_networks_without_a_head(federate):
    watch, _ = federate("FedAvg", lambda client: nn.PReLU())
    assert watch.rows[0]["failures"] == []
    with pytest.raises(FedhetError, match="PReLU has no nn.Linear or convolution as head"):
        federate("FedRep", lambda client: nn.PReLU())


@pytest.mark.parametrize("name", ["FedTGP", "FedGH"])
def test_own_loss_with_methods_of_classes(name, federate):
    watch, _ = federate(name, task=fedhet.Task("classification", loss=nn.CrossEntropyLoss()))
    assert watch.rows[0]["failures"] == []


def test_data_function_receives_client(federate, tiny):
    asked = []

    def data(client):
        asked.append((client.name, client.partition_id, client.num_partitions, client.config.seed, client.node_config))
        return tiny.data(client)

    federate("Local", data=data, nodes={1: {"name": "north", "ward": 7}}, clients=2, seed=5)
    assert asked[0][:4] == ("0", 0, 2, 5)
    assert asked[1][:4] == ("north", 1, 2, 5)
    assert asked[1][4]["ward"] == 7
    assert len(asked) == 2


def test_name_without_partition(tiny):
    grid = LocalGrid(tiny.app(), 1)
    context = grid._contexts[FIRST_NODE]
    for key in list(context.node_config):
        del context.node_config[key]
    strategy = fedhet.FedAvg(rounds=1)
    strategy.start(grid)
    assert list(strategy.state.clients) == [str(FIRST_NODE)]


def test_different_models_and_classes(federate, tiny, tmp_path):
    def model(client):
        return nn.Linear(4, 2) if client.name == "0" else tiny.model(client)

    def data(client):
        return tiny.data(client, classes=2 if client.name == "0" else 3)

    watch, _ = federate("Local", model, data=data, clients=2, rounds=1, state_dir=str(tmp_path))
    assert [row["failures"] for row in watch.rows] == [[]] * 3
    named = [row.architecture for row in watch.clients if row.round == 1]
    assert named == ["Linear-10", "Sequential-51"]  # and their parameters
    shapes = [
        read_tensors(next(tmp_path.rglob(f"models/{c}.safetensors")))["weight" if c == "0" else "2.weight"].shape
        for c in "01"
    ]
    assert shapes == [(2, 4), (3, 6)]


def test_undisclosed_architectures(federate):
    watch, _ = federate("Local", disclose_architecture=False)
    assert {row.architecture for row in watch.clients} == {""}
    watch, _ = federate("Local", nodes={1: {"disclose-architecture": False}}, clients=2)
    assert [row.architecture for row in watch.clients if row.round == 1] == ["Sequential-51", ""]


def test_caches_are_dropped_between_runs(tiny, tmp_path):
    asked = []

    def data(client):
        asked.append(client.config.seed)
        return tiny.data(client)

    app = tiny.app(data=data)
    for seed in (0, 0, 1, 0):
        config = {"rounds": 1, "seed": seed, "state_dir": str(tmp_path / str(len(asked))), "device": "cpu"}
        fedhet.Local(**config).start(LocalGrid(app, 2))  # on a GPU data are let go at the end of a run
    assert asked == [0, 0, 0, 0, 1, 1, 0, 0]
