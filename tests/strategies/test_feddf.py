"""FedDF, against a plain computation from its paper."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedhet
from fedhet.algorithms.alignment import targets
from fedhet.errors import FedhetError
from fedhet.models import registry as models
from fedhet.results.history import read_run
from fedhet.results.terminal import headline
from fedhet.setup import client_setup
from fedhet.strategies.feddf import Keys as FedDFKeys
from fedhet.training import Evaluation
from fedhet.utils.randomness import seeded, torch_generator
from tests.strategies.by_hand import (
    UNLIKE,
    WHO,
    assert_equal,
    divergence,
    live,
    logits,
    own_network,
    rounds_of,
    stepped,
    tanh_network,
)

SETTINGS = UNLIKE | {"batch_size": 12}
FEW = {"public_samples": 48, "feddf.server-steps": 7}
RATE = 0.02


@pytest.fixture
def double(monkeypatch):
    """Scores travel in float32, and a network of float64 for the server has a name."""
    monkeypatch.setitem(targets.DTYPES, "values", "float32")
    monkeypatch.setitem(models._BUILDERS, "server-float64", lambda input_shape, classes: tanh_network(5, classes))


def sgd(state, order, inputs, wanted, epochs, size, loss):
    """A phase of a client's training."""
    velocity = {}
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs), generator=order).split(size):
            stepped(state, velocity, loss(logits(state, inputs[rows]), wanted[rows]))


def adam(state, order, inputs, wanted, steps, size):
    """A round of the server's training."""
    optimizer, number = torch.optim.Adam(state.values()), 0
    while number < steps:
        for rows in torch.randperm(len(inputs), generator=order).split(size)[: steps - number]:
            optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * number / steps)) / 2
            optimizer.zero_grad()
            divergence(logits(state, inputs[rows]), wanted[rows]).backward()
            optimizer.step()
            number += 1


@pytest.mark.parametrize(("teach", "who"), [(False, "all"), (True, "all"), (True, "two")])
@pytest.mark.usefixtures("double")
def test_three_rounds_by_hand(federate, teach, who, monkeypatch):
    monkeypatch.setattr(FedDFKeys, "subset", 45)
    monkeypatch.setattr(FedDFKeys, "public_batch", 20)
    keys = {"feddf.server-model": "server-float64", "feddf.server-learning-rate": RATE, "feddf.teach": teach}
    done = federate("feddf", model=own_network, **SETTINGS, **FEW, **keys, **WHO[who])
    assert done.failures == []
    seed, transform = done.config.seed, client_setup.dataset_of(done.config).transform
    public = transform(client_setup.public_dataset(done.config).inputs).double()
    own = {client: live(own_network(done.info(client)).state_dict()) for client in "012"}
    with seeded(seed, "initial weights", "server"):
        server = live(tanh_network(5).state_dict())
    taught = None
    for round, present in enumerate(rounds_of(done), 1):
        rows, sent = torch.from_numpy(done.received[round, present[0]]["next-rows"]["rows"].copy()).long(), []
        for client in present:
            state = own[client]
            part, order = client_setup.data_of(done.info(client)).train, torch_generator(seed, "batches", client, round)
            if taught:
                sgd(state, order, *taught, 1, 20, divergence)
            inputs = transform(part.inputs[:]).double()
            sgd(state, order, inputs, part.labels, done.config.local_epochs, 12, F.cross_entropy)
            sent.append(logits(state, public[rows]).detach().float().double())
        mean = (sum(sent) / len(sent)).float()
        adam(server, torch_generator(seed, "server", round), public[rows], mean, 7, 20)
        taught = (public[rows], logits(server, public[rows]).detach().float()) if teach else None
    for client, state in own.items():
        assert_equal(done.saved(client), state)
    assert_equal(done.saved("global"), server)


def test_network_of_the_server(federate):
    keys = {"feddf.server-model": "mlp-20", "feddf.server-steps": 100, "public_samples": 300, "samples_per_client": 0}
    keys["feddf.server-learning-rate"] = 0.01
    done = federate("feddf", architectures="cnn-2-2,mlp-30", momentum=0.9, local_epochs=4, **keys)
    network, dataset = done.global_model, client_setup.dataset_of(done.config)
    assert {name: tensor.shape for name, tensor in network.state_dict().items()} == {
        name: tensor.shape for name, tensor in models.build("mlp-20", (1, 8, 8), 10).state_dict().items()
    }
    assert all(torch.equal(done.saved("global")[name], tensor) for name, tensor in network.state_dict().items())
    score = Evaluation(network, dataset.test, dataset.task, dataset.transform).result().value
    assert done.rows[-1]["common"]["received"]["accuracy"] == score
    assert f"the server's model {score:.3f} on the common test set" in headline(read_run(done.folder))
    assert score > 0.5


def data(label):
    """A data function with 40 examples to train and 20 to test on."""

    def of(client):
        inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(client.partition_id))
        labels = label(inputs)
        return {"train": (inputs[:40], labels[:40]), "test": (inputs[40:], labels[40:]), "public": inputs.flip(1)}

    return of


def positive(inputs):
    return (inputs[:, 0] + inputs[:, 1] > 0).long()


def two_labels(inputs):
    return (inputs[:, :2] > 0).float()


@pytest.mark.parametrize(("label", "outputs"), [(positive, 1), (two_labels, 2)], ids=["one logit", "many labels"])
def test_tasks_of_users(federate, label, outputs):
    def model(client):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))

    public = torch.randn(200, 4, generator=torch.Generator().manual_seed(9))
    keys = {"feddf.server-model": "mlp", "feddf.server-steps": 100, "local_epochs": 10, "feddf.teach": True}
    done = federate("feddf", model=model, data=data(label), public=public, **keys)
    assert done.failures == []
    with torch.no_grad():
        scores = done.global_model.eval()(public)
    predicted = scores.argmax(1) if outputs == 1 else (scores > 0).float()
    assert (predicted == label(public)).float().mean() > 0.8


def test_the_servers_network_of_a_binary_task_is_scored_on_the_common_test_set(tmp_path):
    inputs = torch.randn(400, 4, generator=torch.Generator().manual_seed(9))
    keys = {"method": "feddf", "clients": 2, "rounds": 2, "public-samples": 200, "feddf.server-steps": 200}

    def model(client):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    pooled = inputs, positive(inputs)
    run = fedhet.run(keys, model=model, data=pooled, task="binary", out=tmp_path / "run", progress=False)
    assert run.history[-1]["common"]["received"]["accuracy"] > 0.8


def test_server_without_public_dataset(federate):
    def model(client):
        return nn.Linear(4, 2)

    with pytest.raises(FedhetError, match="needs public data: pass it as public=... to the strategy or"):
        federate("feddf", model=model, data=data(positive), public_samples=0)
