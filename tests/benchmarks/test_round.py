"""Seconds a round, against a bare PyTorch loop that does the same work; and the memory of a run with many clients."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from fedhet import config as configuration
from fedhet import models, population
from fedhet.engines.local import run_locally
from fedhet.engines.workers import WorkerGrid
from fedhet.observing import Observer, RoundReport
from fedhet.server import FederatedStrategy

pytestmark = pytest.mark.benchmark

CLIENTS, BATCH, RATE, ROUNDS = 20, 16, 0.05, 31


def settings(architecture: str) -> dict[str, object]:
    return {
        "method": "fedavg",
        "dataset": "digits",
        "clients": CLIENTS,
        "architectures": architecture,
        "batch-size": BATCH,
        "learning-rate": RATE,
        "rounds": ROUNDS,
        "workers": 1,
    }


class BareLoop:
    """FedAvg with evaluation before and after, in plain PyTorch, one round a call."""

    def __init__(self, architecture: str) -> None:
        self.config = configuration.resolve(settings(architecture))
        dataset = population.dataset_of(self.config)
        self.transform = dataset.transform
        infos = [population.ClientInfo(str(i), i, CLIENTS, self.config) for i in range(CLIENTS)]
        self.data = [population.data_of(info) for info in infos]
        self.model = models.build(architecture, dataset.input_shape, dataset.classes)
        self.weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def __call__(self) -> float:
        start = time.perf_counter()
        total = sum(len(data.train) for data in self.data)
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        for data in self.data:
            self.model.load_state_dict(self.weights)
            self.evaluate(data.test.inputs, data.test.labels)
            self.train(data.train.inputs, data.train.labels)
            self.evaluate(data.test.inputs, data.test.labels)
            for name, tensor in self.model.state_dict().items():
                mean[name] += tensor * (len(data.train) / total)
        self.weights = mean
        return time.perf_counter() - start

    def train(self, inputs: Tensor, labels: Tensor) -> float:
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        order, loss_sum = torch.randperm(len(labels)), 0.0
        for index in order.split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.transform(inputs[index])), labels[index])
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(index)
        return loss_sum / len(labels)

    @torch.inference_mode()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        self.model.eval()
        outputs = self.model(self.transform(inputs))
        loss = nn.functional.cross_entropy(outputs, labels).item()
        return (outputs.argmax(1) == labels).float().mean().item(), loss


class Interleaved:
    """Observer that runs the bare loop between fedhet's rounds, so that both sides meet the same machine."""

    def __init__(self, bare: Callable[[], float]) -> None:
        self.bare, self.ours, self.theirs = bare, [], []
        self.resumed = 0.0

    def started(self, strategy: FederatedStrategy, first: int, last: int) -> None:
        pass

    def round(self, strategy: FederatedStrategy, report: RoundReport) -> None:
        now = time.perf_counter()
        if report.row["round"] and not report.row.get("final"):
            self.ours.append(now - self.resumed)
            self.theirs.append(self.bare())
        self.resumed = time.perf_counter()

    def finished(self, strategy: FederatedStrategy) -> None:
        pass

    def failed(self, strategy: FederatedStrategy, error: BaseException) -> None:
        pass


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("architecture", "limit"), [("cnn", 1.15), ("mlp", 1.3)])
def test_round_costs_little_more_than_a_bare_loop(architecture: str, limit: float, tmp_path: Path) -> None:
    with one_thread():
        observer = Interleaved(BareLoop(architecture))
        run_locally(configuration.resolve(settings(architecture)), tmp_path / "run", observers=[observer])
    ours, theirs = statistics.median(observer.ours[1:]), statistics.median(observer.theirs[1:])
    ratio = ours / theirs
    print(f"\n{architecture}: fedhet {ours:.3f} s a round, bare loop {theirs:.3f} s, ratio {ratio:.3f} (<= {limit})")
    assert ratio <= limit


WITH_WORKERS: dict[str, dict[str, object]] = {
    "fedavg": {"architectures": "cnn"},
    "fedproto": {"architectures": "cnn,cnn-3-3", "fedproto.width": 32},
    "fedhenn": {"architectures": "cnn-family", "shared-samples": 500, "samples-per-client": 40},
}


class Clock(Observer):
    """Seconds of each round that trains."""

    def __init__(self) -> None:
        self.last, self.seconds = 0.0, list[float]()

    def round(self, strategy: object, report: RoundReport) -> None:
        now = time.perf_counter()
        if report.row["round"] and not report.row.get("final"):
            self.seconds.append(now - self.last)
        self.last = now


@pytest.mark.parametrize("method", WITH_WORKERS)
def test_two_workers_halve_a_round(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGrid, "patience", 0)
    own = {**settings("cnn"), "method": method, "fraction-train": 1.0, "closing-epochs": 0, "rounds": 8}
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with one_thread():
        for turn in range(2):
            for number in (1, 2):
                clock = Clock()
                config = configuration.resolve({**own, **WITH_WORKERS[method], "workers": number})
                run_locally(config, tmp_path / f"{number}-{turn}", observers=[clock])
                seconds[number] += clock.seconds[2:]
    one, two = (statistics.median(seconds[number]) for number in (1, 2))
    print(f"\n{method}: one process {one:.3f} s a round, two workers {two:.3f} s, ratio {two / one:.3f} (<= .6)")
    assert two / one <= 0.6


@pytest.mark.parametrize(("method", "limit"), [("fedavg", 0.75), ("fedproto", 0.9), ("fedhenn", 0.9)])
def test_twenty_clients_side_by_side_take_less_time_on_one_core(method: str, limit: float, tmp_path: Path) -> None:
    own = {**settings("cnn"), "method": method, "fraction-train": 1.0, "closing-epochs": 0, "rounds": 8}
    seconds: dict[str, list[float]] = {"off": [], "20": []}
    with one_thread():
        for turn in range(2):
            for cohort in seconds:
                clock = Clock()
                config = configuration.resolve({**own, **WITH_WORKERS[method], "cohort": cohort})
                run_locally(config, tmp_path / f"{cohort}-{turn}", observers=[clock])
                seconds[cohort] += clock.seconds[2:]
    one, joint = (statistics.median(each) for each in seconds.values())
    print(
        f"\n{method}: one by one {one:.3f} s a round, side by side {joint:.3f} s, ratio {joint / one:.3f} (<= {limit})"
    )
    assert joint / one <= limit


class Scale(Clock):
    """Beside the seconds, the memory of this process and all below it, pages that they share counted in each."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = 0

    def round(self, strategy: object, report: RoundReport) -> None:
        super().round(strategy, report)
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self.memory = max(self.memory, sum(each.memory_info().rss for each in family))


@pytest.mark.parametrize("clients", [20, 200, 2000])
def test_time_and_memory_by_number_of_clients(clients: int, tmp_path: Path) -> None:
    """Twenty clients a round, sampled of that many, with two workers, in a process of its own."""
    program = f"""
import statistics, fedhet
from test_round import Scale
scale = Scale()
fedhet.run(
    {{"method": "fedavg", "dataset": "digits", "clients": {clients}, "fraction-train": {20 / clients}, "rounds": 12,
      "preset": "", "samples-per-client": 0, "evaluate-every": 12, "workers": 2}},
    out={str(tmp_path / "run")!r},
    observers=[scale],
)
print(statistics.median(scale.seconds[1:-1]), scale.memory / 1e9)
"""
    here = Path(__file__).parent
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=here)
    seconds, memory = map(float, ran.stdout.splitlines()[-1].split())
    print(f"\n{clients} clients, 20 a round: {seconds:.3f} s a round, {memory:.2f} GB at most")
    assert memory <= 3


def test_memory_of_two_hundred_clients(tmp_path: Path) -> None:
    """Peak resident memory of a whole process that runs 200 clients with different networks."""
    program = f"""
import resource, fedhet
fedhet.run(
    {{"method": "fedavg", "dataset": "digits", "clients": 200, "architectures": "cnn-2-2", "rounds": 3}},
    out={str(tmp_path / "run")!r},
)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    peak = float(output.splitlines()[-1])
    print(f"\n200 clients on digits: peak {peak:.2f} GiB (<= 1.5 GB)")
    assert peak * 1.0737 <= 1.5
