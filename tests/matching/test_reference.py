"""FedMA's reference implementation: identical assignments, weights to 1e-6."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedhet.algorithms.graphs import PermutationGroups, architecture_graph, expand, rows, set_rows
from fedhet.algorithms.graphs.permutations import permutation_groups
from fedhet.algorithms.matching.groups import Matching, average_rest, match_group, match_layer, match_networks

LAYERS = ["fc784_100_J5_planted", "conv3_32_J8_init_g7", "fc_unequal_widths_J4", "tiny_J2_it0"]
CLIENTS = range(4)


@pytest.fixture(scope="module")
def cases(reference: Path):
    with np.load(reference / "fedma_cases.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", LAYERS)
def test_single_layers(reference: Path, cases, name):
    settings = json.loads((reference / "fedma_cases.json").read_text())[name]
    match = match_layer(
        [cases[f"{name}/w{j}"] for j in range(settings["J"])],
        sigma2=settings["sigma"],
        sigma0_2=settings["sigma0"],
        gamma=settings["gamma"],
        prior_mean=cases[f"{name}/mean_prior"],
        sweeps=settings["it"],
        seed=settings["np_seed"],
    )
    for j, assignment in enumerate(match.assignments):
        np.testing.assert_array_equal(assignment, cases[f"{name}/assign{j}"])
    np.testing.assert_allclose(match.weights, cases[f"{name}/map"], atol=1e-6)


def groups_of(example: torch.Tensor, *layers: nn.Module) -> PermutationGroups:
    return permutation_groups(architecture_graph(nn.Sequential(*layers), example))


def test_patches(cases):
    groups = groups_of(torch.zeros(2, 3), nn.Linear(3, 5), nn.Linear(5, 7))
    moved = expand({"1.weight": cases["patch/w"]}, groups, {0: cases["patch/assign"]}, {0: 8})
    np.testing.assert_array_equal(moved["1.weight"], cases["patch/out"])
    groups = groups_of(torch.zeros(2, 1, 4, 4), nn.Conv2d(1, 4, 1), nn.Conv2d(4, 6, 3))
    weight = cases["patch_conv/w"].reshape(6, 4, 3, 3)
    moved = expand({"1.weight": weight}, groups, {0: cases["patch_conv/assign"]}, {0: 6})
    np.testing.assert_array_equal(moved["1.weight"].reshape(6, -1), cases["patch_conv/out"])


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.decoder = nn.Embedding(40, 8), nn.LSTM(8, 24), nn.Linear(24, 40)

    def forward(self, x):
        return self.decoder(self.lstm(self.embedding(x))[0][-1])


def test_embedding_and_lstm(cases):
    groups = groups_of(torch.zeros(5, 2, dtype=torch.long), Text())
    recurrent = [f"0.lstm.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    names = ["0.embedding.weight", *recurrent, "0.decoder.weight", "0.decoder.bias"]
    states = [{name: cases[f"lstm_J4/orig{j}_{k}"] for k, name in enumerate(names)} for j in CLIENTS]
    how = Matching(gamma=1e-3)

    posterior = match_layer([rows(state, groups, 0) for state in states], gamma=1e-3, seed=300)
    np.testing.assert_allclose(posterior.weights, cases["lstm_J4/layer0/map0"], atol=1e-6)
    units = match_group(states, groups, 0, [{}] * 4, [], how, np.random.RandomState(300)).match
    for j in CLIENTS:
        np.testing.assert_array_equal(units.assignments[j], cases[f"lstm_J4/layer0/assign{j}"])
        states[j] = expand(states[j], groups, {0: units.assignments[j]}, {0: 8})
    np.testing.assert_array_equal(units.counts, cases["lstm_J4/layer0/popularity"])
    np.testing.assert_allclose(units.weights.T, cases["lstm_J4/layer0/avg_embedding"], atol=1e-6)

    settled = match_group(
        states, groups, 1, [{0: own} for own in units.assignments], [8], how, np.random.RandomState(301)
    )
    for j in CLIENTS:
        own = settled.match.assignments[j]
        np.testing.assert_array_equal(own, cases[f"lstm_J4/layer1/assign{j}"])
        moved = expand(states[j], groups, {1: own}, {1: 24})
        np.testing.assert_array_equal(moved["0.decoder.weight"], cases[f"lstm_J4/layer1/decoder_patched{j}"])
    averaged = set_rows(states[0], groups, 1, settled.match.weights) | settled.carried
    for name, key in zip(recurrent, ("W_ih", "W_hh", "b_ih", "b_hh"), strict=True):
        np.testing.assert_allclose(averaged[name], cases[f"lstm_J4/layer1/{key}"], atol=1e-6)
    matrices = [rows(state, groups, 1) for state in states]
    posterior = match_layer(matrices, gamma=1e-3, prior_mean=how.prior_mean(states, matrices, groups, 1), seed=301)
    averaged = set_rows(states[0], groups, 1, posterior.weights)
    np.testing.assert_allclose(averaged[recurrent[0]], cases["lstm_J4/layer1/map0"], atol=1e-6)
    np.testing.assert_allclose(averaged[recurrent[2]], cases["lstm_J4/layer1/map1"], atol=1e-6)


def test_whole_lenet(reference: Path, reference_matching: Matching):
    with np.load(reference / "fedma_e2e_cases.npz") as arrays:
        case = {key.removeprefix("e2e_lenet_J4/"): value for key, value in arrays.items()}
    layers = [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(800, 500), nn.Linear(500, 10))
    groups = permutation_groups(architecture_graph(network, torch.zeros(2, 1, 28, 28)))
    own = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    # The reference keeps filters flat, and the weights of dense layers transposed.
    states = [
        {name: (case[f"in{j}_{k}"].T if k > 3 else case[f"in{j}_{k}"]).reshape(own[name]) for k, name in enumerate(own)}
        for j in CLIENTS
    ]
    settled, moved = match_networks(states, groups, reference_matching, np.random.RandomState(12))
    for layer, each in enumerate(settled):
        for j in CLIENTS:
            np.testing.assert_array_equal(each.match.assignments[j], case[f"assign_l{layer}_j{j}"])
        expected = case[f"global_{2 * layer}"]
        np.testing.assert_allclose(each.match.weights[:, :-1], expected if layer < 2 else expected.T, atol=1e-6)
        np.testing.assert_allclose(each.match.weights[:, -1], case[f"global_{2 * layer + 1}"], atol=1e-6)
    sizes, shares = [len(each.match.counts) for each in settled], case["averaging_weights"]
    rest = average_rest(
        moved, groups, examples=[1] * 4, class_counts=shares, assignments=[{} for _ in CLIENTS], sizes=sizes
    )
    np.testing.assert_allclose(rest["6.weight"], case["global_6"].T, atol=1e-6)
    np.testing.assert_allclose(rest["6.bias"], case["global_7"], atol=1e-6)
