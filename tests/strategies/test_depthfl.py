"""DepthFL, against a plain computation from its paper."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet import models
from fedhet.algorithms.graphs import UnsupportedArchitecture
from fedhet.algorithms.graphs.blocks import Exits, groups_by_depth
from fedhet.errors import ModelError
from fedhet.results.history import read_clients
from tests.strategies.by_hand import THREE, WHO, assert_equal, examples_of, rounds_of, stepped

DEPTHS = {"0": 3, "1": 2, "2": 1}
SAME = THREE | {
    "batch_norm": "re-estimate",
    "depthfl.depths": "3,2,1",
    "depthfl.blocks": "one,two",
}


class Small(nn.Module):
    """Two convolutional blocks, the first with BatchNorm, and one of linear layers; of images of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.two = nn.Sequential(nn.Conv2d(6, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.three, self.head = nn.Linear(20, 7), nn.Linear(7, 10)

    def forward(self, inputs):
        return self.head(F.relu(self.three(self.two(self.one(inputs)).flatten(1))))


def plain(state, inputs, depth):
    """The scores of the first `depth` exits of `Small` in training."""
    maps = F.conv2d(inputs, state["one.0.weight"], padding=1)
    maps = F.batch_norm(maps, None, None, state["one.1.weight"], state["one.1.bias"], training=True)
    maps = F.max_pool2d(F.relu(maps), 2)
    found = [F.linear(maps.mean((2, 3)), state["exits.0.weight"], state["exits.0.bias"])]
    if depth > 1:
        maps = F.max_pool2d(F.relu(F.conv2d(maps, state["two.0.weight"], state["two.0.bias"], padding=1)), 2)
        found.append(F.linear(maps.mean((2, 3)), state["exits.1.weight"], state["exits.1.bias"]))
    if depth > 2:
        hidden = F.relu(F.linear(maps.flatten(1), state["three.weight"], state["three.bias"]))
        found.append(F.linear(hidden, state["head.weight"], state["head.bias"]))
    return found


def has(depth, name):
    """Whether a client of this depth has an array."""
    needs = {"one": 1, "exits.0": 1, "two": 2, "exits.1": 2, "three": 3, "head": 3}
    return depth >= next(least for first, least in needs.items() if name.startswith(f"{first}."))


@pytest.fixture
def deep(federate):
    """Runs DepthFL with clients of three depths, all in float64."""

    def deep(**settings):
        return federate("depthfl", model=lambda client: Small().double(), **{**SAME, **settings})

    return deep


def test_rounds_follow_the_paper(deep):
    done = deep(**{"depthfl.ramp-up": 2, **WHO["two"]})
    assert done.failures == []
    assert {row.architecture.partition("-")[0] for row in read_clients(done.folder)} == {"Small"}, "the user's, uncut"
    state = {name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()}
    for weight, present in zip((math.exp(-5), math.exp(-5 / 4), 1.0), rounds_of(done), strict=True):
        sent, weights = {}, {}
        for client in present:
            depth = DEPTHS[client]
            inputs, labels = examples_of(done, client)
            own = {name: each.clone().requires_grad_() for name, each in state.items() if has(depth, name)}
            velocity = {}
            for _ in range(SAME["local_epochs"]):
                found = plain(own, inputs, depth)
                loss = sum(F.cross_entropy(scores, labels) for scores in found)
                for learner in found if depth > 1 else ():
                    for teacher in (each.detach().softmax(1) for each in found if each is not learner):
                        divergence = (teacher * (teacher.log() - learner.log_softmax(1))).sum(1).mean()
                        loss = loss + weight * divergence / (depth - 1)
                stepped(own, velocity, loss)
            sent[client], weights[client] = own, len(labels)
        for name in state:
            if owners := [client for client in sent if name in sent[client]]:
                total = sum(weights[client] for client in owners)
                state[name] = sum(weights[client] * sent[client][name].detach() for client in owners) / total
    assert done.state.model.keys() == state.keys()
    assert_equal(done.state.model, state)


def test_one_exit_is_fedavg(federate):
    same = {"architectures": "mlp", "samples_per_client": 16}
    one = federate("fedavg", "fedavg", **same)
    other = federate("depthfl", "depthfl", **same, **{"depthfl.depths": "1"})
    name = "models/global.safetensors"
    assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()


@pytest.mark.parametrize(
    ("network", "count", "names", "words"),
    [
        (lambda: models.build("mlp", (1, 8, 8), 10), 4, "", r"end a block \(body.2, body\), but 4 blocks"),
        (
            lambda: models.build("mlp", (1, 8, 8), 10),
            3,
            "body.4,body.2",
            "does not run the modules body.4, body.2 in this order",
        ),
        (lambda: models.build("mlp", (1, 8, 8), 10), 2, "tail", "has no module 'tail'"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Unflatten(1, (2, 4))), 1, "", "must return logits"),
    ],
)
def test_wrong_networks(network, count, names, words):
    with pytest.raises((UnsupportedArchitecture, ModelError), match=words):
        groups_by_depth(Exits(network(), count, names), torch.zeros(2, 1, 8, 8))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_shallow_network_is_traced_but_not_exported():
    torch.manual_seed(0)
    model, images = Exits(Small(), 3, "one,two").eval(), torch.randn(2, 1, 8, 8)
    model.add_exits(groups_by_depth(model, images))
    model.depth = 1
    with pytest.raises(ModelError, match="ends after block 1 of 3: use torch.jit.trace"):
        torch.export.export(model, (images,))
    assert torch.equal(torch.jit.trace(model, (images,))(images), model(images))
