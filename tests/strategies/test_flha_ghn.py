"""FLHA-GHN: what its halves add to the hypernetwork."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedhet import FedAvg, make_client_app
from fedhet.algorithms.graphs import layer_graph
from fedhet.algorithms.hypernets import heads
from fedhet.algorithms.hypernets.design import catalogue
from fedhet.algorithms.hypernets.hypernetwork import GraphHypernetwork
from fedhet.config import configuration
from fedhet.errors import FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.messages import load_into
from fedhet.models import registry as models
from fedhet.setup import client_setup

MIXED = {"architectures": "mlp,cnn-1-1", "clients": 2, "rounds": 1, "learning_rate": 0.01}


def plain(client=None):
    """Two layers of different types, without biases."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20, bias=False), nn.ReLU(), nn.Linear(20, 10, bias=False))


def written(arrays, model, kind="base-lowrank"):
    """The weights that a hypernetwork's arrays write for a network of digits."""
    graph = layer_graph(model, torch.zeros(2, 1, 8, 8))
    made = GraphHypernetwork(catalogue([graph]), kind, seed=None)
    load_into(made.state_dict(), arrays)
    with torch.no_grad():
        return made.write(made.read(graph))


# ---- equivalences


def test_reduces_to_fedavg(federate, tmp_path, monkeypatch):
    """Layers of different types, dense heads with one entry of z, which is 1 or -1: W = +-(D) + B.

    A step moves D and B alike, so it is FedAvg at twice the rate; whatever else is trained does not change z.
    """
    monkeypatch.setattr(heads, "LATENT", 1)
    latents = heads.Latents.forward
    of_length_one = lambda *args: (latents(*args)[0].sign(), torch.ones(len(args[1])))  # noqa: E731
    monkeypatch.setattr(heads.Latents, "forward", of_length_one)
    settings = {"flha-ghn.head": "dense", "architectures": "plain"}
    monkeypatch.setitem(models._BUILDERS, "plain", lambda input_shape, classes: plain())
    common = {"momentum": 0.5, "lr_schedule": "constant", "weight_decay": 0.0}
    done = federate("flha-ghn", rounds=3, learning_rate=0.05, **settings, **common)
    first = written(done.received[1, "0"]["model"], plain(), "dense")
    mine = written(done.state.model, plain(), "dense")
    config = configuration.resolve(
        {
            **{key: value for key, value in done.config.flat().items() if not key.startswith("flha-ghn.")},
            "method": "fedavg",
            "learning-rate": 0.1,
            "out": "",
            "state-dir": str(tmp_path / "fedavg"),
        },
        strict=False,
    ).replace(origins={})
    fedavg = FedAvg(config, model=plain)
    fedavg.start(LocalGrid(make_client_app(plain), 3), initial_arrays=ArrayRecord(first))
    for name, array in mine.items():
        assert not torch.allclose(array, first[name], atol=1e-2)
        assert np.allclose(array, fedavg.state.model[name], atol=2e-5)


def test_uniform_mean(federate):
    def data(client):
        own = client.partition_id
        inputs = torch.randn(20 + 40 * own, 1, 8, 8, generator=torch.Generator().manual_seed(own))
        labels = inputs.flatten(1)[:, :10].argmax(1)
        return (inputs[:-8], labels[:-8]), (inputs[-8:], labels[-8:])

    done = federate("flha-ghn", model=plain, data=data, rounds=1, learning_rate=0.001, **{"flha-ghn.head": "tiled"})
    assert done.examples == {"0": 12, "1": 52, "2": 92}
    for key, array in done.state.model.items():
        assert np.allclose(array, np.mean([done.sent[1, client]["model"][key] for client in "012"], axis=0), atol=1e-6)


# ---- what a reply tells


def test_replies_have_equal_names(federate):
    done = federate("flha-ghn", **MIXED)
    sent = {client: done.sent[1, client]["model"] for client in "01"}
    received = done.received[1, "0"]["model"]
    assert sent["0"].keys() == sent["1"].keys()
    heads = [key for key in received if key.startswith("heads.")]
    changed = [
        {key.split(".")[1] for key in heads if not np.array_equal(each[key], received[key])} for each in sent.values()
    ]
    assert changed == [{"l64_200", "l200_200", "l200_10"}, {"c1_32_k3_s1", "l512_10"}]


def test_layers_without_a_head(federate):
    with pytest.raises(FedhetError, match="set flha-ghn.head = tiled") as refused:
        federate("flha-ghn", model=plain, architectures="cnn-1-1", **{"flha-ghn.head": "dense"})
    assert "l64_20" not in str(refused.value), "the server is not told the types of a client's layers"


# ---- unseen clients, statistics, refinement


def test_refinement(federate, phases, changed):
    done = federate("flha-ghn", architectures="mlp", rounds=1, learning_rate=0.002)
    refined = [each for each in phases if each[0].module is None]
    trained = [each for each in phases if each[0].module is not None]
    assert len(trained) == 3
    assert len(refined) == 9  # before training, after it, and at the end
    for phase, before, after in refined:
        assert (phase.epochs, phase.optimisation.learning_rate) == (1, 0.001)
        assert changed(before, after) == {"head.weight", "head.bias"}
    expected = written(done.state.model, client_setup.model_of(done.info()))
    _, before, after = refined[6]
    assert all(torch.allclose(before[name], array, atol=1e-6) for name, array in expected.items())
    assert all(torch.equal(done.saved("0")[name], array) for name, array in after.items()), "what is scored is saved"
