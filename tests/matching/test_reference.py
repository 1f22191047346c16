"""FedMA's reference implementation: identical assignments, weights to 1e-6."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedhet.matching import class_weighted_average, match_layer, scatter, stack_gates, unstack_gates

LAYERS = ["fc784_100_J5_planted", "conv3_32_J8_init_g7", "fc_unequal_widths_J4", "tiny_J2_it0"]
CLIENTS = range(4)


@pytest.fixture(scope="module")
def cases(reference: Path):
    with np.load(reference / "fedma_cases.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("reference_compatible", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_single_layers(reference: Path, cases, name, reference_compatible):
    settings = json.loads((reference / "fedma_cases.json").read_text())[name]
    match = match_layer(
        [cases[f"{name}/w{j}"] for j in range(settings["J"])],
        sigma2=settings["sigma"],
        sigma0_2=settings["sigma0"],
        gamma=settings["gamma"],
        prior_mean=cases[f"{name}/mean_prior"],
        sweeps=settings["it"],
        seed=settings["np_seed"],
        reference_compatible=reference_compatible,
    )
    for j, assignment in enumerate(match.assignments):
        np.testing.assert_array_equal(assignment, cases[f"{name}/assign{j}"])
    np.testing.assert_allclose(match.weights, cases[f"{name}/map"], atol=1e-6)


def test_patches(cases):
    moved = scatter(cases["patch/w"], 1, cases["patch/assign"], cases["patch/out"].shape[1])
    np.testing.assert_array_equal(moved, cases["patch/out"])
    moved = scatter(cases["patch_conv/w"], 1, cases["patch_conv/assign"], 6, block=9)
    np.testing.assert_array_equal(moved, cases["patch_conv/out"])


def test_embedding_and_lstm(cases):
    (embedding, w_ih, w_hh, b_ih, b_hh, decoder) = ([cases[f"lstm_J4/orig{j}_{k}"] for j in CLIENTS] for k in range(6))
    units = match_layer([table.T for table in embedding], gamma=1e-3, seed=300)
    for j in CLIENTS:
        np.testing.assert_array_equal(units.assignments[j], cases[f"lstm_J4/layer0/assign{j}"])
    np.testing.assert_array_equal(units.counts, cases["lstm_J4/layer0/popularity"])
    np.testing.assert_allclose(units.weights, cases["lstm_J4/layer0/map0"], atol=1e-6)
    np.testing.assert_allclose(
        sum(scatter(table, 1, units.assignments[j], 8) for j, table in enumerate(embedding)) / units.counts,
        cases["lstm_J4/layer0/avg_embedding"],
        atol=1e-6,
    )

    w_ih = [scatter(weight, 1, units.assignments[j], 8) for j, weight in enumerate(w_ih)]
    hidden = match_layer(
        [np.hstack([stack_gates(weight), stack_gates(bias)]) for weight, bias in zip(w_ih, b_ih, strict=True)],
        gamma=1e-3,
        prior_mean=np.repeat([0, 0.1], [32, 4]),
        seed=301,
    )
    for j in CLIENTS:
        np.testing.assert_array_equal(hidden.assignments[j], cases[f"lstm_J4/layer1/assign{j}"])
        np.testing.assert_array_equal(
            scatter(decoder[j], 1, hidden.assignments[j], 24), cases[f"lstm_J4/layer1/decoder_patched{j}"]
        )
    np.testing.assert_allclose(unstack_gates(hidden.weights[:, :32]), cases["lstm_J4/layer1/map0"], atol=1e-6)
    np.testing.assert_allclose(unstack_gates(hidden.weights[:, 32:])[:, 0], cases["lstm_J4/layer1/map1"], atol=1e-6)

    def total(arrays):
        return sum(scatter(array, 0, hidden.assignments[j], 24, groups=4) for j, array in enumerate(arrays))

    popularity = np.tile(hidden.counts, 4)
    columns = [scatter(weight, 1, hidden.assignments[j], 24) for j, weight in enumerate(w_hh)]
    np.testing.assert_allclose(total(w_ih) / popularity[:, None], cases["lstm_J4/layer1/W_ih"], atol=1e-6)
    np.testing.assert_allclose(total(b_ih) / popularity, cases["lstm_J4/layer1/b_ih"], atol=1e-6)
    np.testing.assert_allclose(total(columns) / 4, cases["lstm_J4/layer1/W_hh"], atol=1e-6)
    np.testing.assert_allclose(total(b_hh) / 4, cases["lstm_J4/layer1/b_hh"], atol=1e-6)


def test_whole_lenet(reference: Path):
    with np.load(reference / "fedma_e2e_cases.npz") as arrays:
        case = {key.removeprefix("e2e_lenet_J4/"): value for key, value in arrays.items()}
    layers = [[case[f"in{j}_{k}"] if k < 4 else case[f"in{j}_{k}"].T for k in range(8)] for j in CLIENTS]
    order = np.random.RandomState(12)
    inputs: list[np.ndarray] = []
    for layer, block in enumerate((0, 25, 16)):
        weights = [layers[j][2 * layer] for j in CLIENTS]
        if layer:
            weights = [scatter(weights[j], 1, inputs[j], size, block=block) for j in CLIENTS]  # noqa: F821
        rows = [np.column_stack([weights[j], layers[j][2 * layer + 1]]) for j in CLIENTS]
        prior = np.zeros(rows[0].shape[1])
        # The reference puts the bias's prior mean on the first column of every layer but the first.
        prior[0 if layer else -1] = 0.1
        match = match_layer(rows, prior_mean=prior, seed=order)
        for j in CLIENTS:
            np.testing.assert_array_equal(match.assignments[j], case[f"assign_l{layer}_j{j}"])
        expected = case[f"global_{2 * layer}"]
        np.testing.assert_allclose(match.weights[:, :-1], expected if layer < 2 else expected.T, atol=1e-6)
        np.testing.assert_allclose(match.weights[:, -1], case[f"global_{2 * layer + 1}"], atol=1e-6)
        inputs, size = match.assignments, len(match.counts)
    last = [scatter(layers[j][6], 1, inputs[j], size) for j in CLIENTS]
    shares = case["averaging_weights"]
    np.testing.assert_allclose(class_weighted_average(last, shares), case["global_6"].T, atol=1e-6)
    np.testing.assert_allclose(
        class_weighted_average([layers[j][7] for j in CLIENTS], shares), case["global_7"], atol=1e-6
    )
