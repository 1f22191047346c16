"""Clients that come after the last round: what they receive, and what they make of it alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhet
from fedhet.algorithms.graphs import layer_graph
from fedhet.algorithms.hypernets.design import catalogue
from fedhet.algorithms.hypernets.hypernetwork import GraphHypernetwork
from fedhet.data import ClientData, DataSet
from fedhet.messages import load_into
from fedhet.setup import client_setup
from fedhet.training import Evaluation, Optimisation, Phase, Training, reestimate
from fedhet.utils.randomness import derive_seed, seed_everything, torch_generator


def record_of(done: Any) -> Any:
    return done.rows[-1]["unseen_clients"]


def examples_of(done: Any, client: Any) -> tuple[ClientData, DataSet]:
    return client_setup.data_of(done.info(client)), client_setup.dataset_of(done.config)


def test_hypernetwork_for_a_new_architecture(federate: Any) -> None:
    """Before its first epoch it is the network that the last hypernetwork writes, with statistics of its own images."""
    done = federate(
        "flha-ghn",
        architectures="flha-small-1,flha-small-cnn-4",
        assign="blocks",
        unseen_clients=1,
        unseen_epochs=1,
        unseen_learning_rate=0.01,
        learning_rate=0.001,
        disclose_architecture=True,
        rounds=1,
    )
    data, dataset = examples_of(done, "2")
    models = [client_setup.model_of(done.info(client)) for client in "02"]
    graphs = [layer_graph(model, torch.zeros(2, 1, 8, 8)) for model in models]
    made = GraphHypernetwork(catalogue(graphs), seed=None)
    load_into(made.state_dict(), done.state.model)
    arrays = made.write(made.read(graphs[1]))
    models[1].load_state_dict({**models[1].state_dict(), **arrays})
    reestimate(models[1], data.train.inputs, dataset.transform)
    score = Evaluation(models[1], data.test, dataset.task, dataset.transform).result()
    assert score is not None
    record = record_of(done)
    assert record["own"]["received"][0]["loss"]["weighted"] == pytest.approx(score.loss, rel=1e-5)
    assert record["clients"]["2"]["received"][0] == score.value
    assert record["clients"]["2"]["architecture"] == "flha-small-cnn-4"
    assert len(record["clients"]["2"]["received"]) == len(record["own"]["scratch"]) == 2
    assert "common" not in record


@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_training_from_scratch(federate: Any, rate: float) -> None:
    """And where clients exchange nothing, what one receives is what it has, at the same rate."""
    keys: dict[str, Any] = {"unseen_epochs": 3, "unseen_learning_rate": rate, "test_on": "both", "momentum": 0.5}
    done = federate("local", unseen_clients=1, rounds=1, **keys)
    data, dataset = examples_of(done, "2")
    seed_everything(derive_seed(0, "initial weights", "2"))
    model = client_setup.model_of(done.info("2"))
    phase = Phase(3, Optimisation("sgd", 0.1, momentum=0.5, batch_size=16))
    batches = torch_generator(0, "newcomer", "2")

    def prepare(inputs: Tensor, generator: torch.Generator) -> Tensor:
        return dataset.transform(inputs)

    Training(model, phase, data.train, dataset.task, prepare, generator=batches).result()
    record = record_of(done)
    for test, examples in (("own", data.test), ("common", client_setup.dataset_of(done.config).test)):
        score = Evaluation(model, examples, dataset.task, dataset.transform).result()
        assert score is not None
        assert record[test]["scratch"][-1]["accuracy"]["mean"] == score.value
        assert record[test]["scratch"][-1]["loss"]["mean"] == pytest.approx(score.loss, rel=1e-5)
        assert record[test]["received"][0] == record[test]["scratch"][0]
        assert (record[test]["received"] == record[test]["scratch"]) is not bool(rate)
        assert record[test]["scratch"][0] != record[test]["scratch"][-1]


def test_unseen_clients_do_not_train(federate: Any) -> None:
    done = federate("fedavg", unseen_clients=2, unseen_epochs=2, clients=5)
    alone = federate("fedavg", "alone", clients=5, unseen_clients=3, unseen_epochs=1)
    assert {client for _, client in done.received} == {"0", "1", "2"}
    assert {row.round for row in done.clients if row.client in ("3", "4")} == {3}
    assert done.summary["clients"] == 3
    assert done.summary["examples"]["labelled"] == 3 * 32
    assert list(record_of(alone)["clients"]) == ["2", "3", "4"]
    data, dataset = examples_of(done, "3")
    model = client_setup.model_of(done.info("3"))
    model.load_state_dict({name: torch.tensor(array) for name, array in done.state.model.items()})
    score = Evaluation(model, data.test, dataset.task, dataset.transform).result()
    assert score is not None
    assert record_of(done)["clients"]["3"]["received"][0] == score.value
    received = done.summary["unseen_clients"]["received_accuracy"]
    assert received == [each["accuracy"]["weighted"] for each in record_of(done)["own"]["received"]]


def test_nothing_to_send(federate: Any) -> None:
    networks = {
        "architectures": "mlp,cnn-1-1",
        "assign": "blocks",
        "unseen_clients": 1,
        "unseen_epochs": 1,
        "rounds": 1,
    }
    done = federate("layer-average", **networks, **{"layer-average.by": "architecture"})
    why = "layer-average has no arrays for the client: no client that trained has the same layers"
    assert done.failures == [(2, "2", why)]
    assert "unseen_clients" not in done.summary
    assert done.summary["personal_accuracy"]


def test_a_refused_unseen_client_does_not_end_a_run_with_one_trained_client(tmp_path: Path) -> None:
    def data(client: client_setup.ClientInfo) -> Any:
        inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(client.partition_id or 0))
        return {"train": (inputs, inputs[:, :3].argmax(1)), "test": (inputs, inputs[:, :3].argmax(1))}

    def model(client: client_setup.ClientInfo) -> nn.Module:
        width = 6 + 2 * (client.partition_id or 0)
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    settings = {"method": "fedavg", "clients": 2, "unseen-clients": 1, "rounds": 1, "report": False, "workers": 1}
    run = fedhet.run(settings, model=model, data=data, out=tmp_path / "run", progress=False)
    assert run.summary["status"] == "completed"
    assert [failure["client"] for failure in run.history[-1]["failures"]] == ["1"]
