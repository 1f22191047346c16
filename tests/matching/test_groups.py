"""Whole networks: permuting a client's units changes nothing, and what is averaged how."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhet import models
from fedhet.algorithms.graphs import architecture_graph, permute, resize
from fedhet.algorithms.graphs.permutations import permutation_groups
from fedhet.algorithms.matching.groups import (
    Matching,
    assemble,
    average_rest,
    groups_from_json,
    groups_to_json,
    match_networks,
)
from fedhet.models.networks import CharLSTM

IMAGES = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
TEXTS = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(0))


def build(kind: str, seed: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    if kind == "lstm":
        return CharLSTM(9, 3, 6), TEXTS
    model = models.build(kind, (1, 8, 8), 10)
    for name, value in model.named_buffers():
        if name.endswith(("mean", "var")):
            value.uniform_(0.5, 1.5)
    return model, IMAGES


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def merged(model, example, states, groups, how):
    settled, moved = match_networks(states, groups, how, np.random.RandomState(3))
    matches = [each.match for each in settled]
    rest = average_rest(
        moved,
        groups,
        examples=[1] * len(states),
        assignments=[{i: m.assignments[j] for i, m in enumerate(matches)} for j in range(len(states))],
        sizes=[len(m.counts) for m in matches],
    )
    dtypes = {name: array.dtype.name for name, array in states[0].items()}
    state = assemble(groups, dtypes, [(each.match.weights, each.carried) for each in settled], rest)
    with torch.no_grad():
        return settled, resize(model, state).eval()(example).numpy()


@pytest.mark.parametrize(("kind", "average"), [("cnn", "map"), ("resnet8", "mean"), ("lstm", "map")])
def test_permuting_a_clients_units(kind, average):
    networks = [build(kind, seed) for seed in range(3)]
    model, example = networks[0]
    groups = permutation_groups(architecture_graph(model, example))
    random = np.random.default_rng(1)
    states = [arrays(network) for network, _ in networks]
    # The first client stays: its order is that of the global model.
    shuffled = [states[0]] + [
        permute(state, groups, {g.index: random.permutation(g.width) for g in groups}) for state in states[1:]
    ]
    how = Matching(average=average)
    _, before = merged(model, example, states, groups, how)
    _, after = merged(model, example, shuffled, groups, how)
    np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.parametrize("kind", ["cnn", "resnet8", "lstm"])
def test_permuted_copies_keep_the_function(kind):
    model, example = build(kind, 0)
    groups = permutation_groups(architecture_graph(model, example))
    random = np.random.default_rng(2)
    copies = [permute(arrays(model), groups, {g.index: random.permutation(g.width) for g in groups}) for _ in range(4)]
    with torch.no_grad():
        expected = model.eval()(example).numpy()
    # LSTMs are averaged over all clients, zeros included: only units that all share keep their weights.
    settled, outputs = merged(model, example, copies, groups, Matching(average="mean", gamma=1e-3))
    assert [len(each.match.counts) for each in settled] == list(groups.widths)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)
    if kind != "lstm":  # with the paper's gamma units are doubled, and the function is still the same
        settled, outputs = merged(model, example, copies, groups, Matching(average="mean"))
        assert sum(len(each.match.counts) for each in settled) > sum(groups.widths)
        np.testing.assert_allclose(outputs, expected, atol=1e-4)


def test_groups_as_json():
    model, example = build("resnet8", 0)
    groups = permutation_groups(architecture_graph(model, example))
    assert groups_from_json(groups_to_json(groups)) == groups
    assert groups_from_json(groups_to_json(groups)).axes == groups.axes
    with pytest.raises(ValueError, match="not JSON from groups_to_json"):
        groups_from_json("{}")
    with pytest.raises(ValueError, match="the text is not JSON from groups_to_json"):
        groups_from_json("[" * 100_000)


def test_average_of_statistics():
    model, example = build("resnet8", 0)
    groups = permutation_groups(architecture_graph(model, example))
    random = np.random.default_rng(4)
    batches = [random.normal(size=(n, 16)) for n in (5, 20)]
    states = []
    for batch in batches:
        state = arrays(model)
        state["body.1.running_mean"], state["body.1.running_var"] = batch.mean(0), batch.var(0)
        states.append(state)
    rest = average_rest(states, groups, examples=[5, 20], assignments=[{}, {}], sizes=groups.widths)
    np.testing.assert_allclose(rest["body.1.running_mean"], np.concatenate(batches).mean(0))
    np.testing.assert_allclose(rest["body.1.running_var"], np.concatenate(batches).var(0))
    has = {groups.axes["body.1.running_mean"][0][0].group: np.arange(1, 16)}
    rest = average_rest(states, groups, examples=[5, 20], assignments=[{}, has], sizes=groups.widths)
    np.testing.assert_allclose(rest["body.1.running_mean"][0], batches[0].mean(0)[0])


def test_average_of_outputs():
    model, example = build("mlp", 0)
    groups = permutation_groups(architecture_graph(model, example))
    states = [arrays(build("mlp", seed)[0]) for seed in range(2)]
    counts = np.zeros((2, 10), int)
    counts[0, :5], counts[1, 5:9] = 3, 4
    rest = average_rest(
        states, groups, examples=[15, 16], class_counts=counts, assignments=[{}, {}], sizes=groups.widths
    )
    np.testing.assert_allclose(rest["head.weight"][:5], states[0]["head.weight"][:5])
    np.testing.assert_allclose(rest["head.weight"][5:9], states[1]["head.weight"][5:9])
    assert not rest["head.weight"][9].any()
    assert not rest["head.bias"][9].any()
