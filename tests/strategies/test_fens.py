"""FENS, against plain computations from its paper."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fedhet
from fedhet import load_model
from fedhet.setup import client_setup
from fedhet.strategies.fens import FENS
from fedhet.utils.randomness import seeded, torch_generator
from tests.strategies.by_hand import AT_ONCE, UNLIKE

SETTINGS = UNLIKE | AT_ONCE | {"rounds": 4, "samples_per_client": 24, "architectures": "mlp-20,mlp-30"}
RATE = 0.02


def held_out(done, client):
    """Transformed examples of a client on which its network has not trained, and their labels."""
    train = client_setup.data_of(done.info(client)).train
    order = torch.randperm(len(train), generator=torch_generator(done.config.seed, "held out", client))
    rows = order[: round(0.25 * len(train))]
    return client_setup.dataset_of(done.config).transform(train.inputs[rows]), train.labels[rows]


def test_rounds_by_hand(federate):
    keys = {"fens.held-out": 0.25, "fens.server-learning-rate": RATE}
    done = federate("fens", **SETTINGS, **keys)
    assert done.failures == []
    assert [set(done.received[round, "0"]) for round in (1, 2, 3)] == [set(), {"members", "aggregator"}, {"aggregator"}]
    members = [done.network(client).double() for client in "012"]
    with seeded(done.config.seed, "initial weights", "server"):
        hidden, output = nn.Linear(30, 6), nn.Linear(6, 10)
    names = ["aggregator.0.weight", "aggregator.0.bias", "aggregator.2.weight", "aggregator.2.bias"]
    zeros = (torch.zeros_like(each) for each in (output.weight, output.bias))
    values = [each.detach().double() for each in (hidden.weight, hidden.bias, *zeros)]
    first, second = ([torch.zeros_like(each) for each in values] for _ in range(2))
    for _ in range(3):
        total = [torch.zeros_like(each) for each in values]
        for client in "012":
            inputs, labels = held_out(done, client)
            outputs = torch.cat([member(inputs.double()) for member in members], 1).detach()
            w, a, v, b = (each.clone().requires_grad_() for each in values)
            mean = outputs.unflatten(1, (3, 10)).mean(1)
            loss = F.cross_entropy(mean + torch.relu(outputs @ w.T + a) @ v.T + b, labels)
            total = [one + other / 3 for one, other in zip(total, torch.autograd.grad(loss, (w, a, v, b)), strict=True)]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, total, strict=True)]
        second = [0.99 * m + 0.01 * g**2 for m, g in zip(second, total, strict=True)]
        values = [w - RATE * m / (s.sqrt() + 1e-3) for w, m, s in zip(values, first, second, strict=True)]
    for name, value in zip(names, values, strict=True):
        np.testing.assert_allclose(done.state.aggregator[name], value, rtol=0, atol=1e-5, err_msg=name)
    examples, _ = held_out(done, "1")
    with torch.no_grad():
        outputs = torch.cat([member(examples.double()) for member in members], 1)
        expected = (
            outputs.unflatten(1, (3, 10)).mean(1)
            + torch.relu(outputs @ values[0].T + values[1]) @ values[2].T
            + values[3]
        )
        torch.testing.assert_close(load_model(done.folder, "1")(examples).double(), expected, rtol=0, atol=1e-3)


def test_a_client_that_lost_the_networks_gets_them_again(federate, tmp_path):
    def lose(round, client):
        if (round, client) == (3, "1"):
            for file in (tmp_path / "run" / "state" / "clients" / "1").iterdir():
                file.unlink()

    done = federate("fens", before=lose, **SETTINGS | {"rounds": 5})
    assert done.failures == [(3, "1", "its state of round 2 is lost; its handshake is repeated")]
    assert ["members" in done.received[round, "1"] for round in (2, 3, 4, 5)] == [True, False, True, False]


def test_unlike_networks_of_the_clients_own_are_refused(federate):
    def model(client):
        width = 8 + client.partition_id // 2
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    settings = {key: value for key, value in SETTINGS.items() if key != "architectures"}
    done = federate("fens", model=model, **settings)
    ((_, client, reason),) = {failure for failure in done.failures if failure[0] == 0}
    assert (client, "equal ones of your own" in reason) == ("2", True)


@pytest.mark.parametrize("name", ["vgg9", "mlp-8,mlp-8", "torchvision/resnet18"])
def test_a_network_with_a_false_name_is_silent(name, federate, monkeypatch):
    aggregate = FENS.aggregate_fit

    def renamed(strategy, round, replies):
        if round == 1:
            strategy.state.clients["1"].architecture = name
        return aggregate(strategy, round, replies)

    monkeypatch.setattr(FENS, "aggregate_fit", renamed)
    done = federate("fens", **SETTINGS)
    assert done.failures == []
    network = load_model(done.folder, "0")
    assert [*network.members] == ["0", "2"]


def test_examples_that_a_loader_makes_tensors_of(tmp_path):
    def rows(batch):
        return torch.tensor([row for row, _ in batch]), torch.tensor([label for _, label in batch])

    def data(client):
        loader = DataLoader([([float(i), 1.0], i % 2) for i in range(30)], batch_size=8, collate_fn=rows)
        return loader, loader

    settings = {"method": "fens", "rounds": 2, "clients": 2, "local-epochs": 1, "workers": 1, "report": False}
    run = fedhet.run(settings, model=lambda: nn.Linear(2, 2), data=data, out=tmp_path / "run", progress=False)
    assert run.summary["failures"] == 0
