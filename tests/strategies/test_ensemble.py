"""The ensemble: the mean of the clients' predictions, whatever their architectures."""

import pytest
import torch
from torch import nn

from fedhet import models
from fedhet.errors import FedhetError
from fedhet.setup import client_setup
from fedhet.strategies.families.ensembles import Mean
from fedhet.training import Evaluation


def test_mean_prediction_of_different_networks(federate):
    done = federate(
        "ensemble",
        partition="dirichlet",
        samples_per_client=0,
        clients=4,
        architectures="mlp,cnn-1-1",
        rounds=1,
        local_epochs=8,
        learning_rate=0.05,
        momentum=0.9,
    )
    rows, network, digits = done.rows, done.global_model, client_setup.dataset_of(done.config)
    assert [type(member).__name__ for member in network.members] == ["MLP", "ConvNet"] * 2
    network.eval()
    with torch.no_grad():
        inputs = digits.transform(digits.test.inputs)
        mean = sum(member(inputs).softmax(-1) for member in network.members) / 4
        torch.testing.assert_close(network(inputs).exp(), mean)
    common = rows[-1]["common"]
    score = Evaluation(network, digits.test, digits.task, digits.transform).result()
    assert common["received"]["accuracy"] == score.value
    assert common["received"]["accuracy"] > common["trained"]["accuracy"]["weighted"]
    assert rows[-1]["bytes_down"] == rows[1]["bytes_down"] == 0
    assert done.summary["common"]["received"]["accuracy"] == common["received"]["accuracy"]
    assert sorted(path.name for path in (done.folder / "models").iterdir()) == [f"{i}.safetensors" for i in "0123"]


def test_networks_that_the_server_cannot_build(federate):
    def model(client):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

    with pytest.raises(FedhetError, match=r"cannot build a network like client 0's.*or model=\.\.\. of the strategy"):
        federate("ensemble", "disclosed", model=model)
    with pytest.raises(FedhetError, match=r"that the server builds .its 1.weight is .*, the other's is missing"):
        federate("ensemble", "secret", model=model, disclose_architecture=False)
    assert federate("ensemble", "alone", model=model, test_on="local").failures == []


def test_mean_of_probabilities_of_labels():
    members = [models.build("mlp", (1, 8, 8), 5) for _ in range(3)]
    inputs = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(
        torch.sigmoid(Mean(members, "multi-label")(inputs)),
        sum(torch.sigmoid(member(inputs)) for member in members) / 3,
    )
