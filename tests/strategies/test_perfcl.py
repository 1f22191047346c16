"""PerFCL, against a plain computation from its paper."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.errors import FedhetError
from fedhet.methods import registry
from fedhet.setup import client_setup
from tests.strategies.by_hand import AT_ONCE, UNLIKE, WHO, assert_equal, examples_of, live, mean_of, rounds_of, stepped
from tests.strategies.test_moon import network

MU, GAMMA, TEMPERATURE = 0.7, 0.4, 0.3
KEYS = {"perfcl.mu": MU, "perfcl.gamma": GAMMA, "perfcl.temperature": TEMPERATURE}


def extracted(state, which, inputs):
    return torch.tanh(inputs.flatten(1) @ state[f"{which}.1.weight"].T + state[f"{which}.1.bias"])


def contrast(anchor, near, far):
    near, far = (
        ((anchor * other).sum(1) / anchor.norm(dim=1) / other.norm(dim=1) / TEMPERATURE).exp()
        for other in (near.detach(), far.detach())
    )
    return -(near / (near + far)).log().mean()


def loss_of(state, first, previous, inputs, labels):
    shared, personal = (extracted(state, which, inputs) for which in ("shared", "personal"))
    loss = F.cross_entropy(torch.cat([shared, personal], 1) @ state["head.weight"].T + state["head.bias"], labels)
    if previous is None:
        return loss
    average = extracted(first, "shared", inputs)
    loss = loss + MU * contrast(shared, average, extracted(previous, "shared", inputs))
    return loss + GAMMA * contrast(personal, extracted(previous, "personal", inputs), average)


@pytest.mark.parametrize("who", WHO)
def test_three_rounds_by_hand(federate, who):
    done = federate("perfcl", model=network, **UNLIKE, **AT_ONCE, **KEYS, **WHO[who])
    assert done.failures == []
    received = live({name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()})
    assert set(received) == {"shared.1.weight", "shared.1.bias"}
    initial = {name.replace("shared", "personal"): tensor for name, tensor in received.items()}
    own, previous = {}, dict.fromkeys("012")
    for present in rounds_of(done):
        trained, counts = {}, {}
        for client in present:
            inputs, labels = examples_of(done, client)
            first = live(own.get(client, initial | first_head(done, client)) | received)
            state, velocity = live(first), {}
            for _ in range(AT_ONCE["local_epochs"]):
                stepped(state, velocity, loss_of(state, first, previous[client], inputs, labels))
            trained[client], counts[client] = {name: state[name] for name in received}, len(labels)
            own[client] = previous[client] = state
        received = live(mean_of(trained, counts))
    for client, state in own.items():
        assert_equal(done.saved(client), state | received)


@pytest.mark.parametrize("head", ["0", "2"])
def test_layers_behind_the_head_are_refused_with_its_name(federate, head):
    def model(client):
        return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 10))

    def data(client):
        return ((torch.zeros(8, 64), torch.zeros(8).long()),) * 2

    with pytest.raises(FedhetError, match=f"perfcl replaces the head, here '{head}', which must be the last layer"):
        federate("perfcl", model=model, data=data, head=head)


class Greedy(nn.Sequential):
    """A network that fails in training, as one for which memory is too small."""

    def forward(self, inputs):
        if self.training and len(inputs) > 2:
            raise RuntimeError("out of memory")
        return super().forward(inputs)


def test_other_failures_are_not_blamed_on_the_head(federate):
    def model(client):
        return Greedy(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

    with pytest.raises(FedhetError, match="out of memory") as caught:
        federate("perfcl", model=model, data=lambda client: ((torch.zeros(8, 64), torch.zeros(8).long()),) * 2)
    assert "head" not in str(caught.value)


def first_head(done, client):
    """The head that is drawn behind the network, which has weights of its own."""
    side = registry.client_side("perfcl")
    built = client_setup.network_of(
        done.info(client), lambda _: network(None), adapt=lambda model: side.adapt(model, done.config)
    )
    return {name: tensor for name, tensor in built.state_dict().items() if name.startswith("head.")}
