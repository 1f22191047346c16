"""FML, FedKD and FedMRL, whose clients train a second network, against plain computations from their papers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.models import registry as models
from fedhet.strategies import fedkd
from fedhet.utils.randomness import seeded
from tests.strategies.by_hand import (
    AT_ONCE,
    UNLIKE,
    WHO,
    assert_equal,
    divergence,
    examples_of,
    head,
    hidden,
    live,
    logits,
    mean_of,
    own_network,
    own_width,
    rounds_of,
    stepped,
    tanh_network,
)

SETTINGS = UNLIKE | AT_ONCE


@pytest.fixture
def double(monkeypatch):
    """Weights travel in float64, and a small network of that dtype has a name."""
    monkeypatch.setitem(models._BUILDERS, "small-float64", lambda input_shape, classes: tanh_network(9, classes))


# ---- FML
ALPHA, BETA = 0.6, 0.3


def test_three_rounds_of_fml_by_hand(federate, double):
    keys = {"fml.shared-model": "small-float64", "fml.alpha": ALPHA, "fml.beta": BETA}
    done = federate("fml", model=own_network, **{**SETTINGS, **keys})
    assert done.failures == []
    shared = {name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()}
    own = {client: live(own_network(done.info(client)).state_dict()) for client in "012"}
    for _ in range(3):
        sent, weights = {}, {}
        for client in "012":
            inputs, labels = examples_of(done, client)
            small, mine = live(shared), own[client]
            velocities = {}, {}
            for _ in range(SETTINGS["local_epochs"]):
                theirs, ours = logits(small, inputs), logits(mine, inputs)
                loss = ALPHA * F.cross_entropy(ours, labels) + (1 - ALPHA) * divergence(ours, theirs)
                shared_loss = BETA * F.cross_entropy(theirs, labels) + (1 - BETA) * divergence(theirs, ours)
                stepped(mine, velocities[0], loss)
                stepped(small, velocities[1], shared_loss)
            sent[client], weights[client] = small, len(labels)
        shared = mean_of(sent, weights)
    assert_equal(done.state.model, shared)
    for client in "012":
        assert_equal(done.saved(client), own[client])


# ---- FedKD
KEYS = {"fedkd.shared-model": "small-float64"}


def projector(width, seed):
    """A client's first projector."""
    with seeded(seed, "projector", "all"):
        return dict(nn.Linear(9, width, bias=False, dtype=torch.float64).state_dict())


def truncated(matrix, energy):
    """The best approximation with that part of the sum of squares; by eigenvectors, not by a decomposition."""
    if matrix.ndim < 2:
        return matrix
    values, vectors = np.linalg.eigh(matrix @ matrix.T)
    values, vectors = values[::-1], vectors[:, ::-1]
    rank = next(k for k in range(1, len(values) + 1) if values[:k].sum() >= energy * values.sum() * (1 - 1e-12))
    if rank * sum(matrix.shape) >= matrix.size:
        return matrix
    return vectors[:, :rank] @ vectors[:, :rank].T @ matrix


def as_arrays(state):
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("who", WHO)
def test_three_rounds_of_fedkd_by_hand(federate, double, who, monkeypatch):
    monkeypatch.setattr(fedkd, "FIRST", 0.6)
    monkeypatch.setattr(fedkd, "LAST", 0.9)
    done = federate("fedkd", model=own_network, **SETTINGS, **KEYS, **WHO[who])
    assert done.failures == []
    shared = done.received[1, "0"]["model"]
    mine = {client: live(own_network(done.info(client)).state_dict()) for client in "012"}
    joined = {client: live(projector(own_width(client), done.config.seed)) for client in "012"}
    for round, present in enumerate(rounds_of(done), 1):
        energy = 0.6 + round / 3 * 0.3
        changes, weights = {}, {}
        for client in present:
            inputs, labels = examples_of(done, client)
            states = live({name: torch.from_numpy(each) for name, each in shared.items()}), mine[client], joined[client]
            velocities = {}, {}, {}
            for _ in range(SETTINGS["local_epochs"]):
                small, network, project = states
                theirs, ours = hidden(small, inputs), hidden(network, inputs)
                outputs, small_outputs = head(network, ours), head(small, theirs)
                loss, small_loss = F.cross_entropy(outputs, labels), F.cross_entropy(small_outputs, labels)
                both = (loss + small_loss).item()
                apart = (theirs @ project["weight"].T - ours).square().mean() / both
                losses = (
                    small_loss + divergence(small_outputs, outputs) / both + apart,
                    loss + divergence(outputs, small_outputs) / both + apart,
                    apart,
                )
                for each in zip(states, velocities, losses, strict=True):
                    stepped(*each)
            after = as_arrays(states[0])
            changes[client] = {name: truncated(after[name] - shared[name], energy) for name in shared}
            weights[client] = len(labels)
        total = sum(weights.values())
        for name, before in shared.items():
            mean = sum(weights[client] * changes[client][name] for client in present) / total
            shared = shared | {name: before + truncated(mean, energy)}
    assert_equal(done.state.model, shared)
    for client in "012":
        assert_equal(done.saved(client), as_arrays(mine[client]))


def test_changes_and_whole_networks_are_sent(federate):
    done = federate("fedkd", **{**SETTINGS, "fraction_train": 0.6, "fedkd.shared-model": "mlp-20"})
    assert done.failures == []
    whole = models.build("mlp-20", (1, 8, 8), 10).state_dict()
    narrow = {"body.1.weight:left", "body.1.weight:right"}
    for (round, client), arrays in done.received.items():
        trained_before = (round - 1, client) in done.received
        assert narrow <= arrays["model"].keys() if trained_before else arrays["model"].keys() == whole.keys()
    assert all(narrow <= arrays["update"].keys() for arrays in done.sent.values())


# ---- FedMRL


def fusing_projector(own, shared, seed):
    """A client's first projector, as a dictionary."""
    with seeded(seed, "projector", "all"):
        return dict(nn.Linear(own + shared, max(own, shared), dtype=torch.float64).state_dict())


def fused_head(state, fused):
    """A head reads as many of the first entries as it has weights."""
    return fused[:, : state["3.weight"].shape[1]] @ state["3.weight"].T + state["3.bias"]


def stepped_together(states, velocities, loss):
    """A step of SGD with momentum of all parts."""
    places = [(part, name) for part, state in enumerate(states) for name in state]
    gradients = torch.autograd.grad(loss, [states[part][name] for part, name in places])
    for (part, name), gradient in zip(places, gradients, strict=True):
        velocities[part, name] = SETTINGS["momentum"] * velocities.get((part, name), 0.0) + gradient
        states[part][name] = (states[part][name] - 0.1 * velocities[part, name]).detach().requires_grad_()


@pytest.mark.parametrize(
    ("width", "who"),
    [(0, "all"), (3, "all"), (0, "two")],  # the first is wider than client 0's own
    ids=["as wide as it is", "pooled", "two of three"],
)
def test_three_rounds_of_fedmrl_by_hand(federate, double, width, who):
    keys = {"fedmrl.shared-model": "small-float64", "fedmrl.width": width}
    done = federate("fedmrl", model=own_network, **{**SETTINGS, **keys, **WHO[who]})
    assert done.failures == []
    width = width or 9
    shared = {name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()}
    assert shared["3.weight"].shape == (10, width)
    own = {client: live(own_network(done.info(client)).state_dict()) for client in "012"}
    joined = {client: live(fusing_projector(own_width(client), width, done.config.seed)) for client in "012"}
    for present in rounds_of(done):
        sent, weights = {}, {}
        for client in present:
            inputs, labels = examples_of(done, client)
            states, velocities = [live(shared), own[client], joined[client]], {}
            for _ in range(SETTINGS["local_epochs"]):
                small, mine, project = states
                theirs = hidden(small, inputs)
                pooled = theirs.reshape(len(theirs), width, -1).mean(2)
                fused = torch.cat([pooled, hidden(mine, inputs)], 1) @ project["weight"].T + project["bias"]
                loss = F.cross_entropy(fused_head(small, fused), labels) + F.cross_entropy(
                    fused_head(mine, fused), labels
                )
                stepped_together(states, velocities, loss)
            sent[client], weights[client] = states[0], len(labels)
        shared = mean_of(sent, weights)
    assert_equal(done.state.model, shared)
    for client in "012":
        assert_equal(done.saved(client), own[client])
        assert_equal(
            done.saved(client), {f"method/tensors/projector.{name}": each for name, each in joined[client].items()}
        )
