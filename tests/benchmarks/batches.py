"""CPU time of a round with `client-batching = auto` against `off`, for every method and for own networks.

python -m tests.benchmarks.batches [METHOD ...]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedhet
from fedhet.data import load
from fedhet.methods import registry
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.setup.client_setup import ClientInfo
from fedhet.testing import Case
from tests.test_contract import OF_METHOD

ROUNDS = 7
TRAINING = {"clients": 10, "samples-per-client": 64, "rounds": ROUNDS, "learning-rate": 0.01, "momentum": 0.0}
LEFT_OUT = {"flha-ghn", "pfedhn"}  # whose servers work longest


class Cpu(Observer):
    """CPU time of the process for each round that trains."""

    def __init__(self) -> None:
        self.last = 0.0
        self.seconds: list[float] = []

    def round(self, run: RunInfo, report: RoundReport) -> None:
        now = time.process_time()
        if report.row["round"] and not report.row.get("final"):
            self.seconds.append(now - self.last)
        self.last = time.process_time()


def seconds_of(settings: dict[str, Any], **functions: Any) -> float:
    """Return the median CPU time of a round, without the first two."""
    observer = Cpu()
    with tempfile.TemporaryDirectory() as folder:
        fedhet.run(settings, out=Path(folder) / "run", observers=[observer], progress=False, **functions)
    return statistics.median(observer.seconds[2:] or observer.seconds)


def ratio(settings: dict[str, Any], **functions: Any) -> tuple[float, float]:
    """Return the median ratio of three pairs of runs, and seconds of a round one by one."""
    pairs = [
        (seconds_of({**settings, "client-batching": "auto"}, **functions), seconds_of(settings, **functions))
        for _ in range(3)
    ]
    return statistics.median(batched / alone for batched, alone in pairs), statistics.median(pair[1] for pair in pairs)


def mlp(client: ClientInfo) -> nn.Module:
    """A network with dropout and LayerNorm."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(*body, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def some_digits(client: ClientInfo) -> dict[str, tuple[Tensor, Tensor]]:
    """64 images to train on and 16 to test on, drawn anew for each client: digits has too few to deal to hundreds."""
    dataset = load("digits")
    rows = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(client.partition_id or 0))[:80]
    images = dataset.transform(dataset.train.inputs[rows])
    labels = dataset.train.labels[rows]
    return {"train": (images[:64], labels[:64]), "test": (images[64:], labels[64:])}


def own_networks() -> tuple[float, float]:
    """200 clients with networks of their own, given as functions."""
    settings = {"method": "fedavg", "clients": 200, "rounds": ROUNDS, "workers": 1, "preset": "", "report": False}
    settings |= {"batch-size": 16, "client-batching": "off", "learning-rate": 0.05}
    return ratio(settings, model=mlp, data=some_digits)


def of_method(name: str) -> tuple[float, float]:
    """Ten clients with the networks of the contract test."""
    return ratio(Case.of(name, OF_METHOD.get(name, {})).settings(TRAINING))


def main(names: list[str]) -> None:
    """Measure the methods `names`, by default all and own networks, and print a line for each."""
    rows: dict[str, Callable[[], tuple[float, float]]] = {"200 own MLPs": own_networks}
    for name in sorted({*registry.own_methods()} - LEFT_OUT):
        rows[name] = partial(of_method, name)
    for name in names or rows:
        value, alone = rows[name]()
        print(f"| {name} | {value:.2f} | {1000 * alone:.0f} ms |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
