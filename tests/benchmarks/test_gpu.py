"""Rounds of the papers' CIFAR-10 rows on a GPU: clients one by one, and in several processes.

The folder with CIFAR-10 is that of the environment's CIFAR10, or where fedhet looks for it. Skipped without a GPU.
"""

import os
import statistics
import time
from pathlib import Path

import pytest
import torch

from fedhet import config as configuration
from fedhet.engines.local import run_locally
from fedhet.engines.workers import WorkerGrid
from fedhet.machine import cores
from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.options import Config

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

PRESETS = Path(__file__).parents[2] / "run_configs"
ROWS: dict[str, tuple[str, dict[str, object], float]] = {
    # a fiftieth of 200 rounds of 20 epochs, and of a pass's first round of 150 epochs, which is the ensemble's too
    "fedhenn, five CNNs": ("fedhenn/cifar10_2cls_heterogeneous.toml", {"rounds": 4}, 200.0),
    "fedhenn, one CNN": ("fedhenn/cifar10_2cls_homogeneous.toml", {"rounds": 4}, 200.0),
    "fedma, VGG-9": ("ensemble/cifar10_vgg9.toml", {"local-epochs": 3}, 50.0),
}
"""The preset, what is run of it, and how many times as much as one of these rounds the row is, or its first round."""
WAYS: dict[str, dict[str, object]] = {
    "one by one": {"workers": 1},
    "in processes": {"workers": min(10, cores())},
    "by default": {},
}


class Clock(Observer):
    """Seconds of each round that trains."""

    def __init__(self) -> None:
        self.last, self.seconds = time.perf_counter(), list[float]()

    def round(self, run: RunInfo, report: RoundReport) -> None:
        now = time.perf_counter()
        if report.row["round"] and not report.row.get("final"):
            self.seconds.append(now - self.last)
        self.last = now


def row(preset: str, changes: dict[str, object]) -> Config:
    common = {"closing-epochs": 0, "evaluate-every": 1000, "report": False, "data": os.environ.get("CIFAR10", "")}
    return configuration.resolve({**configuration.read(PRESETS / preset), **common, **changes}, strict=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROWS)
def test_minutes_of_a_row(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset, few, times = ROWS[name]
    if way != "by default":
        monkeypatch.setattr(WorkerGrid, "patience", 0)
    clock = Clock()
    run_locally(row(preset, {**few, **WAYS[way]}), tmp_path / "run", observers=[clock])
    seconds = statistics.median(clock.seconds[1:] or clock.seconds)
    print(
        f"\n{name}, {way}: {seconds:.2f} s a round, so {seconds * times / 60:.1f} minutes for {times:g} times as much"
    )
    if way == "by default":
        assert seconds * times <= 600
