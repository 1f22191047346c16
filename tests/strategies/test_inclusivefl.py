"""InclusiveFL, against a plain computation from its paper."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.algorithms.graphs.blocks import groups_by_depth
from fedhet.client_apps.inclusivefl import InclusiveFL, LastExit
from fedhet.config import configuration
from fedhet.errors import FedhetError
from fedhet.setup import client_setup
from fedhet.setup.user_functions import UserFunctions
from tests.strategies.by_hand import THREE, assert_equal

SAME = THREE | {"clients": 4}


class Stack(nn.Module):
    """Three equal layers between an input layer and a head; of images of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 6), nn.Linear(6, 10)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))

    def forward(self, inputs):
        return self.head(self.layers(self.first(inputs.flatten(1))))


def of_stack(state, inputs, depth):
    """The scores of the last of the first `depth` exits of `Stack`."""
    hidden = F.linear(inputs.flatten(1), state["first.weight"], state["first.bias"])
    for number in range(depth):
        hidden = torch.tanh(F.linear(hidden, state[f"layers.{number}.0.weight"], state[f"layers.{number}.0.bias"]))
    exit = "head" if depth == 3 else f"exits.{depth - 1}"
    return F.linear(hidden, state[f"{exit}.weight"], state[f"{exit}.bias"])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rounds_follow_the_paper(fraction, federate):
    beta, names = 0.3, ("weight", "bias")
    settings = {"inclusivefl.blocks": "layers.0,layers.1", "inclusivefl.momentum": beta, "inclusivefl.depths": "3,2,1"}
    settings |= {"fraction_train": fraction, "evaluate_every": 1}
    done = federate("inclusivefl", model=lambda client: Stack().double(), **{**SAME, **settings})
    assert done.failures == []
    transform, depths = client_setup.dataset_of(done.config).transform, {"0": 3, "1": 2, "2": 1, "3": 3}
    rounds = [row["participants"] for row in done.rows if row["participants"]]
    assert len(rounds) == SAME["rounds"]
    whole = next(arrays["model"] for (_, client), arrays in done.received.items() if depths[client] == 3)
    whole = {name: torch.from_numpy(array) for name, array in whole.items()}
    blocks = {1: ["first", "layers.0.0", "exits.0"], 2: ["layers.1.0", "exits.1"], 3: ["layers.2.0", "head"]}
    states = {
        depth: {
            f"{layer}.{n}": whole[f"{layer}.{n}"] for d in range(1, depth + 1) for layer in blocks[d] for n in names
        }
        for depth in (1, 2, 3)
    }
    momentum = {}
    for participants in rounds:
        changes, counts = {}, {}
        for depth in sorted({depths[client] for client in participants}):
            sent, state = [], states[depth]
            for client in (client for client in participants if depths[client] == depth):
                part = client_setup.data_of(done.info(client)).train
                inputs, own = (
                    transform(part.inputs[:]).double(),
                    {n: t.clone().requires_grad_() for n, t in state.items()},
                )
                optimizer = torch.optim.SGD(own.values(), lr=SAME["learning_rate"], momentum=SAME["momentum"])
                for _ in range(SAME["local_epochs"]):
                    optimizer.zero_grad()
                    F.cross_entropy(of_stack(own, inputs, depth), part.labels).backward()
                    optimizer.step()
                sent.append((len(part.labels), {name: tensor.detach() for name, tensor in own.items()}))
            counts[depth] = sum(count for count, _ in sent)
            mean = {name: sum(count * each[name] for count, each in sent) / counts[depth] for name in state}
            changes[depth] = {name: state[name] - mean[name] for name in state}
        for depth, changed in changes.items():
            for name, change in changed.items():
                learnt = momentum.get(depth, {}).get(name)
                mixed = change if learnt is None else beta * learnt + (1 - beta) * change
                states[depth][name] = states[depth][name] - mixed
        momentum = {}
        for depth in (1, 2):  # layers from this depth's last one to that of the next deeper participants
            if deeper := [each for each in changes if each > depth]:
                layers = range(depth - 1, min(deeper))
                momentum[depth] = {
                    f"layers.{depth - 1}.0.{n}": sum(changes[min(deeper)][f"layers.{k}.0.{n}"] for k in layers)
                    / len(layers)
                    for n in names
                }
        for block, layers in blocks.items():
            for name in (f"{layer}.{n}" for layer in layers for n in names):
                if beyond := [depth for depth in changes if depth > block or depth == block == 3]:
                    total = sum(counts[depth] * states[depth][name] for depth in beyond)
                    for depth in (each for each in states if each > block or each == block == 3):
                        states[depth][name] = total / sum(counts[depth] for depth in beyond)
    for depth, expected in states.items():
        found = done.state.model | done.state.last.get(str(depth), {})
        assert_equal(found, expected)
    assert not np.allclose(done.state.last["1"]["layers.0.0.weight"], done.state.model["layers.0.0.weight"])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scores_of_the_last_exit(depth):
    model, inputs = LastExit(Stack(), 3, "layers.0,layers.1"), torch.rand(4, 1, 8, 8)
    part = InclusiveFL.parts(depth / 3, groups_by_depth(model, inputs)).cut(model)
    for mode in (True, False):
        torch.testing.assert_close(part.train(mode)(inputs), of_stack(part.state_dict(), inputs, depth))


def test_unequal_blocks(federate):
    with pytest.raises(FedhetError, match="needs repeated blocks.* blocks 1 and 2 of the client's network have no"):
        federate("inclusivefl", **{"inclusivefl.depths": "2,1"})


def test_blocks_of_a_preset_with_own_models():
    functions = UserFunctions(model=lambda client: nn.Linear(4, 2))
    preset = configuration.resolve({"preset": "inclusivefl/digits"})
    assert (preset.options.blocks, functions.adapted(preset).options.blocks) == ("body.5", "")
    chosen = configuration.resolve({"preset": "inclusivefl/digits", "inclusivefl.blocks": "layers.0"})
    assert functions.adapted(chosen).options.blocks == "layers.0"
