"""FedSimCLR, FedCA and FedSimSiam: their losses against plain computations, views, and the linear classifier."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import fedhet
from fedhet.client.app import make_client_app
from fedhet.data import load
from fedhet.data.views import random_views, two_views
from fedhet.errors import DataError, FedhetError
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.messages import Payload
from fedhet.methods import registry
from fedhet.models.representation import Representation
from fedhet.training import Step, forward

N, TEMPERATURE = 5, 0.3


class Fake:
    """What a client side reads of a client."""

    privacy = None

    def __init__(self, representation, **keys):
        self.representation = representation
        self.model, self.head, self.memory = representation.model, representation.head, {}
        self.device, self.to_device = torch.device("cpu"), lambda tensor: tensor
        self.config = type("Config", (), {"options": type("Keys", (), keys)})


def side_and_step(method, payload=None, **keys):
    """The client side of a method on a small network of float64, and the step of a batch with two views."""
    torch.manual_seed(0)
    side = registry.client_side(method)
    config = type("Config", (), {"head": "", "family": method, "options": type("Keys", (), {"width": 8, **keys})})
    network = side.adapt(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double(), config)
    client = Fake(Representation(network), **keys)
    terms = side(client).terms(payload or Payload())
    inputs = torch.randn(2 * N, 6, dtype=torch.float64)
    outputs, captured = forward(network, inputs, terms[0].captures)
    none = torch.empty(N)
    return *terms, Step(0, network, dict(network.named_parameters()), inputs, none, none, outputs, captured)


def assert_same(term, step, expected):
    names, parameters = zip(*step.parameters.items(), strict=True)
    loss = term(step)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    ours, theirs = (torch.autograd.grad(value, parameters, allow_unused=True) for value in (loss, expected))
    for name, one, other in zip(names, ours, theirs, strict=True):
        assert (one is None) == (other is None) == name.startswith("2.head"), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("others", [0, 4])
def test_loss_of_fedsimclr_and_fedca(others):
    term, step = side_and_step("fedca" if others else "fedsimclr", temperature=TEMPERATURE, beta=0)
    dictionary = torch.randn(others, 8, dtype=torch.float64)
    if others:
        term.constants["dictionary"] = dictionary
    z = step.model[2].projector(torch.tanh(step.model[0](step.inputs)))
    cosine = (z @ z.T) / z.norm(dim=1)[:, None] / z.norm(dim=1)
    to_others = (z @ dictionary.T) / z.norm(dim=1)[:, None] / dictionary.norm(dim=1)
    losses = []
    for k in range(2 * N):
        partner = (k + N) % (2 * N)
        total = sum((cosine[k, m] / TEMPERATURE).exp() for m in range(2 * N) if m != k)
        total = total + (to_others[k] / TEMPERATURE).exp().sum()
        losses.append(-((cosine[k, partner] / TEMPERATURE).exp() / total).log())
    assert_same(term, step, sum(losses) / len(losses))


def test_loss_of_fedsimsiam():
    term, step = side_and_step("fedsimsiam")
    z = step.model[2].projector(torch.tanh(step.model[0](step.inputs)))
    p, z = step.model[2].predictor(z), z.detach()
    cosine = [(p[k] @ z[(k + N) % (2 * N)]) / p[k].norm() / z[(k + N) % (2 * N)].norm() for k in range(2 * N)]
    first, second = -sum(cosine[:N]) / N, -sum(cosine[N:]) / N
    assert_same(term, step, first / 2 + second / 2)


def test_alignment_of_fedca():
    base = {"0.weight": torch.randn(7, 6, dtype=torch.float64), "0.bias": torch.randn(7, dtype=torch.float64)}
    payload = Payload({"base": {name: array.numpy() for name, array in base.items()}})
    _, term, step = side_and_step("fedca", payload, temperature=TEMPERATURE, beta=0.4)
    phi = torch.tanh(step.model[0](step.inputs))
    theirs = torch.tanh(step.inputs @ base["0.weight"].T + base["0.bias"])
    apart = phi / phi.norm(dim=1)[:, None] - theirs / theirs.norm(dim=1)[:, None]
    loss, expected = term(step), 0.4 * apart.square().sum(1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    parameters = [step.parameters["0.weight"], step.parameters["0.bias"]]
    for one, two in zip(*(torch.autograd.grad(each, parameters) for each in (loss, expected)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_clients_of_fedca_receive_the_projections_of_others(federate):
    keys = {"width": 8, "probe-epochs": 1, "samples": 5, "base-epochs": 1}
    done = federate("fedca", public_samples=40, **{f"fedca.{key}": value for key, value in keys.items()})
    assert done.failures == []
    assert "dictionary" not in done.received[1, "0"]
    sent = [done.sent[1, client]["dictionary"]["projections"] for client in "12"]
    assert (done.received[2, "0"]["dictionary"]["projections"] == np.concatenate(sent)).all()
    assert sent[0].shape == (5, 8)
    base = done.received[1, "0"]["base"]
    assert set(base) == set(done.received[1, "0"]["model"])
    assert any((base[name] != array).any() for name, array in done.received[1, "0"]["model"].items())
    assert all((base[name] == array).all() for name, array in done.received[2, "1"]["base"].items())


def test_views_are_drawn_from_the_generator():
    digits, rows = load("digits").train.inputs[:6], torch.randn(6, 4)
    for inputs in (digits, digits.float() / 16, digits.expand(-1, 3, -1, -1), rows):
        first, again = (two_views(random_views)(inputs, torch.Generator().manual_seed(3)) for _ in range(2))
        assert (first.shape, first.dtype) == ((12, *inputs.shape[1:]), inputs.dtype)
        assert torch.equal(first, again)
        assert not torch.equal(first[:6], first[6:])
    with pytest.raises(DataError, match="values from 0 to 1"):
        random_views(digits.float(), torch.Generator())
    with pytest.raises(DataError, match="return a function `augment` with the data"):
        random_views(torch.ones(2, 3, dtype=torch.long), torch.Generator())


SMALL = {"fedsimclr.width": 8, "fedsimclr.probe-epochs": 3, "rounds": 1}


@pytest.mark.parametrize("projector", ["shared", "own"])
def test_phases_train_the_encoder_and_evaluation_only_the_head(federate, phases, changed, projector):
    done = federate("fedsimclr", clients=1, **SMALL, **{"fedsimclr.projector": projector, "fedsimclr.labels": 0.25})
    assert done.failures == []
    names = [changed(before, after) for _, before, after in phases]
    heads = [each for each in names if any(name.endswith("head.head.weight") for name in each)]
    encoders = [each for each in names if each not in heads]
    assert all(each == {"head.head.weight", "head.head.bias"} for each in heads)
    assert len(encoders) == 1
    assert {"body.1.weight", "head.projector.0.weight"} <= encoders[0]
    sizes = {len(phase.examples) for phase, *_ in phases if phase.examples is not None}
    assert sizes == {8}  # a quarter of 32
    sent = done.sent[1, "0"]["model"]
    assert any("projector" in name for name in sent) == (projector == "shared")
    assert not any("head.head" in name for name in sent)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("allow", [None, "weights,statistics,metrics"])
def test_labels_at_a_node_are_as_many_as_it_requires(phases, monkeypatch, tmp_path, allow):
    """A score by a classifier that is trained on one example would disclose it."""
    monkeypatch.setattr("fedhet.server.federation.proof", lambda text: "guessed")
    grid = LocalGrid(make_client_app(), 1)
    node = {"state-dir": str(tmp_path), "min-examples": 10} | ({"allow": allow} if allow else {})
    grid._contexts[FIRST_NODE].node_config.update(node)
    settings = {"samples_per_client": 200, "batch_size": 50, "architectures": "mlp", "local_epochs": 1}
    fedhet.FedSimCLR(rounds=1, width=8, probe_epochs=1, labels=0.001, **settings).start(grid)
    labelled = next(phase.examples for phase, *_ in phases if phase.examples is not None)
    assert min(map(len, labelled.groups or [labelled])) >= 10


def own_data(train_labels, **further):
    digits = load("digits")
    inputs, labels = digits.train.inputs[:].flatten(1) / 16, digits.train.labels

    def data(partition_id):
        rows = slice(40 * partition_id, 40 * partition_id + 40)
        train = inputs[rows], train_labels(labels[rows])
        return {"train": train, "test": (inputs[200:300], labels[200:300]), **further}

    return data, (inputs[300:400], labels[300:400])


def network():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def test_clients_without_labels(federate):
    data, public = own_data(lambda labels: None)
    keys = {"fedsimclr.probe": "public", **SMALL, "fedsimclr.probe-epochs": 30}
    data = (lambda made: lambda partition_id: made(partition_id) | {"public": public})(data)
    done = federate("fedsimclr", model=network, data=data, public=None, **keys)
    assert done.failures == []
    assert done.clients[-1].accuracy > 0.5
    for method, message in (
        ("fedsimclr", "set fedsimclr.probe = public"),
        ("fedavg", "no labels (or -1), from which fedavg learns: give them labels"),
    ):
        with pytest.raises(FedhetError, match=re.escape(message)):
            federate(method, method, model=network, data=data, **(SMALL if method == "fedsimclr" else {}))


def test_some_labels_and_an_own_augmentation(federate, phases):
    seen = []

    def augment(inputs, generator):
        seen.append(len(inputs))
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)

    def some(labels):
        return torch.where(torch.arange(len(labels)) % 4 == 0, labels, -1)

    data, _ = own_data(some, augment=augment)
    done = federate("fedsimclr", model=network, data=data, **SMALL)
    assert done.failures == []
    assert done.summary["examples"] == {"labelled": 0, "unlabelled": 40 * done.config.clients}
    assert seen
    assert {len(phase.examples) for phase, *_ in phases if phase.examples is not None} == {10}
    apart = federate("fedsimclr", "validation", model=network, data=data, validation=0.2, **SMALL)
    assert apart.failures == []
    assert len(apart.summary["validation_accuracy"]) > 0
    with pytest.raises(FedhetError, match="30 of its 40 training examples have no labels"):
        federate("local", "alone", model=network, data=data, public=None, rounds=1)
