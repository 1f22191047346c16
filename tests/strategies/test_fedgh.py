"""FedGH, FedRE and FedTGP, against plain computations from their papers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.client_apps.fedre import FedRE
from fedhet.setup import client_setup
from fedhet.strategies.fedtgp import Keys as FedTGPKeys
from fedhet.utils.randomness import seeded, torch_generator
from tests.strategies.by_hand import UNLIKE, WHO, assert_equal, live, own_network, rounds_of, stepped

SETTINGS = UNLIKE | {"batch_size": 12}
WIDTH, WEIGHT, RATE = 6, 0.7, 0.2


def first_weights(done, client):
    """A client's first weights: those of its body, of the projection, and of a narrower head."""
    state = dict(own_network(done.info(client)).state_dict())
    wide, _ = state.pop("3.weight").shape[1], state.pop("3.bias")
    with seeded(done.config.seed, "initial weights", client):
        layer = nn.Linear(wide, WIDTH, dtype=torch.float64)
        state |= {f"3.projection.{name}": each for name, each in layer.state_dict().items()}
        head = nn.Linear(WIDTH, 10, dtype=torch.float64)
    state |= {"3.head.weight": head.weight, "3.head.bias": head.bias}
    return live(state)


def servers_network(done, *layers):
    """The weights that the server starts from."""
    with seeded(done.config.seed, "initial weights", "server"):
        return [parameter for layer in layers for parameter in live(layer().double().state_dict()).values()]


def phi(state, inputs):
    """The representation, projected to WIDTH entries."""
    hidden = torch.tanh(inputs.flatten(1) @ state["1.weight"].T + state["1.bias"])
    return hidden @ state["3.projection.weight"].T + state["3.projection.bias"]


def outputs(state, features):
    return features @ state["3.head.weight"].T + state["3.head.bias"]


def trained(done, client, round, state, extra=lambda features, labels: 0.0):
    """Local training, and then the client's means by class with their numbers, as float32 numbers."""
    part, transform = client_setup.data_of(done.info(client)).train, client_setup.dataset_of(done.config).transform
    inputs, labels = transform(part.inputs[:]).double(), part.labels
    order, velocity = torch_generator(done.config.seed, "batches", client, round), {}
    for _ in range(done.config.local_epochs):
        for rows in torch.randperm(len(labels), generator=order).split(done.config.batch_size):
            features = phi(state, inputs[rows])
            loss = F.cross_entropy(outputs(state, features), labels[rows]) + extra(features, labels[rows])
            stepped(state, velocity, loss)
    with torch.no_grad():
        features = phi(state, inputs)
        return [(features[labels == c].mean(0).float().double(), c) for c in labels.unique().tolist()]


def served(done, round, epochs, weights, means, loss):
    """SGD at the server on the clients' means; each is one example."""
    vectors, classes = torch.stack([mean for mean, _ in means]), torch.tensor([c for _, c in means])
    order = torch_generator(done.config.seed, "server", round)
    for _ in range(epochs):
        for rows in torch.randperm(len(means), generator=order).split(done.config.batch_size):
            gradients = torch.autograd.grad(loss(weights, vectors[rows], classes[rows]), weights)
            for place, gradient in enumerate(gradients):
                weights[place] = (weights[place] - RATE * gradient).detach().requires_grad_()


@pytest.mark.parametrize("who", ["all", "two"])
def test_three_rounds_of_fedgh_by_hand(federate, who):
    keys = {"fedgh.width": WIDTH, "fedgh.server-learning-rate": RATE}
    done = federate("fedgh", model=own_network, **SETTINGS, **keys, **WHO[who])
    assert done.failures == []
    own = {client: first_weights(done, client) for client in "012"}
    head = servers_network(done, lambda: nn.Linear(WIDTH, 10))

    def loss(weights, vectors, classes):
        return F.cross_entropy(vectors @ weights[0].T + weights[1], classes)

    for round, present in enumerate(rounds_of(done), 1):
        means = []
        for client in present:
            sent = [each.detach().float().double() for each in head]
            own[client] |= live({"3.head.weight": sent[0], "3.head.bias": sent[1]})
            means += trained(done, client, round, own[client])
        served(done, round, 1, head, means, loss)
    for client, state in own.items():
        assert_equal(done.saved(client), state)
    assert_equal(done.state.learner, dict(zip(("weight", "bias"), head, strict=True)))


@pytest.mark.parametrize("who", ["all", "two"])
def test_three_rounds_of_fedre_by_hand(federate, who):
    keys = {"fedre.width": WIDTH, "fedre.server-learning-rate": RATE}
    done = federate("fedre", model=own_network, **SETTINGS, **keys, **WHO[who])
    assert done.failures == []
    own = {client: first_weights(done, client) for client in "012"}
    head = servers_network(done, lambda: nn.Linear(WIDTH, 10))
    for round, present in enumerate(rounds_of(done), 1):
        pairs = []
        for client in present:
            sent = [each.detach().float().double() for each in head]
            own[client] |= live({"3.head.weight": sent[0], "3.head.bias": sent[1]})
            means = trained(done, client, round, own[client])
            generator = torch_generator(done.config.seed, "mixing weights", client, round)
            drawn = torch.rand(len(means), dtype=torch.float64, generator=generator)
            mixed, label = torch.zeros(WIDTH).double(), torch.zeros(10).double()
            for weight, (mean, c) in zip(drawn / drawn.sum(), means, strict=True):
                mixed += weight * mean
                label[c] += weight
            pairs.append((mixed.float().double(), label.float().double()))
            assert set(done.sent[round, client]["prototypes"]) == {"means", "classes"}
            np.testing.assert_allclose(done.sent[round, client]["prototypes"]["classes"][0], label, rtol=1e-6)
        order = torch.randperm(len(pairs), generator=torch_generator(done.config.seed, "server", round))
        loss = sum(
            weight * F.cross_entropy(pairs[place][0] @ head[0].T + head[1], torch.tensor(c))
            for place in order.tolist()
            for c, weight in enumerate(pairs[place][1])
        )
        gradients = torch.autograd.grad(loss, head)
        head = [(each - RATE * g).detach().requires_grad_() for each, g in zip(head, gradients, strict=True)]
    for client, state in own.items():
        assert_equal(done.saved(client), state)
    assert_equal(done.state.learner, dict(zip(("weight", "bias"), head, strict=True)))


@pytest.mark.parametrize(
    ("threshold", "who"), [(100.0, "all"), (0.3, "all"), (100.0, "two")], ids=["widest", "threshold", "two of three"]
)
def test_three_rounds_of_fedtgp_by_hand(federate, threshold, who, monkeypatch):
    monkeypatch.setattr(FedTGPKeys, "server_epochs", 5)
    monkeypatch.setattr(FedTGPKeys, "threshold", threshold)
    keys = {"fedtgp.width": WIDTH, "fedtgp.weight": WEIGHT, "fedtgp.server-learning-rate": RATE}
    done = federate("fedtgp", model=own_network, **SETTINGS, **keys, **WHO[who])
    assert done.failures == []
    own, known = {client: first_weights(done, client) for client in "012"}, []
    layers = [lambda: nn.Embedding(10, WIDTH), lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.Linear(WIDTH, WIDTH)]
    weights, margins = servers_network(done, *layers), []

    def prototypes(weights):
        embedding, hidden, bias, last, last_bias = weights
        return torch.relu(embedding @ hidden.T + bias) @ last.T + last_bias

    def pull(features, labels):
        if not known:
            return 0.0
        wanted = torch.stack([known[c] for c in labels.tolist()])
        return WEIGHT * (features - wanted).square().sum(1).mean() / WIDTH

    for round, present in enumerate(rounds_of(done), 1):
        means = [mean for client in present for mean in trained(done, client, round, own[client], pull)]
        by_class = {c: torch.stack([mean for mean, other in means if other == c]).mean(0) for _, c in means}
        apart = [(one - other).norm().item() for one in by_class.values() for other in by_class.values()]
        margins.append(min(max(apart), threshold))

        def loss(weights, vectors, classes, margin=margins[-1]):
            distances = (vectors[:, None] - prototypes(weights)[None]).square().sum(2).sqrt()
            each = []
            for row, c in zip(distances, classes.tolist(), strict=True):
                near = (-(row[c] + margin)).exp()
                others = sum((-row[k]).exp() for k in range(10) if k != c)
                each.append(-(near / (near + others)).log())
            return sum(each) / len(each)

        served(done, round, 5, weights, means, loss)
        known = list(prototypes(weights).detach().float().double())
    assert ({*margins} == {threshold}) == (threshold == 0.3), "the threshold counts in one case alone"
    for client, state in own.items():
        assert_equal(done.saved(client), state)
    names = ("embedding.weight", "hidden.weight", "hidden.bias", "output.weight", "output.bias")
    assert_equal(done.state.learner, dict(zip(names, weights, strict=True)))
    np.testing.assert_allclose(done.state.prototypes["means"], torch.stack(known).numpy(), rtol=1e-6)


def test_weights_of_a_mix_sum_to_1(federate, monkeypatch):
    end = FedRE.end

    def doubled(half, payload):
        reply = end(half, payload)
        if half.client.name == "1":
            reply.arrays["prototypes"]["classes"] *= 2
        return reply

    monkeypatch.setattr(FedRE, "end", doubled)
    done = federate("fedre", **{"fedre.width": 16, "rounds": 1})
    ((_, client, reason),) = done.failures
    assert (client, "weights of classes that sum to 1" in reason) == ("1", True)


def test_diverged_training_at_the_server(federate, caplog):
    done = federate("fedgh", **{"fedgh.width": 16, "fedgh.server-learning-rate": 1e30, "rounds": 1})
    assert done.failures == []
    assert "the server's network is unchanged: training diverged" in caplog.text
    assert max(abs(array).max() for array in done.state.learner.values()) < 1


def test_unsuited_heads_are_refused(federate):
    def without_bias(client):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=client.partition_id != 1))

    done = federate("fedgh", model=without_bias)
    ((_, client, reason),) = {(0, *each[1:]) for each in done.failures}
    assert client == "1"
    assert "fedgh needs an nn.Linear with a bias and 10 outputs as head" in reason
