"""ScaleFL, against a plain computation from its paper."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedhet.config.configuration import resolve
from fedhet.errors import ConfigError
from tests.strategies.by_hand import THREE, WHO, assert_equal, examples_of, rounds_of, stepped
from tests.strategies.test_depthfl import DEPTHS, Small, has

SHARES = {"0": 1.0, "1": 0.5, "2": 0.5}
UNITS = {"one": 6, "two": 5, "three": 7}
SAME = THREE | {
    "batch_norm": "re-estimate",
    "scalefl.depths": "3,2,1",
    "scalefl.widths": "1,0.5,0.5",
    "scalefl.blocks": "one,two",
    "scalefl.gamma": 0.3,
}


def cut(state, client):
    """Slices of the arrays that a client has, by name."""
    units = {layer: slice(math.ceil(SHARES[client] * count)) for layer, count in UNITS.items()}
    whole = slice(None)
    slices = {
        "one.0.weight": (units["one"],),
        "one.1.weight": (units["one"],),
        "one.1.bias": (units["one"],),
        "exits.0.weight": (whole, units["one"]),
        "two.0.weight": (units["two"], units["one"]),
        "two.0.bias": (units["two"],),
        "exits.1.weight": (whole, units["two"]),
    }
    return {name: slices.get(name, (whole,)) for name in state if has(DEPTHS[client], name)}


def exits_of(state, inputs, depth, share):
    """The scores of the first `depth` exits of `Small` in training, whose convolutions' outputs are divided."""
    maps = F.conv2d(inputs, state["one.0.weight"], padding=1) / share
    maps = F.batch_norm(maps, None, None, state["one.1.weight"], state["one.1.bias"], training=True)
    maps = F.max_pool2d(F.relu(maps), 2)
    found = [F.linear(maps.mean((2, 3)), state["exits.0.weight"], state["exits.0.bias"])]
    if depth > 1:
        maps = F.conv2d(maps, state["two.0.weight"], state["two.0.bias"], padding=1) / share
        maps = F.max_pool2d(F.relu(maps), 2)
        found.append(F.linear(maps.mean((2, 3)), state["exits.1.weight"], state["exits.1.bias"]))
    if depth > 2:
        hidden = F.relu(F.linear(maps.flatten(1), state["three.weight"], state["three.bias"]))
        found.append(F.linear(hidden, state["head.weight"], state["head.bias"]))
    return found


@pytest.mark.parametrize("who", ["all", "two"])
def test_rounds_follow_the_paper(who, federate):
    done = federate("scalefl", model=lambda client: Small().double(), **SAME | WHO[who])
    assert done.failures == []
    state = {name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()}
    for round, present in enumerate(rounds_of(done), 1):
        total = {name: torch.zeros_like(each) for name, each in state.items()}
        count = {name: torch.zeros_like(each) for name, each in state.items()}
        for client in present:
            depth = DEPTHS[client]
            inputs, labels = examples_of(done, client)
            places = cut(state, client)
            own = {name: state[name][place].clone().requires_grad_() for name, place in places.items()}
            velocity = {}
            for _ in range(SAME["local_epochs"]):
                found = exits_of(own, inputs, depth, SHARES[client])
                loss = depth * F.cross_entropy(found[-1], labels)
                teacher = (found[-1].detach() / 3).softmax(1)
                for number, scores in enumerate(found[:-1], 1):
                    divergence = (teacher * (teacher.log() - (scores / 3).log_softmax(1))).sum(1).mean()
                    loss = loss + number * F.cross_entropy(scores, labels)
                    if round > 3 / 4:
                        loss = loss + number * 0.3 * 9 * divergence
                stepped(own, velocity, loss * 2 / (depth * (depth + 1)))
            for name, place in places.items():
                total[name][place] += len(labels) * own[name].detach()
                count[name][place] += len(labels)
        state = {name: torch.where(count[name] > 0, total[name] / count[name], each) for name, each in state.items()}
    assert done.state.model.keys() == state.keys()
    assert_equal(done.state.model, state)
    sizes = {
        row.client: row.architecture.partition(", ")[2] for row in done.clients if row.round == "3" or row.round == 3
    }
    assert sizes.items() <= {"0": "", "1": "depth 2, width 0.5", "2": "depth 1, width 0.5"}.items()


@pytest.mark.parametrize("widths", ["1", "0.5,0.5", "1,2", "1,x"])
def test_widths_that_do_not_fit(widths):
    with pytest.raises(ConfigError, match=r"scalefl.widths: .* does not fit depths = '2,1': set a fraction for each"):
        resolve({"method": "scalefl", "scalefl.depths": "2,1", "scalefl.widths": widths})
