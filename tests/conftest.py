"""Fixtures that every part's tests share.

Use those that only set the scene with `pytestmark = pytest.mark.usefixtures("home", "no_report")`.
"""

import logging
import os
import pickle
import struct
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import settings
from torch import Tensor, nn

from fedhet.algorithms.graphs import graph
from fedhet.algorithms.matching import Matching
from fedhet.client.app import make_client_app
from fedhet.methods import registry
from fedhet.models.copies import storage_place
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.setup.client_setup import ClientInfo
from fedhet.utils.machine import cores
from fedhet.utils.statistics import ClientRow
from tests import made_up

LONGEST = [
    *("tests/test_contract.py", "tests/engines/test_ray.py", "tests/engines/test_flower.py", "tests/test_pages.py"),
    *("tests/strategies/test_own_settings.py", "tests/networks/test_table.py", "tests/comparing/test_recommending.py"),
    *("tests/test_presets.py", "tests/test_starting.py"),
]
"""Modules that begin first, in this order, so that others are done beside them."""

OF_A_CHECKOUT = [
    *("data/test_flower_datasets.py", "engines/test_deployment_kit.py", "strategies/test_controls.py"),
    *("test_generated.py", "test_pages.py", "test_readme.py", "test_release.py", "test_rooms.py"),
]
"""Modules that need more than an installed fedhet: pages, scripts of studies, files of the repository."""

collect_ignore = [] if (Path(__file__).resolve().parents[1] / "fedhet").is_dir() else OF_A_CHECKOUT
pytest.register_assert_rewrite("tests.contract")
torch.set_num_threads(1)

App = Callable[[Message, Context], Message]
Where = tuple[int, str, str]
"""Round, kind and client of a message; the kind is `query`, `first` (the question for the first weights), `train` or
`evaluate`."""

# A machine that is busy with something else is no failure.
settings.register_profile("fedhet", deadline=None)
settings.load_profile("fedhet")


class Watch(Observer):
    """An observer that keeps what it is told.

    Attributes:
        rows: of the history, one a round.
        clients: rows of all clients in all rounds.
        begun: first and last round, as it was told at the start.
        ended: `finished`, or the error; None before the end.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.clients: list[ClientRow] = []
        self.begun: tuple[int, int] | None = None
        self.ended: str | BaseException | None = None

    def started(self, run: RunInfo, first: int, last: int) -> None:
        self.begun = (first, last)

    def round(self, run: RunInfo, report: RoundReport) -> None:
        self.rows.append(report.row)
        self.clients += report.clients

    def finished(self, run: RunInfo) -> None:
        self.ended = "finished"

    def failed(self, run: RunInfo, error: BaseException) -> None:
        self.ended = error

    @property
    def repeatable(self) -> list[dict[str, Any]]:
        """The rows without what differs from run to run."""
        return [{key: value for key, value in row.items() if key != "timing"} for row in self.rows]


@pytest.fixture
def new_watch() -> type[Watch]:
    """The observer's class."""
    return Watch


@pytest.fixture
def watch() -> Watch:
    """An observer that keeps what it is told."""
    return Watch()


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write no report."""
    monkeypatch.setattr("fedhet.results.recorder.write_report", lambda folder: None)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home folder of the test's own, where clients without a `state-dir` keep their state."""
    folder = tmp_path / "home"
    monkeypatch.setenv("HOME", str(folder))
    return folder


class Tiny:
    """A model of 51 parameters, and 20 examples or more that it can learn."""

    @staticmethod
    def model(client: ClientInfo | None = None) -> nn.Sequential:
        """From 4 numbers to 3 classes."""
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    @staticmethod
    def data(client: ClientInfo, classes: int = 3) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Training and test part: of client 0 14 and 6 examples, of each further client 4 more to train on."""
        number = client.partition_id or 0
        inputs = torch.randn(20 + 4 * number, 4, generator=torch.Generator().manual_seed(number))
        labels = inputs[:, :classes].argmax(1)
        return (inputs[:-6], labels[:-6]), (inputs[-6:], labels[-6:])

    def app(self, model: Any = None, data: Any = None, **options: Any) -> ClientApp:
        """A client app of this model and these data, or of others."""
        return make_client_app(model=model or self.model, data=data or self.data, **options)


@pytest.fixture
def tiny() -> Tiny:
    """A tiny model and data."""
    return Tiny()


@pytest.fixture
def around(tiny: Tiny) -> Callable[..., App]:
    """Makes a client app that calls `before(where, message)` before, and `after(where, reply)` after another one.

    Both may change what they are given, or raise; a reply that `after` returns goes in place of the one given.
    """

    def make(
        before: Callable[[Where, Message], object] | None = None,
        after: Callable[[Where, Message], Message | None] | None = None,
        app: App | None = None,
    ) -> App:
        inner = app or tiny.app()

        def around(message: Message, context: Context) -> Message:
            where = _where(message, context)
            if before:
                before(where, message)
            reply = inner(message, context)
            return (after(where, reply) if after else None) or reply

        return around

    return make


@pytest.fixture
def failing(around: Callable[..., App]) -> Callable[..., App]:
    """Makes a client app that raises `RuntimeError("out of order")` where it is told to.

    Each place is (round, kind, client), None standing for any; `app` is that of the tiny model unless it is given.
    """

    def make(*places: tuple[int | None, str | None, str | None], app: App | None = None) -> App:
        def before(where: Where, message: Message) -> None:
            if any(all(want in (None, is_) for want, is_ in zip(place, where, strict=True)) for place in places):
                raise RuntimeError("out of order")

        return around(before=before, app=app)

    return make


def _where(message: Message, context: Context) -> Where:
    first = '"question": "first"' in str(message.content["request"].get("request"))
    kind = "first" if first else message.metadata.message_type
    return int(message.metadata.group_id), kind, str(context.node_config["partition-id"])


@pytest.fixture
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only where it knows the task, the run and the node."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with synthetic files of CIFAR-10 (200 images), CIFAR-100, MNIST, Shakespeare (5 roles), ChestX-ray14
    and Sentiment140 (4 users, with vectors of width 5)."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        count = 10 if name == "test_batch" else 40
        # Smooth ones: of noise all images look alike to a network, and nothing can be told from a kernel.
        coarse = rng.integers(256, size=(count, 3, 4, 4), dtype=np.uint8).repeat(8, 2).repeat(8, 3)
        batch = {"data": coarse.reshape(count, -1), "labels": [label % 10 for label in range(count)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    for name, count in (("train", 400), ("test", 100)):
        coarse = rng.integers(256, size=(count, 3, 4, 4), dtype=np.uint8).repeat(8, 2).repeat(8, 3)
        labels = {"fine_labels": [n % 100 for n in range(count)], "coarse_labels": [n % 20 for n in range(count)]}
        (folder / name).write_bytes(pickle.dumps({"data": coarse.reshape(count, -1), **labels}, protocol=2))
    for part, count in (("train", 600), ("t10k", 50)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            values = rng.integers(10 if kind == "labels-idx1" else 256, size=shape, dtype=np.uint8)
            head = struct.pack(f">BBBB{len(shape)}i", 0, 0, 8, len(shape), *shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + values.tobytes())
    made_up.shakespeare(folder, roles=5, characters=600)
    made_up.sentiment140(folder, users=4, tweets=240, vocabulary=12, words=9, width=5)
    chest = folder / "chestxray"
    chest.mkdir()
    made_up.chestxray14(chest, patients=120, side=16)
    return str(folder)


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder with cases from the reference implementations; tests that need it skip without it."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "reference"
    folder = Path(os.environ.get("FEDHET_REFERENCE", beside))
    if not folder.is_dir():
        pytest.skip("no reference cases here: set FEDHET_REFERENCE to their folder")
    return folder


@pytest.fixture
def reference_matching() -> Matching:
    """FedMA's matching with the bias's prior mean on column 0 after the first group, as in the authors' code."""

    class Reference(Matching):
        def prior_mean(self, states: Any, matrices: Any, groups: Any, index: int) -> Any:
            prior = super().prior_mean(states, matrices, groups, index)
            if index:
                prior[:] = 0
                prior[0] = 0.1
            return prior

    return Reference()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """All cores for the tests, one for those of a module, so that Ray runs once at a time; one for those named."""
    measured = "benchmark" in config.option.markexpr or any("benchmarks" in arg for arg in config.args)
    return 0 if measured or any("::" in arg for arg in config.args) else cores()


@pytest.fixture(autouse=True)
def _methods_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that a test makes known are forgotten behind it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(logging.getLogger("flwr"), "level", logging.INFO)  # which a command raises


@pytest.fixture(autouse=True, scope="session")
def _in_one_process() -> Iterator[None]:
    """However long clients take: what a test watches happens in its own process, unless it asks for workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedhet.engines.workers.WorkerGrid.patience", float("inf"))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests and benchmarks out unless they are asked for: by `-m`, by name, or by their folder.

    A slow test of a slow case, that is, one with both marks, is long: the property is checked on other cases.
    """
    for item in items:
        if len(list(item.iter_markers("slow"))) > 1:
            item.add_marker("long")
    if any("::" in arg for arg in config.args) or config.option.markexpr not in ("", "slow"):
        return
    left_out = {"long"} if config.option.markexpr else {"slow", "long"}
    left_out.add("relations")
    left_out |= set() if any("benchmarks" in arg for arg in config.args) else {"benchmark"}
    chosen, others = [], []
    for item in items:
        (others if any(item.get_closest_marker(name) for name in left_out) else chosen).append(item)
    config.hook.pytest_deselected(items=others)
    places = {name: place for place, name in enumerate(LONGEST)}
    items[:] = sorted(chosen, key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))


@pytest.fixture(autouse=True, scope="session")
def _exported_once() -> Iterator[None]:
    """Networks that are built alike are exported once in a session: an export takes .1 s and more."""
    export, programs = graph._export, dict[Hashable, torch.export.ExportedProgram]()

    def exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
        key = _built(model, example)
        if key is None:
            return export(model, example)
        if key not in programs:
            programs[key] = export(model, example)
        return programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_export", exported)
        yield


def _built(model: nn.Module, example: Tensor) -> Hashable | None:
    """All that an export depends on; None where a network holds more than layers, arrays and plain values."""
    found: list[Hashable] = [tuple(example.shape), example.dtype]
    first: dict[Hashable, str] = {}
    for name, value in [*model.state_dict(keep_vars=True).items(), *model.named_buffers()]:
        found.append((name, tuple(value.shape), value.dtype, first.setdefault(storage_place(value), name)))
    for name, module in model.named_modules(remove_duplicate=False):
        torchs = type(module).__module__.startswith("torch.")  # which keeps lists of its weights beside its options
        options = {k: v for k, v in vars(module).items() if k not in _OF_ALL_MODULES and not (torchs and k[0] == "_")}
        plain = all(isinstance(value, int | float | str | tuple | np.integer | None) for value in options.values())
        if not plain or module._forward_hooks or module._forward_pre_hooks:
            return None
        found.append((name, type(module), repr(options)))
    return tuple(found)


_OF_ALL_MODULES = vars(nn.Module()).keys()
