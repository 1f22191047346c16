"""`fedhet.run` in Python: the command line's defaults and names, and models and data of one's own."""

import random
import subprocess
import sys
import tomllib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhet
from fedhet.config import configuration, toml
from fedhet.engines.running import _configured
from fedhet.errors import ConfigError, DataError, FedhetError
from fedhet.results.observers import Observer
from fedhet.setup.user_functions import data_function, model_function
from fedhet.tasks import Task

pytestmark = pytest.mark.usefixtures("home", "no_report")
QUICK = {"clients": 3, "rounds": 2, "learning_rate": 0.2, "batch_size": 8}


class Net(nn.Sequential):
    def __init__(self, width=6):
        super().__init__(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.fixture
def run(tiny, tmp_path):
    def run(settings=None, *, data=tiny.data, model=tiny.model, out="run", **further):
        settings = {**QUICK, "method": "fedavg", "closing_epochs": 0, **(settings or {})}
        return fedhet.run(settings, model=model, data=data, out=tmp_path / out, **further)

    return run


HEAVY = ("torch._dynamo", "sympy", "scipy", "sklearn", "pandas", "torchvision", "torch_geometric", "matplotlib", "ray")
IMPORTS = f"""
import sys
import fedhet
for method in ("fedavg", "fedproto", "fedhenn"):
    own = {{"method": method, "optimizer": "adam" if method == "fedproto" else "sgd"}}
    own |= {{"clients": 2, "rounds": 1, "local-epochs": 1, "workers": 1, "report": False}}
    fedhet.run(own, out=sys.argv[1] + method, progress=False)
assert [each for each in {HEAVY} if each in sys.modules] == []
"""


@pytest.mark.slow
def test_heavy_packages_are_imported_late(tmp_path):
    subprocess.run([sys.executable, "-c", IMPORTS, f"{tmp_path}/"], check=True)


def resolved(config):
    return _configured(config, None, None, fedhet.setup.user_functions.UserFunctions())


def test_settings_are_added_to_a_preset():
    assert resolved({"rounds": 3}) == configuration.resolve({"preset": "fedhenn/digits", "rounds": 3})
    fedavg = configuration.resolve({"preset": "fedavg/digits", "method": "fedavg"})
    assert resolved({"method": "fedavg"}).flat() == fedavg.flat() == resolved("fedavg").flat()
    assert resolved({"method": "fedavg", "local_epochs": 7}).local_epochs == 7
    assert resolved({"preset": "", "method": "fedavg"}).flat() == configuration.resolve({"method": "fedavg"}).flat()


def test_own_model_and_data_are_noted_and_required_again(run, tmp_path, tiny):
    done = run()
    assert done.summary["status"] == "completed"
    assert (done.summary["dataset"], done.summary["clients"]) == ("own", 3)
    own = tomllib.loads((done.folder / "config.toml").read_text())["own"]
    assert own["data"].endswith("Tiny.data")
    with pytest.raises(ConfigError, match=r"used your own data \(.*Tiny.data\) and model \("):
        fedhet.run(done.folder / "config.toml", out=tmp_path / "again")
    with pytest.raises(ConfigError, match="used your own data .* fedhet.run.resume='.*', data=....* continues it"):
        fedhet.run({"rounds": 3}, resume=done.folder, model=tiny.model)
    again = fedhet.run(done.folder / "config.toml", out=tmp_path / "again", model=tiny.model, data=tiny.data)
    assert [row["trained"] for row in again.history] == [row["trained"] for row in done.history]
    longer = fedhet.run({"rounds": 3}, resume=done.folder, model=tiny.model, data=tiny.data)
    assert longer.summary["rounds"] == 3


def test_the_reason_for_a_key_without_effect_is_the_users_data(run):
    with pytest.raises(
        ConfigError,
        match=r"^alpha has no effect with a data function of your own, which splits the data: leave it out$",
    ):
        run({"alpha": 0.5})


def focal(outputs, labels, gamma=2):
    right = torch.log_softmax(outputs, 1).gather(1, labels[:, None])
    return -((1 - right.exp()) ** gamma * right).mean()


def focal3(outputs, labels):
    return focal(outputs, labels, 3)


def tanh():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


CHANGED = ("training examples", "test examples", "common test set", "network", "task", "settings", "augmentation")


@pytest.mark.parametrize("changed", CHANGED)
def test_resuming_needs_the_same_task_model_and_data(run, tiny, changed):
    def data(client, changed=""):  # of client 1 alone others
        (x, y), (tested, right) = tiny.data(client)
        if changed == "training examples" and client.name == "1":
            x = torch.cat([x[:4], x[4:] + 1])  # the labels and the first rows are the same
        test = tested + (changed == "test examples" and client.name == "1"), right
        common = {} if changed == "common test set" else {"common": (torch.eye(3, 4), torch.arange(3))}
        return {"train": (x, y), "test": test, **common}

    own = {"model": tiny.model, "data": data, "task": Task(loss=lambda outputs, labels: focal(outputs, labels))}
    own["client_settings"] = lambda client: {}
    other = {
        "network": {"model": tanh},
        "task": {"task": Task(loss=lambda outputs, labels: focal3(outputs, labels))},
        "settings": {"client_settings": lambda client: {"learning-rate": 0.01}},
        "augmentation": {"data": lambda client: data(client) | {"augment": Tensor.neg}},
    }
    done = run({"workers": 1, "rounds": 1}, **own)
    before = {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file()}
    who = "client 1" if "examples" in changed else "3 clients .*"
    another = other.get(changed, {"data": partial(data, changed=changed)})
    with pytest.raises(FedhetError, match=rf"{who}: the client's {changed} changed since this run began"):
        fedhet.run({"rounds": 2}, resume=done.folder, **own | another)
    assert {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file()} == before
    assert fedhet.run({"rounds": 2}, resume=done.folder, **own).summary["rounds"] == 2


def test_a_comparison_needs_the_same_model(tmp_path, tiny):
    settings = {**QUICK, "rounds": 1, "report": False}
    once = {"seeds": [0], "out": tmp_path / "all", "jobs": 1, "data": tiny.data}
    fedhet.compare(["local"], settings, model=tiny.model, **once)
    with pytest.raises(ConfigError, match=r"(?s)local-seed0: .*network changed since .* or choose another folder"):
        fedhet.compare(["local"], settings, model=tanh, **once)
    assert not fedhet.compare(["local"], settings, model=tiny.model, **once).failed


def test_random_examples_do_not_prevent_resuming(run, tiny):
    class Noisy(torch.utils.data.Dataset):
        def __init__(self, part):
            self.part = part

        def __len__(self):
            return len(self.part[1])

        def __getitem__(self, row):
            return self.part[0][row] + float(np.random.default_rng().normal()), self.part[1][row]

    def data(client):
        return [Noisy(part) for part in tiny.data(client)]

    done = run({"workers": 1, "rounds": 1}, data=data)
    assert fedhet.run({"rounds": 2}, resume=done.folder, model=tiny.model, data=data).summary["rounds"] == 2


@pytest.mark.parametrize(("method", "closing"), [("fedavg", 1), ("local", 1), ("fedhenn", 0), ("fedhenn", 1)])
def test_an_extended_run_equals_a_long_one(run, tiny, method, closing):
    """The closing round, and what a method does in its last round of training, do not stay in the middle."""

    def data(client):
        return dict(zip(("train", "test"), tiny.data(client), strict=True)) | {"public": torch.ones(8, 4).cumsum(0)}

    settings = {"method": method, "closing_epochs": closing, "fraction_train": 0.7, "workers": 1, "report": False}
    whole = run({**settings, "rounds": 4}, data=data, out="whole")
    run({**settings, "rounds": 2}, data=data)
    for rounds in (3, 4):
        done = fedhet.run({"rounds": rounds}, resume=whole.folder.parent / "run", model=tiny.model, data=data)
    rows, wanted = ([row | {"timing": 0} for row in each.history] for each in (done, whole))
    assert rows == wanted


class Wrapped(Net):
    def forward(self, inputs):
        return SimpleNamespace(logits=super().forward(inputs))


@pytest.mark.parametrize("model", [Net, Net(), lambda: Net(7), lambda client: Net(), Wrapped])
def test_models_in_the_forms_that_users_hold(run, model):
    done = run({"rounds": 1}, model=model)
    assert done.summary["trained_accuracy"]["weighted"] > 0


def test_progress_of_a_run_in_python(run, capsys):
    done = run()
    told = capsys.readouterr().out
    assert "round 1/2: 3 clients, accuracy " in told
    assert "fedavg: 2 rounds in" in told
    assert str(done).startswith("fedavg: global accuracy ")
    assert str(done).endswith(f"\n{done.folder}")
    run(out="quiet", progress=False)
    assert capsys.readouterr().out == ""


def test_the_configuration_names_no_architectures_and_partitions_of_ones_own(run, tiny):
    folder = run({"rounds": 1, "local_epochs": 0}).folder
    settings = toml.load(folder / "config.toml")
    unused = {"architectures", "assign", "partition", "classes-per-client", "samples-per-client", "alpha", "input-size"}
    assert unused - {key for key, *_ in configuration.keys()} == set()  # noqa: SIM118
    assert unused & settings.keys() == set()
    assert (settings["dataset"], settings["batch-size"]) == ("own", 8)
    again = fedhet.run({"rounds": 2}, model=tiny.model, data=tiny.data, resume=folder)
    assert again.summary["rounds"] == 2


def test_all_clients_start_from_a_given_network(run):
    net = Net()
    done = run({"rounds": 1, "local_epochs": 0}, model=net)
    from safetensors.torch import load_file

    saved = load_file(done.folder / "models" / "global.safetensors")
    assert all(torch.allclose(tensor, saved[name]) for name, tensor in net.state_dict().items())


def test_parameters_of_a_users_functions():
    asked = SimpleNamespace(partition_id=2, num_partitions=5, config=SimpleNamespace(batch_size=8))
    load = data_function(lambda partition_id, num_partitions, batch_size: (partition_id, num_partitions, batch_size))
    assert load.call(asked) == (2, 5, 8)
    assert data_function(lambda info: info.partition_id).call(asked) == 2
    assert data_function(lambda partition_id=0, share=0.5: (partition_id, share)).call(asked) == (2, 0.5)
    assert data_function(partial(lambda cid=0, num_partitions=1: (cid, num_partitions), cid=1)).call(asked) == (1, 5)
    assert model_function(lambda width=16: width).call(asked) == 16


@pytest.mark.parametrize(
    ("supplied", "kind", "message"),
    [
        ({"model": lambda width, depth: Net()}, ConfigError, r"its arguments \(width, depth\) is the client"),
        ({"data": lambda cid=0: cid}, ConfigError, r"it is unclear which of its arguments \(cid\) is the client"),
        ({"data": lambda *args: args}, ConfigError, "rename one to client or partition_id, or pass data=lambda"),
        ({"data": lambda num_partitions, path="": path}, ConfigError, r"\(path\) is the client"),
        ({"model": lambda cid=0, width=16: Net()}, ConfigError, r"model .* its arguments \(cid\) is the client"),
        ({"model": lambda context: Net()}, ConfigError, r"its arguments \(context\) is the client"),
        (
            {"model": 3},
            ConfigError,
            "must be a network, an estimator, a class of networks or a function of a client, not a int",
        ),
        ({"data": [1, 2]}, DataError, "function of a client, or examples to split .*: a list is no pair"),
        ({"model": Net, "engine": "ray"}, ConfigError, "engine = 'ray' cannot use a model or data passed in Python"),
    ],
)
def test_unusable_functions_are_refused(supplied, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        fedhet.run({"method": "fedavg", **QUICK}, out=tmp_path / "run", **supplied)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("labels", "task", "message"),
    [
        (torch.arange(10) + 1, None, "its labels go from 1 to 10, but its network has 3 outputs, for classes 0 to 2"),
        (torch.rand(10), "classification", "its labels are floats, not classes"),
        (torch.rand(10, 2), None, r"its targets are of shape \(n, 2\), but its outputs are of shape \(n, 3\)"),
        (torch.full((10, 3), 2), "multi-label", "needs labels of 0 and 1"),
    ],
)
def test_labels_that_do_not_fit_outputs(run, labels, task, message):
    def data(client):
        return (torch.ones(10, 4), labels), (torch.ones(10, 4), labels)

    with pytest.raises(FedhetError, match=f"3 clients .*{message}"):
        run(data=data, task=task)


def test_a_wrongly_guessed_head_is_remarked(run, caplog):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(6, 3), nn.Linear(4, 6)

        def forward(self, inputs):
            return self.last(self.first(inputs).relu())

    run({"rounds": 1, "method": "local"}, model=Net, out="without")
    assert "the head was" not in caplog.text
    run({"rounds": 1, "method": "fedrep", "fedrep.body-epochs": 1}, model=Net)
    assert caplog.text.count("the head was guessed to be 'first', the last nn.Linear, but") == 1
    caplog.clear()
    run({"rounds": 1, "method": "fedrep", "fedrep.body-epochs": 1, "head": "last"}, model=Net, out="named")
    assert "the head was" not in caplog.text


@pytest.mark.parametrize("method", ["local", "fedavg", "layer-average"])
def test_methods_without_a_head_serve_networks_without_one(run, method):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.weight = nn.LayerNorm(4), nn.Parameter(torch.randn(4, 3))

        def forward(self, inputs):
            return self.norm(inputs) @ self.weight

    assert "never_took_part" not in run({"rounds": 1, "method": method}, model=Net).summary
    with pytest.raises(FedhetError, match="head has no effect with method"):
        run({"rounds": 1, "method": method, "head": "norm"}, model=Net, out="named")


@pytest.mark.parametrize(("method", "head"), [("lg-fedavg", "3"), ("fedproto", "3.head")])
def test_a_layer_behind_the_classifier_is_remarked(method, head, run, caplog):
    """Also behind a layer that a method places before the head."""

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.Linear(3, 3))

    run({"rounds": 1, "method": method}, model=Net)
    assert caplog.text.count(f"the head is taken to be '{head}', ") == 1
    assert "calibrates the scores of '2', set head = '2'" in caplog.text
    caplog.clear()
    run({"rounds": 1, "method": method, "head": "2"}, model=Net, out="named")
    assert "the head is" not in caplog.text


def test_a_loaders_batch_size_is_its_clients(run, tiny):
    def data(client):
        train, test = tiny.data(client)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), batch_size=2), test

    done = run({"rounds": 1, "local_epochs": 1, "clients": 1, "batch_size": ""}, data=data)
    assert done.history[1]["work"]["steps"] == 7


def test_a_run_restores_the_process(run, tiny):
    class Watch(Observer):
        def round(self, *_):
            seen.append(torch.get_num_threads())

    def data(client):
        np.random.seed(1)
        return tiny.data(client)

    seen, threads = [], torch.get_num_threads()
    torch.set_num_threads(3)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        run({"workers": 1}, data=data, observers=[Watch()])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), states[0])
    np.testing.assert_equal(np.random.get_state(), states[1])
    assert random.getstate() == states[2]
    assert {*seen} == {1}
