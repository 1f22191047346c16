"""Runs whose clients are trained in batches."""

import json

import pytest
from torch import nn

import fedhet
from fedhet.client import ClientSide
from fedhet.client.app import Answers
from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.engines.workers import WorkerGrid
from fedhet.errors import ConfigError, DataError
from fedhet.flower import MessageType
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


@pytest.fixture
def batches(monkeypatch):
    """Numbers of training messages that were answered together, by the order in which they were."""
    sizes = []
    answer_all = Answers.answer_all

    def counted(answers, answer, messages):
        if messages[0][0].metadata.message_type == MessageType.TRAIN:
            sizes.append(len(messages))
        return answer_all(answers, answer, messages)

    monkeypatch.setattr(Answers, "answer_all", counted)
    return sizes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [5, 4]),  # two batches, for two workers
        ({"client_batching": "3"}, [3, 3, 3]),
        ({"client_batching": "off"}, [1] * 9),
        ({"architectures": "mlp-20,cnn"}, [5, 4]),
        (
            {"method": "local", "architectures": "mlp-20,cnn", "samples_per_client": 260, "batch_size": 256},
            [5, 1, 1, 1, 1],
        ),
    ],
)
def test_clients_whose_small_networks_are_alike_make_batches(changes, expected, tmp_path, batches):
    own = {"workers": 1, "rounds": 1, "clients": 9, "fraction_train": 1.0, "partition": "iid", "closing_epochs": 0}
    if "mlp-20,cnn" in changes.values():
        own["method"] = "local"
    run(tmp_path / "run", **own | changes)
    assert batches[: len(expected)] == expected


def test_networks_of_users_make_batches_and_random_numbers_are_those_of_one_by_one(tmp_path, batches):
    def model(client):
        width = 8 if client.partition_id < 6 else 16
        return nn.Sequential(
            nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, width), nn.Dropout(0.3), nn.Linear(width, 10)
        )

    settings = {"method": "local", "dataset": "digits", "clients": 8, "rounds": 2, "workers": 1, "report": False}
    batched = fedhet.run(settings, model=model, out=tmp_path / "batched")
    assert batches[:2] == [6, 2]
    alone = fedhet.run({**settings, "client-batching": "off"}, model=model, out=tmp_path / "alone")
    for one, other in zip(batched.history[1:3], alone.history[1:3], strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
