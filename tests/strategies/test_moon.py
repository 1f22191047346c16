"""MOON, against a plain computation from its paper."""

import pytest
import torch
import torch.nn.functional as F

from tests.strategies.by_hand import (
    AT_ONCE,
    UNLIKE,
    WHO,
    assert_equal,
    examples_of,
    hidden,
    live,
    mean_of,
    rounds_of,
    stepped,
    tanh_network,
)

MU, TEMPERATURE = 0.7, 0.3
KEYS = {"moon.mu": MU, "moon.temperature": TEMPERATURE, "moon.width": 5}


def network(client):
    """A network of float64, from the same weights for all clients."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tanh_network(8)


def projected(state, inputs):
    first = (hidden(state, inputs) @ state["3.projection.0.weight"].T + state["3.projection.0.bias"]).clamp(min=0)
    return first @ state["3.projection.2.weight"].T + state["3.projection.2.bias"]


def by_cosine(first, second):
    return ((first * second).sum(1) / first.norm(dim=1) / second.norm(dim=1) / TEMPERATURE).exp()


def loss_of(state, received, previous, inputs, labels):
    phi = projected(state, inputs)
    loss = F.cross_entropy(phi @ state["3.head.weight"].T + state["3.head.bias"], labels)
    if previous is None:
        return loss
    near, far = (by_cosine(phi, projected(other, inputs).detach()) for other in (received, previous))
    return loss - MU * (near / (near + far)).log().mean()


@pytest.mark.parametrize("who", WHO)
def test_three_rounds_by_hand(federate, who):
    done = federate("moon", model=network, **UNLIKE, **AT_ONCE, **KEYS, **WHO[who])
    assert done.failures == []
    received = live({name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()})
    previous = dict.fromkeys("012")
    for present in rounds_of(done):
        trained, counts = {}, {}
        for client in present:
            inputs, labels = examples_of(done, client)
            state, velocity = live(received), {}
            for _ in range(AT_ONCE["local_epochs"]):
                stepped(state, velocity, loss_of(state, received, previous[client], inputs, labels))
            trained[client], counts[client] = state, len(labels)
        previous |= trained
        received = live(mean_of(trained, counts))
    assert_equal(done.saved("global"), received)


def test_without_its_loss_it_is_fedavg(federate):
    one = federate("moon", "moon", **{"moon.mu": 0.0, "moon.width": 0})
    other = federate("fedavg", "avg")
    assert one.rows == other.rows
