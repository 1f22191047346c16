"""PFNM end to end: the reference's whole network, one shot, and rounds beyond the paper."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fedhet.config.configuration import resolve
from fedhet.engines.running import run_locally
from fedhet.results.history import read_history

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
