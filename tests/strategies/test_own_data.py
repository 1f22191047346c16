"""The common test set with data of one's own: what `test-on` needs, and what stands in the history."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedhet
from fedhet.config import configuration
from fedhet.config.configuration import read
from fedhet.data import Examples
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.results.history import final_clients, read_run
from fedhet.setup.client_setup import ClientInfo
from fedhet.setup.user_functions import UserFunctions
from fedhet.tasks import Task
from fedhet.training import Evaluation
from fedhet.utils.files import read_tensors

CLASSIFICATION = Task("classification")


def drawn(seed, count):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(1)


COMMON = drawn(99, 50)


def with_common(client):
    number = int(client.name)
    return {"train": drawn(number, 24), "test": drawn(10 + number, 6 + 4 * number), "common": COMMON}


def without_common(client):
    return {part: examples for part, examples in with_common(client).items() if part != "common"}


def model_of(client):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def score_of(tensors, examples):
    model = model_of(None)
    model.load_state_dict(tensors)
    return Evaluation(model, Examples(*examples), CLASSIFICATION, lambda inputs: inputs).result()


@pytest.mark.parametrize(("method", "test_on"), [("fedavg", "both"), ("local", "global")])
def test_missing_common_test_set(federate, method, test_on):
    with pytest.raises(
        FedhetError, match=f"3 clients .*: test-on = {test_on} needs a common test set: return it as `common`"
    ):
        federate(method, model=model_of, data=without_common, test_on=test_on)
    assert federate(method, "local", model=model_of, data=without_common, test_on="local").failures == []


@pytest.mark.parametrize(("preset", "test_on"), [("ensemble/digits", "both"), ("ensemble/mnist_lenet", "global")])
def test_test_on_of_a_preset(federate, caplog, preset, test_on):
    """Nodes with data of their own, which a server knows only from the handshake, and a preset that asks for more."""
    caplog.set_level("INFO", logger="flwr")
    done = federate("local", model=model_of, data=without_common, preset=preset)
    assert done.config.test_on == test_on
    assert done.failures == []
    (told,) = [each for each in caplog.records if "the data have no common test set" in each.getMessage()]
    assert told.levelno == logging.INFO
    assert done.rows[-1]["common"] is None
    assert done.summary["personal_accuracy"] is not None
    assert read(done.folder / "config.toml")["test-on"] == "local", "so a resumed run is the same"
    beside = federate("local", "beside", model=model_of, data=without_common, test_on="local", preset=preset)
    assert beside.rows == done.rows


@pytest.mark.parametrize(("method", "test_on"), [("lg-fedavg", "both"), ("local", "global")])
def test_personal_models_on_common_test_set(federate, method, test_on):
    done = federate(method, model=model_of, data=with_common, test_on=test_on)
    last = done.rows[-1]
    assert last["common"]["received"] is None
    found = last["common"]["trained"]
    scores = [score_of(done.saved(client), COMMON) for client in "012"]
    assert found["clients"] == 3
    values = [score.value for score in scores]
    assert len(set(values)) > 1
    assert found["accuracy"]["mean"] == pytest.approx(np.mean(values))
    # Clients count by their own test examples, although all are tested on the same.
    assert found["accuracy"]["weighted"] == pytest.approx(np.average(values, weights=[6, 10, 14]))
    assert found["loss"]["mean"] == pytest.approx(np.mean([score.loss for score in scores]), rel=1e-5)
    assert (last["trained"] is None) == (test_on == "global")
    if test_on == "both":
        own = [score_of(done.saved(client), with_common(done.info(client))["test"]).value for client in "012"]
        assert last["trained"]["accuracy"]["mean"] == pytest.approx(np.mean(own))
    assert done.summary["common"]["trained"]["accuracy"] == found["accuracy"]


def test_a_score_on_the_common_test_set_is_none_on_own_test_examples(federate):
    def data(client):
        parts = with_common(client)
        return parts | {"test": tuple(part[:0] for part in parts["test"])} if client.partition_id == 2 else parts

    done = federate("local", model=model_of, data=data, test_on="both")
    run = read_run(done.folder)
    assert run.rows[-1]["common"]["trained"]["clients"] == 3
    values = [row.accuracy for row in final_clients(run.clients)]
    assert len(values) == 2
    assert np.mean(values) == pytest.approx(run.accuracy("personal", "mean"))


def test_global_model_on_common_test_set(federate):
    done = federate("fedavg", model=model_of, data=with_common, test_on="both")
    last = done.rows[-1]
    assert last["common"]["trained"] is None
    score = score_of(done.saved("global"), COMMON)
    assert last["common"]["received"]["accuracy"]["mean"] == pytest.approx(score.value)
    assert last["common"]["received"]["accuracy"]["std"] == pytest.approx(0)
    assert last["common"]["received"]["loss"]["mean"] == pytest.approx(score.loss, rel=1e-5)
    assert last["received"] is not None
    assert done.summary["common"]["received"]["accuracy"] == last["common"]["received"]["accuracy"]


def test_clients_with_common_test_set_only(federate):
    def data(client):
        return with_common(client) | {"test": drawn(0, 0)}

    done = federate("local", model=model_of, data=data, test_on="global")
    scores = [score_of(done.saved(name), COMMON).value for name in "012"]
    found = done.rows[-1]["common"]["trained"]
    assert found["clients"] == 3
    assert [found["accuracy"][each] for each in ("mean", "weighted")] == pytest.approx([np.mean(scores)] * 2)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a method with the model and data above and public examples, as a user does who says nothing more."""
    monkeypatch.chdir(tmp_path)

    def run(method, model=model_of, **settings):
        settings = {"method": method, "clients": 2, "rounds": 1, "workers": 1, "report": False, **settings}
        return fedhet.run(settings, model=model, data=lambda client: {**without_common(client), "public": COMMON[0]})

    return run


def test_own_data_have_their_own_name(run):
    done = run("fedhenn")
    settings = read(done.folder / "config.toml", ("model", "data"))
    assert done.folder.name.startswith("fedhenn-own-")
    assert (done.summary["dataset"], settings["dataset"]) == ("own", "own")
    assert "partition" not in settings, "the data function is the split"
    assert read_run(done.folder).title == "fedhenn on own data"
    for data in (None, without_common):
        with pytest.raises(ConfigError, match=r"your own model: .*model=my_model, data=my_data"):
            fedhet.run({"method": "local", "dataset": "own"}, data=data)


@pytest.mark.parametrize(
    ("functions", "architectures", "written"),
    [
        ({"model": model_of, "data": without_common}, "cnn", set()),
        ({"model": model_of, "data": COMMON}, "cnn", {"partition"}),
        ({"data": lambda client: [(torch.randn(10, 1, 8, 8), torch.arange(10))] * 2}, "mlp", {"architectures"}),
    ],
)
@pytest.mark.usefixtures("home", "no_report")
def test_the_configuration_of_a_flower_app_has_what_is_used(functions, architectures, written, tmp_path):
    strategy = fedhet.Local(rounds=1, preset="own", architectures=architectures, out=str(tmp_path / "run"))
    strategy.start(LocalGrid(fedhet.make_client_app(**functions), 2))
    settings = read(tmp_path / "run" / "config.toml", ("model", "data"))
    assert settings.keys() & {"architectures", "partition", "dataset"} == written


def test_server_uses_first_clients_public_dataset(tmp_path):

    def data(client):
        return with_common(client) | {"public": drawn(50, 40)[0]}

    config = {"method": "feddf", "clients": 2, "rounds": 2, "local-epochs": 5, "test-on": "both", "learning-rate": 0.1}
    done = fedhet.run(config, model=model_of, data=data, out=tmp_path / "run")
    assert done.summary["common"]["received"]["accuracy"] > 0.4, "a third is chance"


def loaders(client):
    return {part: DataLoader(TensorDataset(*each), 8) for part, each in without_common(client).items()}


REPLACED = [
    ("dataset", "mnist", "data of your own and models of your own", {}),
    ("samples-per-client", 10, "a data function of your own, which splits the data", {}),
    ("architectures", "mlp", "models of your own", {"data": None}),
    ("batch-size", 4, "a DataLoader, which has its own batch_size", {"data": loaders}),
]


@pytest.mark.parametrize(("key", "value", "words", "own"), REPLACED)
def test_keys_without_effect(key, value, words, own, tmp_path):
    own, chosen = {"model": model_of, "data": without_common, **own}, {"clients": 2, key: value}
    sentence = f"{key} has no effect with {words}: leave it out"
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        fedhet.run({"method": "local", **chosen}, **own, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        fedhet.compare(["local", "fedavg"], chosen, **own, out=tmp_path / "compared")


def test_keys_with_effect():
    both = {"model": model_of, "data": without_common}
    for method, chosen, own in (
        ("feddf", {"architectures": "mlp-20"}, both),
        ("heterofl", {"assign": "blocks"}, both),
        ("local", {"dataset": "own"}, both),
        ("local", {"dataset": "mnist"}, {"data": without_common}),
        ("local", {"batch-size": 8, "test-split": "drawn", "test-share": 0.5}, {**both, "data": loaders}),
    ):
        config = UserFunctions(**own).adapted(configuration.resolve({"method": method, **chosen}))
        assert config.flat().items() >= chosen.items()


def test_fedmd_without_public_labels(run):
    assert run("fedmd", **{"fedmd.public-epochs": 0}).summary["failures"] == 0
    with pytest.raises(
        FedhetError, match="no labelled public dataset, but the method needs it: have the clients' data function"
    ):
        run("fedmd")


class Constants(nn.Module):
    """A network with a frozen layer, a mask, a number and BatchNorm that it keeps in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.frozen, self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        nn.init.constant_(self.frozen.weight, 0.25).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.norm.running_mean.fill_(0.5)
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1]))
        self.register_buffer("scale", torch.tensor(0.75))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs):
        return self.head(self.norm(self.hidden(self.frozen(inputs * self.mask).relu())).relu()) * self.scale


@pytest.mark.parametrize("method", ["flha-ghn", "layer-average", "fedma", "depthfl"])
def test_constants_stay(federate, method):
    keys = {"flha-ghn": {"flha-ghn.head": "tiled"}, "depthfl": {"depthfl.depths": "2"}}.get(method, {})
    settings = {
        "data": without_common,
        "rounds": 3,
        "local_epochs": 1,
        "test_on": "local",
        "learning_rate": 0.01,
        **keys,
    }
    done = federate(method, model=lambda client: Constants(), **settings)
    first, files = Constants().state_dict(), [*(done.folder / "models").iterdir()]
    assert files
    for file in files:
        saved = read_tensors(file)
        for name in ("frozen.weight", "mask", "scale", "norm.running_mean", "norm.running_var"):
            of = saved[name].unique(), first[name].unique()  # matched units may be more
            torch.testing.assert_close(*of, msg=f"{file.stem}: {name}")


@pytest.mark.usefixtures("home", "no_report")
def test_losses_of_clients_are_joined_by_class_weights(tmp_path):
    """As PyTorch's weighted mean over all clients' examples, whose classes differ; a small rate changes no weight."""
    net, weights = model_of(None), torch.tensor([1.0, 9.0, 3.0])

    def data(client):
        inputs, labels = drawn(client.partition_id, 60)
        rows = [*(labels == client.partition_id).nonzero()[:, 0].tolist(), 0, 1, 2, 3, 4]
        return (inputs[rows], labels[rows]), (inputs[rows], labels[rows])

    settings = {"method": "local", "clients": 3, "rounds": 1, "local-epochs": 1, "learning-rate": 1e-9, "workers": 1}
    done = fedhet.run(settings, model=net, data=data, task=Task(class_weights=weights.tolist()), out=tmp_path / "run")
    parts = [data(ClientInfo(str(number), number, 3, configuration.resolve({})))[0] for number in range(3)]
    inputs, labels = map(torch.cat, zip(*parts, strict=True))
    expected = nn.functional.cross_entropy(
        fedhet.load_model(tmp_path / "run", 0, model=net)(inputs), labels, weights
    ).item()
    losses = [row["trained"]["loss"]["weighted"] for row in done.history if row["trained"]]
    assert losses == pytest.approx([expected] * len(losses), rel=1e-5)
    assert [row["train_loss"] for row in done.history if row["train_loss"]] == pytest.approx([expected], rel=1e-5)
