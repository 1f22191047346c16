"""Seconds a round, against a bare PyTorch loop that does the same work; and the memory of a run with many clients."""

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

import fedhet
from fedhet import models
from fedhet.algorithms.alignment.cka import distance_to
from fedhet.algorithms.alignment.targets import cluster_rows
from fedhet.config import configuration
from fedhet.data import ClientData, Examples, load
from fedhet.engines.running import run_locally
from fedhet.engines.workers import WorkerGrid
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.setup import client_setup
from fedhet.training import read
from fedhet.utils.process import standard_settings
from tests.benchmarks.batches import mlp

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

    def __init__(self, own: dict[str, object]) -> None:
        self.config = configuration.resolve(own)
        self.dataset = client_setup.dataset_of(self.config)
        clients = self.config.clients
        infos = [client_setup.ClientInfo(str(i), i, clients, self.config) for i in range(clients)]
        self.data = [client_setup.data_of(info) for info in infos]
        self.models = [self.build(name) for name in itertools.islice(itertools.cycle(self.names()), clients)]

    def names(self) -> list[str]:
        """Architectures, dealt in turn."""
        return models.expand(self.config.architectures)

    def build(self, name: str) -> nn.Module:
        """A client's network, `body` and then `head`, with PyTorch's own max pooling, as in anybody's loop."""
        model = models.build(name, self.dataset.input_shape, self.dataset.classes)
        if "/" in name:  # of torchvision
            return model
        for place, layer in enumerate(model.body):
            if isinstance(layer, nn.MaxPool2d):
                model.body[place] = nn.MaxPool2d(2)
        return model

    def round(self) -> None:
        """Train all, from the mean of what the last round made."""
        model, total = self.models[0], sum(len(data.train) for data in self.data)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        mean = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
        for data in self.data:
            model.load_state_dict(weights)
            self.client(model, data)
            for name, tensor in model.state_dict().items():
                mean[name] += tensor * (len(data.train) / total)
        model.load_state_dict(mean)

    def client(self, model: nn.Module, data: ClientData) -> None:
        """The work of a client with its data."""
        self.evaluate(model, data.test.inputs, data.test.labels)
        self.train(model, data.train.inputs, data.train.labels)
        self.evaluate(model, data.test.inputs, data.test.labels)

    def train(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        order, loss_sum = torch.randperm(len(labels)), 0.0
        for step, index in enumerate(order.split(BATCH)):
            optimizer.zero_grad()
            loss = self.loss(model, self.dataset.transform(inputs[index]), labels[index], step)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(index)
        return loss_sum / len(labels)

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, step: int) -> Tensor:
        """The loss of a step."""
        return nn.functional.cross_entropy(model(images), labels)

    def scores(self, model: nn.Module, images: Tensor) -> Tensor:
        """The scores that are evaluated."""
        return model(images)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        model.eval()
        outputs = self.scores(model, self.dataset.transform(inputs))
        loss = nn.functional.cross_entropy(outputs, labels).item()
        return (outputs.argmax(1) == labels).float().mean().item(), loss


class BareFedProto(BareLoop):
    """FedProto: each client's own network, and the mean of what they project the images of a class to."""

    prototypes: Tensor | None = None

    def build(self, name: str) -> nn.Module:
        model, width = super().build(name), self.config.options.width
        model.body.append(nn.Linear(model.head.in_features, width))
        model.head = nn.Linear(width, self.dataset.classes)
        return model

    def round(self) -> None:
        width, classes = self.config.options.width, self.dataset.classes
        sums, counts = torch.zeros(classes, width), torch.zeros(classes)
        for model, data in zip(self.models, self.data, strict=True):
            self.client(model, data)
            with torch.inference_mode():
                sums.index_add_(0, data.train.labels, model.body(self.dataset.transform(data.train.inputs)))
                counts.index_add_(0, data.train.labels, torch.ones(len(data.train)))
        self.prototypes = sums / counts[:, None]

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, step: int) -> Tensor:
        phi = model.body(images)
        loss = nn.functional.cross_entropy(model.head(phi), labels)
        if self.prototypes is None:
            return loss
        return loss + self.config.options.weight * nn.functional.mse_loss(phi, self.prototypes[labels])

    def scores(self, model: nn.Module, images: Tensor) -> Tensor:
        if self.prototypes is None:
            return model(images)
        return -torch.cdist(model.body(images), self.prototypes).square()


class BareFedHeNN(BareLoop):
    """FedHeNN with the spectral target: CKA to how all cluster the public dataset, by fedhet's functions."""

    target: Tensor | None = None

    def __init__(self, own: dict[str, object]) -> None:
        super().__init__(own)
        public = client_setup.public_dataset(self.config)
        assert public is not None
        self.public = public.inputs

    def round(self) -> None:
        told = []
        for model, data in zip(self.models, self.data, strict=True):
            self.client(model, data)
            told.append(read(model, self.public, self.dataset.transform).softmax(1))
        self.target = cluster_rows(told, generator=torch.Generator())

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, step: int) -> Tensor:
        own, loss = self.config.options, super().loss(model, images, labels, step)
        if self.target is None or step % own.rad_every:
            return loss
        rows = torch.randperm(len(self.target))[: own.rad_batch]
        phi = model.body(self.dataset.transform(self.public[rows]))
        return loss + own.eta0 * own.rad_every * distance_to(phi, self.target[rows], kind=("linear", True))


class BareOwnNetworks(BareLoop):
    """FedAvg of 200 clients with networks and data of the user's own."""

    def __init__(self) -> None:
        infos = [client_setup.ClientInfo(str(i), i, 200, configuration.resolve({})) for i in range(200)]
        parts = [some_digits(info) for info in infos]
        self.data = [ClientData(Examples(*part["train"]), Examples(*part["test"])) for part in parts]
        self.models = [mlp(infos[0])]
        self.dataset = replace(load("digits"), transform=lambda inputs: inputs)


class Interleaved(Observer):
    """Runs the bare loop between fedhet's rounds, so that both sides meet the same machine; `clock` returns seconds."""

    def __init__(self, bare: BareLoop, clock: Callable[[], float]) -> None:
        self.bare = bare
        self.clock = clock
        self.resumed = 0.0
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def round(self, run: RunInfo, report: RoundReport) -> None:
        now = self.clock()
        if report.row["round"] and not report.row.get("final"):
            self.ours.append(now - self.resumed)
            started = self.clock()
            self.bare.round()
            self.theirs.append(self.clock() - started)
        self.resumed = self.clock()


OF_METHOD: dict[str, dict[str, object]] = {
    "fedavg": {"architectures": "cnn"},
    "fedproto": {"architectures": "cnn,cnn-3-3", "fedproto.width": 32},
    "fedhenn": {"architectures": "cnn-family", "public-samples": 500, "samples-per-client": 40, "fedhenn.rad-every": 4},
}
BARE = {"fedavg": BareLoop, "fedproto": BareFedProto, "fedhenn": BareFedHeNN}


def of_method(method: str, rounds: int) -> dict[str, object]:
    own: dict[str, object] = {"method": method, "local-epochs": 1, "closing-epochs": 0, "fraction-train": 1.0}
    return {**settings("cnn"), **own, **OF_METHOD[method], "rounds": rounds}


LIMITS = {
    "fedavg": 0.75,
    "fedavg compiled": 0.65,
    "fedavg of mlp": 1.15,
    "fedavg of mlp compiled": 1.05,
    "fedavg of resnet": 1.1,
    "fedproto": 0.95,
    "fedproto compiled": 0.95,
    "fedhenn": 0.95,
}
OTHERS: dict[str, dict[str, object]] = {
    "mlp": {"architectures": "mlp"},
    "resnet": {"architectures": "torchvision/resnet18", "input-size": 32, "clients": 4, "rounds": 7},
}
"""Networks other than the method's, of cases of `LIMITS`."""


@pytest.mark.parametrize("case", LIMITS)
def test_a_round_in_one_process_takes_less_cpu_time_than_a_bare_loop(case: str, tmp_path: Path) -> None:
    method, _, network = case.removesuffix(" compiled").partition(" of ")
    own = of_method(method, rounds=16) | OTHERS.get(network, {}) | {"compile": case.endswith(" compiled")}
    with standard_settings():
        observer = Interleaved(BARE[method](own), time.process_time)
        run_locally(configuration.resolve(own), tmp_path / "run", observers=[observer])
    ours, theirs = statistics.median(observer.ours[2:]), statistics.median(observer.theirs[2:])
    print(f"\n{case}: fedhet {ours:.3f} s a round, bare loop {theirs:.3f} s, ratio {ours / theirs:.3f}")
    assert ours / theirs <= LIMITS[case]


@pytest.mark.parametrize("compiled", [False, True])
def test_own_networks_given_as_functions_against_a_bare_loop(compiled: bool, tmp_path: Path) -> None:
    own = {"method": "fedavg", "clients": 200, "rounds": 9, "workers": 1, "preset": "", "report": False}
    own |= {"batch-size": BATCH, "learning-rate": RATE, "local-epochs": 1, "compile": compiled}
    with standard_settings():
        observer = Interleaved(BareOwnNetworks(), time.process_time)
        fedhet.run(own, model=mlp, data=some_digits, out=tmp_path / "run", observers=[observer], progress=False)
    ours, theirs = statistics.median(observer.ours[2:]), statistics.median(observer.theirs[2:])
    print(f"\n200 own MLPs: fedhet {ours:.3f} s a round, bare loop {theirs:.3f} s, ratio {ours / theirs:.3f}")
    assert ours / theirs <= 1.2


@pytest.mark.parametrize("method", BARE)
def test_two_workers_with_batches_take_less_time_than_a_bare_loop_on_one_core(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerGrid, "patience", 0)
    own = of_method(method, rounds=16)
    with standard_settings():
        observer = Interleaved(BARE[method](own), time.perf_counter)
        run_locally(configuration.resolve({**own, "workers": 2}), tmp_path / "run", observers=[observer])
    ours, theirs = statistics.median(observer.ours[2:]), statistics.median(observer.theirs[2:])
    ratio = ours / theirs
    print(f"\n{method}: two workers {ours:.3f} s a round, bare loop {theirs:.3f} s, ratio {ratio:.3f} (<= .75)")
    assert ratio <= 0.75


def test_two_workers_beside_flowers_ray_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGrid, "patience", 0)
    own = of_method("fedavg", rounds=12)
    del own["workers"]
    seconds = {}
    for engine, workers in (("local", {"workers": 2}), ("ray", {})):
        ran = fedhet.run({**own, **workers}, engine=engine, out=tmp_path / engine)
        rows = [row for row in ran.history if row["round"] and not row.get("final")]
        seconds[engine] = statistics.median(row["timing"]["seconds"] for row in rows[2:])
    ours, theirs = seconds["local"], seconds["ray"]
    print(f"\nfedavg: two workers {ours:.3f} s a round, Ray {theirs:.3f} s, ratio {ours / theirs:.3f} (<= .5)")
    assert ours / theirs <= 0.5


class Scale(Observer):
    """Seconds of each round that trains, and memory of all processes; pages that several share are counted once."""

    def __init__(self) -> None:
        self.last, self.seconds, self.memory = 0.0, list[float](), 0

    def round(self, run: RunInfo, report: RoundReport) -> None:
        now = time.perf_counter()
        if report.row["round"] and not report.row.get("final"):
            self.seconds.append(now - self.last)
        self.last = now
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self.memory = max(self.memory, sum(each.memory_full_info().pss for each in family))


def some_digits(client: client_setup.ClientInfo) -> dict[str, tuple[Tensor, Tensor]]:
    """64 images to train on and 16 to test on, drawn anew for each client: digits has too few to deal to thousands."""
    dataset = load("digits")
    rows = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(client.partition_id))[:80]
    images, labels = dataset.transform(dataset.train.inputs[rows]), dataset.train.labels[rows]
    return {"train": (images[:64], labels[:64]), "test": (images[64:], labels[64:])}


@pytest.mark.parametrize("clients", [20, 200, 2000])
def test_time_and_memory_by_number_of_clients(clients: int, tmp_path: Path) -> None:
    """Twenty clients a round, sampled of that many, with two workers, in a process of its own."""
    program = f"""
import statistics, fedhet
from tests.benchmarks.test_round import Scale, some_digits
scale = Scale()
fedhet.run(
    {{"method": "fedavg", "clients": {clients}, "fraction-train": {20 / clients}, "rounds": 12, "preset": "",
      "architectures": "cnn", "evaluate-every": 12, "workers": 2}},
    data=some_digits,
    out={str(tmp_path / "run")!r},
    observers=[scale],
)
print(statistics.median(scale.seconds[1:-1]), scale.memory / 1e9)
"""
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    seconds, memory = map(float, ran.stdout.splitlines()[-1].split())
    print(f"\n{clients} clients, 20 a round: {seconds:.3f} s a round, {memory:.2f} GB at most (<= 2)")
    assert memory <= 2
