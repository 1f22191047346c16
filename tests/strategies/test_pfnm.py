"""PFNM end to end: the reference's whole network, one shot, and rounds beyond the paper."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fedhet.strategies import pfnm
from safetensors.numpy import load_file

from fedhet import models
from fedhet.algorithms.graphs import architecture_graph, permutation_groups
from fedhet.algorithms.matching import groups_to_json
from fedhet.config.configuration import resolve
from fedhet.engines.running import run_locally
from fedhet.messages import Payload, Reply, spec_of
from fedhet.results.history import read_history
from fedhet.server import ClientRecord

CLIENTS = range(4)
TINY = {
    "method": "pfnm",
    "dataset": "digits",
    "partition": "dirichlet",
    "clients": 4,
    "architectures": "mlp",
    "local-epochs": 8,
    "batch-size": 16,
    "learning-rate": 0.05,
    "momentum": 0.9,
}


def run(folder: Path, **changes):
    settings = TINY | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    run_locally(resolve(settings), folder)
    return read_history(folder), json.loads((folder / "summary.json").read_text())


def test_lenet_of_the_reference(reference, reference_matching, monkeypatch):
    with np.load(reference / "fedma_e2e_cases.npz") as arrays:
        case = {key.removeprefix("e2e_lenet_J4/"): value for key, value in arrays.items()}
    model = models.build("lenet", (1, 28, 28), 10)
    names = list(model.state_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    groups = permutation_groups(architecture_graph(model, torch.zeros(2, 1, 28, 28)))

    def layout(name, array):
        """The reference keeps linear layers transposed, filters flat."""
        return array.T if array.ndim == 2 and len(shapes[name]) == 2 else array.reshape(-1, *shapes[name][1:])

    replies = {}
    strategy = pfnm.PFNM(clients=4)
    monkeypatch.setattr(strategy, "matching", lambda: reference_matching)
    strategy.state.groups, strategy.state.classes = groups_to_json(groups), True
    for j in CLIENTS:
        network = {name: layout(name, case[f"in{j}_{k}"]).astype(np.float32) for k, name in enumerate(names)}
        assert {name: array.shape for name, array in network.items()} == shapes
        counts = np.rint(case["averaging_weights"][j] * 10**9).astype(np.int64)
        payload = Payload({"model": network, "classes": {"counts": counts}})
        replies[str(j)] = Reply(str(j), int(counts.sum()), payload)
        strategy.federation.roster.specs[str(j)] = spec_of(model.state_dict())
        strategy.state.clients[str(j)] = ClientRecord(int(counts.sum()))
        strategy.check_reply(replies[str(j)])
    monkeypatch.setattr(pfnm, "derive_seed", lambda *purpose: 12)
    strategy.aggregate_fit(1, replies)
    for j in CLIENTS:
        for layer in range(3):
            own = strategy.state.assignments[str(j)][str(layer)]
            np.testing.assert_array_equal(own, case[f"assign_l{layer}_j{j}"])
    found = strategy.state.model
    for k, name in enumerate(names):
        expected = case[f"global_{k}"]
        expected = expected.T if len(shapes[name]) == 2 else expected
        np.testing.assert_allclose(found[name].reshape(expected.shape), expected, atol=1e-6)


def test_matching_beats_averaging(tmp_path):
    scores = {}
    for method in ("pfnm", "fedavg"):
        rows, summary = run(tmp_path / method, method=method, rounds=1, shared_init=False)
        scores[method], trained = summary["personal_accuracy"]["weighted"], rows[1]["trained"]
        assert trained["accuracy"]["weighted"] > 0.7
        scores[f"{method}'s clients"] = trained
    assert scores["pfnm's clients"] == scores["fedavg's clients"]  # the same networks are merged
    assert scores["pfnm"] > scores["fedavg"] + 0.1


@pytest.mark.parametrize("batch_norm", ["local", "re-estimate"])
def test_statistics_are_sent(batch_norm, tmp_path):
    settings = {"architectures": "resnet8", "local_epochs": 1, "samples_per_client": 16, "clients": 2, "rounds": 2}
    rows, _ = run(tmp_path / "run", batch_norm=batch_norm, partition="iid", **settings)
    assert not any(row["failures"] for row in rows)
    model = load_file(tmp_path / "run" / "models" / "global.safetensors")
    assert len(model["body.1.running_mean"]) == len(model["body.0.weight"])
