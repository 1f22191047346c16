"""Runs whose clients are trained in batches."""

import json

import pytest

from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.engines.workers import WorkerGrid
from fedhet.errors import ConfigError

SETTINGS = {
    "method": "fedavg",
    "dataset": "digits",
    "clients": 9,
    "fraction-train": 0.9,
    "partition": "dirichlet",
    "architectures": "mlp-20",
    "rounds": 3,
    "batch-size": 16,
    "report": False,
}


def run(folder, **own):
    run_locally(configuration.resolve({**SETTINGS, **{key.replace("_", "-"): v for key, v in own.items()}}), folder)
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        del row["timing"]
    return rows, {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_any_number_of_workers_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(WorkerGrid, "patience", 0)
    one, two, three = (run(tmp_path / str(number), workers=number, client_batching="4") for number in (1, 2, 3))
    assert one == two == three
    assert one != run(tmp_path / "off", workers=1, client_batching="off"), "batches round differently"


@pytest.mark.parametrize("value", ["1", "none", "-2"])
def test_values(value, tmp_path):
    with pytest.raises(ConfigError, match=f"client-batching must be .* not '{value}'"):
        run(tmp_path / "run", client_batching=value)
