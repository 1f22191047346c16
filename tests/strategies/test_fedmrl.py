"""FedMRL, against a plain computation from its paper."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.config import client_setup
from fedhet.models import registry as models
from fedhet.utils.randomness import derive_seed, seed_everything
from tests.strategies.by_hand import AT_ONCE, UNLIKE, WHO, hidden, live, own_network, own_width, rounds_of, tanh_network

SETTINGS = UNLIKE | AT_ONCE


def projector(own, shared, seed):
    """A client's first projector, as a dictionary."""
    with torch.random.fork_rng():
        seed_everything(derive_seed(seed, "projector", "all"))
        return dict(nn.Linear(own + shared, max(own, shared), dtype=torch.float64).state_dict())


def head(state, fused):
    """A head reads as many of the first entries as it has weights."""
    return fused[:, : state["3.weight"].shape[1]] @ state["3.weight"].T + state["3.bias"]


def stepped(states, velocities, loss):
    """A step of SGD with momentum of all parts."""
    places = [(part, name) for part, state in enumerate(states) for name in state]
    gradients = torch.autograd.grad(loss, [states[part][name] for part, name in places])
    for (part, name), gradient in zip(places, gradients, strict=True):
        velocities[part, name] = SETTINGS["momentum"] * velocities.get((part, name), 0.0) + gradient
        states[part][name] = (states[part][name] - 0.1 * velocities[part, name]).detach().requires_grad_()


def assert_equal(one, other):
    for name, tensor in other.items():
        np.testing.assert_allclose(one[name], tensor.detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.fixture
def double(monkeypatch, float64_travels):
    """Weights travel in float64, and a small network of that dtype has a name."""
    monkeypatch.setitem(models._BUILDERS, "small-float64", lambda input_shape, classes: tanh_network(9, classes))


@pytest.mark.parametrize(
    ("width", "who"),
    [(0, "all"), (3, "all"), (0, "two")],  # the first is wider than client 0's own
    ids=["as wide as it is", "pooled", "two of three"],
)
def test_three_rounds_by_hand(federate, double, width, who):
    keys = {"fedmrl.shared-model": "small-float64", "fedmrl.width": width}
    done = federate("fedmrl", model=own_network, **{**SETTINGS, "wire_dtype": "float64", **keys, **WHO[who]})
    assert done.failures == []
    width = width or 9
    transform = client_setup.dataset_of(done.config).transform
    shared = {name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()}
    assert shared["3.weight"].shape == (10, width)
    own = {client: live(own_network(done.info(client)).state_dict()) for client in "012"}
    joined = {client: live(projector(own_width(client), width, done.config.seed)) for client in "012"}
    for present in rounds_of(done):
        sent, weights = {}, {}
        for client in present:
            part = client_setup.data_of(done.info(client)).train
            inputs, labels = transform(part.inputs[:]).double(), part.labels
            states, velocities = [live(shared), own[client], joined[client]], {}
            for _ in range(SETTINGS["local_epochs"]):
                small, mine, project = states
                theirs = hidden(small, inputs)
                pooled = theirs.reshape(len(theirs), width, -1).mean(2)
                fused = torch.cat([pooled, hidden(mine, inputs)], 1) @ project["weight"].T + project["bias"]
                loss = F.cross_entropy(head(small, fused), labels) + F.cross_entropy(head(mine, fused), labels)
                stepped(states, velocities, loss)
            sent[client], weights[client] = states[0], len(labels)
        total = sum(weights.values())
        shared = {name: sum(weights[c] * sent[c][name].detach() for c in present) / total for name in shared}
    assert_equal(done.state.model, shared)
    for client in "012":
        assert_equal(done.saved(client), own[client])
        assert_equal(done.saved(client), {f"projector.{name}": each for name, each in joined[client].items()})
