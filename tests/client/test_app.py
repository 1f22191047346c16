"""The client side's runtime, with users' own models and data, on in-process nodes."""

import pytest
from torch import nn

import fedhet
from fedhet.errors import FedhetError
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.utils.files import read_tensors

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def federate(tmp_path, tiny, new_watch):
    """Runs `Local` (or another) on nodes with this model and data; returns the observer and the folder of the state."""

    def federate(model=None, data=None, *, name="Local", clients=2, nodes=None, task="classification", **settings):
        watch = new_watch()
        settings = {"rounds": 1, "learning_rate": 0.1, "state_dir": str(tmp_path / "state"), **settings}
        grid = LocalGrid(tiny.app(model, data, task=task), clients)
        for index, own in (nodes or {}).items():
            grid._contexts[FIRST_NODE + index].node_config.update(own)
        getattr(fedhet, name)(observers=[watch], **settings).start(grid)
        return watch, tmp_path / "state"

    return federate


def test_networks_without_a_head(federate):
    watch, _ = federate(lambda client: nn.PReLU(), name="FedAvg")
    assert watch.rows[0]["failures"] == []
    with pytest.raises(FedhetError, match="PReLU has no nn.Linear or convolution as head"):
        federate(lambda client: nn.PReLU(), name="FedRep")


@pytest.mark.parametrize("name", ["FedTGP", "FedGH"])
def test_own_loss_with_methods_of_classes(name, federate):
    watch, _ = federate(name=name, task=fedhet.Task("classification", loss=nn.CrossEntropyLoss()))
    assert watch.rows[0]["failures"] == []


def test_data_function_receives_client(federate, tiny):
    asked = []

    def data(client):
        asked.append((client.name, client.partition_id, client.num_partitions, client.config.seed, client.node_config))
        return tiny.data(client)

    federate(data=data, nodes={1: {"name": "north", "ward": 7}}, seed=5)
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


def test_different_models_and_classes(federate, tiny):
    def model(client):
        return nn.Linear(4, 2) if client.name == "0" else tiny.model(client)

    def data(client):
        return tiny.data(client, classes=2 if client.name == "0" else 3)

    watch, folder = federate(model, data)
    assert [row["failures"] for row in watch.rows] == [[]] * 3
    named = [row.architecture for row in watch.clients if row.round == 1]
    assert named == ["Linear-10", "Sequential-51"]  # and their parameters
    shapes = [
        read_tensors(next(folder.rglob(f"models/{c}.safetensors")))["weight" if c == "0" else "2.weight"].shape
        for c in "01"
    ]
    assert shapes == [(2, 4), (3, 6)]


def test_undisclosed_architectures(federate):
    watch, _ = federate(disclose_architecture=False)
    assert {row.architecture for row in watch.clients} == {""}
    watch, _ = federate(nodes={1: {"disclose-architecture": False}})
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
