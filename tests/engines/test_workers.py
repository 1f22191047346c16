"""Worker processes of the local engine."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedhet
from fedhet.config import configuration
from fedhet.engines import running as local
from fedhet.engines.running import run_locally
from fedhet.engines.workers import WorkerGrid
from fedhet.methods.options import Config
from fedhet.results.observers import Observer
from fedhet.testing import Run
from fedhet.utils import machine
from fedhet.utils.machine import room_on, runs_at_once

pytestmark = pytest.mark.usefixtures("no_report")

SETTINGS: dict[str, Any] = {
    **{"dataset": "digits", "clients": 5, "rounds": 3, "samples-per-client": 24, "public-samples": 64},
    **{"local-epochs": 1, "batch-size": 12, "architectures": "mlp-100,mlp-150", "fraction-train": 0.8, "seed": 3},
}


@pytest.fixture(autouse=True)
def _from_the_first_message_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGrid, "patience", 0)


def settings(**others: Any) -> Config:
    return configuration.resolve({"method": "fedproto", **SETTINGS, **others})


def workers() -> list[int]:
    """Processes below the one that they are forked from, which ends those that were killed when it sees it."""
    below = [child for child in psutil.Process().children(recursive=True) if child.ppid() != os.getpid()]
    return [child.pid for child in below if child.status() != psutil.STATUS_ZOMBIE]


class Watch(Observer):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.did: list[str] = []

    def doing(self, what: str) -> None:
        self.did.append(what)

    def round(self, *_: object) -> None:
        self.seen.append(workers())


def test_workers_give_the_bytes_of_one_process(tmp_path: Path) -> None:
    watch = Watch()
    run_locally(settings(workers=1), tmp_path / "one")
    run_locally(settings(workers=2), tmp_path / "two", observers=[watch])
    assert len(watch.seen[0]) == 2
    assert watch.did == ["starting 2 worker processes", ""]
    assert len({tuple(pids) for pids in watch.seen}) == 1
    run_locally(settings(workers=1, rounds=2), tmp_path / "stopped")
    run_locally(settings(workers=2), tmp_path / "stopped", resume=True)
    assert Run(tmp_path / "one").rows == Run(tmp_path / "two").rows
    assert Run(tmp_path / "one").rows[-1] == Run(tmp_path / "stopped").rows[-1]
    assert workers() == []


def test_a_gpu_without_room_has_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "device_of", lambda name: torch.device("cuda"))  # clients ask elsewhere
    monkeypatch.setattr(local, "cores", lambda: 4)
    monkeypatch.setattr(local, "room_on", lambda device: 1)
    watch = Watch()
    run_locally(settings(rounds=1), tmp_path, observers=[watch])
    assert {len(each) for each in watch.seen[1:]} == {0}


def test_room_on_a_gpu_goes_by_what_was_needed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 400 << 20)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3500 << 20 if freed else 0, 8 << 30))
    assert room_on(torch.device("cuda:0")) == 3  # beside each process's own gigabyte, its context included


@pytest.mark.parametrize(("gibibytes", "runs"), [(2, 1), (24, 6), (141, 8)])
def test_runs_at_once_on_a_gpu_go_by_its_memory(gibibytes: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=gibibytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    assert runs_at_once(torch.device("cuda:0")) == runs
    assert runs_at_once(torch.device("cpu")) == 8


def app_that(does: Callable[[], None], *clients: int) -> Any:
    """An app whose clients do something in the second round, made of functions that only cloudpickle copies."""

    def sometimes(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        kind, round = message.metadata.message_type, message.metadata.group_id
        if (kind, round) == ("train", "2") and context.node_config["partition-id"] in clients:
            assert multiprocessing.parent_process() is not None, "this is the run's own process"
            does()
        return call_next(message, context)

    def model(client: Any) -> nn.Module:
        width = 20 + 4 * client.partition_id
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    return fedhet.make_client_app(model=model, mods=[sometimes])


@pytest.mark.parametrize(
    ("does", "reason", "waits"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "'fedhet worker' ended with exit code -9", {"timeout": 300}),
        pytest.param(lambda: time.sleep(120), "no reply within", {}, marks=pytest.mark.slow),
    ],
    ids=["dies", "hangs"],
)
def test_a_worker_that_dies_or_hangs_fails_one_client(
    does: Callable[[], None],
    reason: str,
    waits: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WorkerGrid, "patience", 60)  # but a timeout has workers from the first message on
    monkeypatch.setattr(WorkerGrid, "_preference", lambda *given: -given[-1].metadata.dst_node_id)  # 0 to 2 together
    watch = Watch()
    own = settings(**{"method": "fd", "timeout": 5, "fraction-train": 1.0, **waits}, workers=2)
    run_locally(own, tmp_path, app=app_that(does, 2), observers=[watch])
    history = Run(tmp_path).rows
    assert [row["failures"] for row in history[:2]] == [[], []]
    (failure,) = history[2]["failures"]
    assert failure["client"] == "2"
    assert reason in failure["reason"]
    assert not history[3]["failures"]
    assert len({pid for pids in watch.seen for pid in pids}) >= 3
    assert workers() == []


def test_what_cannot_be_copied_stays_in_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generator = (number for number in range(1000))

    def model(client: Any) -> nn.Module:
        torch.manual_seed(next(generator))
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    run_locally(settings(workers=2, rounds=1), tmp_path, app=fedhet.make_client_app(model=model))
    assert "one after the other: the client app cannot be copied" in caplog.text
    assert not Run(tmp_path).rows[-1]["failures"]


@pytest.mark.parametrize("number", [1, 2])
def test_batches_of_many_clients(number: int) -> None:
    """Messages of a batch are far apart, and more than the grid looks at together."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    with WorkerGrid(app, 700, batch_size=20, workers=number, timeout=60) as grid:
        nodes = list(grid.get_node_ids())
        grid._alike = dict.fromkeys(nodes, "of one kind")
        messages = [Message(RecordDict(), node, "train", group_id="1") for node in nodes]
        assert sorted(reply.metadata.src_node_id for reply in grid.send_and_receive(messages)) == nodes
