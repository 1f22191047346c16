"""Runs whose clients are trained in batches."""

import json

import pytest
import torch

from fedhet.client import ClientSide
from fedhet.config import configuration
from fedhet.engines.running import _batches, run_locally
from fedhet.engines.workers import WorkerGrid
from fedhet.errors import ConfigError, DataError
from fedhet.results.observers import Observer
from fedhet.utils.files import read_arrays

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


class Killed(Observer):
    """Ends the run's process, as far as the run can tell, after the second round."""

    def round(self, run, report):
        if report.row["round"] == 2:
            raise KeyboardInterrupt


def configured(**own):
    return configuration.resolve({**SETTINGS, **{key.replace("_", "-"): v for key, v in own.items()}})


def run(folder, resume=False, **own):
    run_locally(configured(**own), folder, resume=resume)
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        del row["timing"]
    arrays = {path.relative_to(folder): read_arrays(path)[0] for path in folder.rglob("*.safetensors")}
    return rows, {(path, name): array.tobytes() for path, its in arrays.items() for name, array in its.items()}


def test_any_number_of_workers_gives_the_same_bytes_resumed_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(WorkerGrid, "patience", 0)
    one, two, three = (run(tmp_path / str(number), workers=number, client_batching="4") for number in (1, 2, 3))
    assert one == two == three
    with pytest.raises(KeyboardInterrupt):
        run_locally(configured(workers=1, client_batching="4"), tmp_path / "killed", observers=[Killed()])
    assert run(tmp_path / "killed", resume=True, workers=2, client_batching="4") == one
    assert one != run(tmp_path / "off", workers=1, client_batching="off"), "batches round differently"


def test_a_client_that_fails_leaves_its_batch(tmp_path, monkeypatch):
    settings = {"method": "local", "workers": 1, "client_batching": "4", "fraction_train": 1.0}
    _, expected = run(tmp_path / "all", **settings)
    end = ClientSide.end

    def failing(side, payload):
        if side.client.name == "3" and side.client.request.round == 3:
            raise DataError("its disk is lost")
        return end(side, payload)

    monkeypatch.setattr(ClientSide, "end", failing)
    rows, arrays = run(tmp_path / "one fails", **settings)
    failures = [(row["round"], failure["client"]) for row in rows for failure in row["failures"]]
    assert failures == [(3, "3")]
    different = {path.stem for (path, name), array in expected.items() if arrays.get((path, name)) != array}
    assert "3" in different
    assert different <= {"3", "strategy", "state"}


@pytest.mark.parametrize("value", ["1", "none", "-2"])
def test_values(value, tmp_path):
    with pytest.raises(ConfigError, match=f"client-batching must be .* not '{value}'"):
        run(tmp_path / "run", client_batching=value)


def test_auto_leaves_out_large_networks():
    random = torch.get_rng_state()
    config = configured(client_batching="auto", architectures="mlp-20,cnn", batch_size=256)
    architectures, size = _batches(config, torch.device("cpu"))
    assert ({*architectures}, size) == ({"mlp-20", ""}, 10)
    assert torch.equal(torch.get_rng_state(), random)
