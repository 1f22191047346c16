"""The runs of the contract's tests, and the files that a run leaves."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from fedhet import config as configuration
from fedhet import population, registry, validation
from fedhet.client.app import make_client_app
from fedhet.engines.local import run_locally
from fedhet.files import read_csv
from fedhet.flower import ClientApp, Message, RecordDict
from fedhet.method import Method, Traits
from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.options import Config, Value
from fedhet.server import FederatedStrategy, Hooks
from fedhet.serving import serve
from fedhet.testing.faults import Nodes, Tampering, at, raising

COMMON: dict[str, Value] = {
    "dataset": "digits",
    "clients": 3,
    "rounds": 3,
    "local-epochs": 1,
    "batch-size": 16,
    "learning-rate": 0.1,
    "momentum": 0.5,
    "samples-per-client": 32,
    "public-samples": 64,
    "closing-epochs": 0,
    "fraction-train": 1.0,
    "workers": 1,
}
"""The settings of all methods' runs: each takes a fraction of a second."""

LEARNS: dict[str, Value] = {
    "rounds": 4,
    "local-epochs": 3,
    "samples-per-client": 0,
    "momentum": 0.9,
    "learning-rate": 0.05,
}
"""The settings with which they learn, unless the case says otherwise."""

MIXED = {"equal": "mlp-30", "widths": "mlp-30,mlp-20", "any": "mlp-20,cnn-1-1", "alike": "cnn-2-2,cnn-3-2"}
"""Architectures that differ as far as a method's networks may; `alike` have heads, and some layers, of equal shapes."""

PARTIAL: dict[str, Value] = {
    "clients": 4,
    "rounds": 4,
    "fraction-train": 0.75,
    "closing-epochs": 1,
    "evaluate-every": 2,
}
"""An ordinary run: not all clients train in a round, not every round is evaluated, and one closes the run."""


@dataclass(frozen=True)
class Case:
    """A method in the contract test: the value of the key `method`, and additional settings.

    Architectures are mixed ones, where the method's networks may differ, unless they are given.
    """

    reference: str
    own: tuple[tuple[str, Value], ...] = ()
    architectures: str = ""

    @classmethod
    def of(cls, method: str | Method, settings: Mapping[str, Value], architectures: str = "") -> Self:
        """A case of a method that goes by a name or a reference, or is given."""
        if isinstance(method, Method):
            registry.give(method)
            method = method.name
        return cls(method, tuple(settings.items()), architectures)

    @property
    def method(self) -> Method:
        """The method."""
        return registry.method(self.reference)

    @property
    def server(self) -> type[FederatedStrategy[Any, Any]]:
        """Its server side."""
        return registry.strategy(self.method.name)

    @cached_property
    def traits(self) -> Traits:
        """The method's traits."""
        settings = {"method": self.reference, **COMMON, **dict(self.own)}
        return self.method.traits_of(configuration.resolve(settings, strict=False).parameters)

    @property
    def draws_every_round(self) -> bool:
        """Whether clients are drawn round by round; in a method of passes, they are drawn and evaluated once a pass."""
        return self.server.participants is Hooks.participants

    def settings(self, changes: Mapping[str, Value] | None = None, **keys: Value) -> dict[str, Value]:
        """Return the settings of a run: common ones, the case's own and changes, without those that have no effect."""
        traits = self.traits
        shared = traits.networks == "any" and traits.shares.averaged and traits.shares.keys != "nothing"
        chosen: dict[str, Value] = {
            "method": self.reference,
            "architectures": self.architectures or MIXED["alike" if shared else traits.networks],
            **COMMON,
            **dict(self.own),
            **(changes or {}),
            **{key.replace("_", "-"): value for key, value in keys.items()},
        }
        config = configuration.resolve(chosen, strict=False)
        idle = validation.ineffective(config, self.method.traits_of(config.parameters))
        return {key: value for key, value in chosen.items() if key not in idle}

    def config(self, changes: Mapping[str, Value] | None = None, **keys: Value) -> Config:
        """`settings`, complete."""
        return configuration.resolve(self.settings(changes, **keys))


@dataclass
class Run:
    """A finished run: its files, without what must differ, every request with its reply, and the last state."""

    folder: Path
    exchanges: list[tuple[RecordDict, Message]] = field(default_factory=list)
    state: Any = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rounds of the history."""
        text = (self.folder / "history.jsonl").read_text(encoding="utf-8")
        return [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in text.splitlines()]

    @property
    def clients(self) -> list[dict[str, str]]:
        """The rows of `clients.csv`."""
        return read_csv(self.folder / "clients.csv")

    @property
    def models(self) -> dict[str, bytes]:
        """The saved models by file name."""
        return {path.name: path.read_bytes() for path in sorted((self.folder / "models").glob("*.safetensors"))}

    @property
    def checkpoint(self) -> dict[str, bytes]:
        """The last checkpoint by file name."""
        return {path.name: path.read_bytes() for path in sorted((self.folder / "checkpoint").glob("*.safetensors"))}

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return {key: value for key, value in summary.items() if key != "seconds"}

    @property
    def files(self) -> dict[str, Any]:
        """The content of all files that must repeat."""
        table = (self.folder / "clients.csv").read_bytes()
        contents = {"clients.csv": table, "rows": self.rows, "summary": self.summary}
        return contents | {"models": self.models, "checkpoint": self.checkpoint}

    @property
    def failures(self) -> list[tuple[int, str]]:
        """Round and client of each failure."""
        return [(row["round"], failure["client"]) for row in self.rows for failure in row["failures"]]

    def row(self, number: int) -> dict[str, Any]:
        """One round of the history."""
        return next(row for row in self.rows if row["round"] == number)


def run(
    folder: Path, settings: Mapping[str, Value], *, app: ClientApp | None = None, observers: Sequence[Observer] = ()
) -> Run:
    """Run settings in this process."""
    run_locally(configuration.resolve(settings), folder, app=app, observers=observers)
    return Run(folder)


def run_on(
    folder: Path,
    settings: Mapping[str, Value],
    partitions: Sequence[int],
    *,
    between: Mapping[int, tuple[int, int]] | None = None,
) -> Run:
    """Run settings on nodes that join and leave (see `Nodes`)."""
    config = configuration.resolve({key: value for key, value in settings.items() if key != "clients"})
    config = config.but(state_dir=str(folder / "state"), clients=len(set(partitions)))
    grid = Nodes(make_client_app(), partitions, between=between)
    serve(config, grid, folder, engine="local", public=population.public_dataset(config), observers=[grid])
    return Run(folder)


class Remembering(Observer):
    """An observer that keeps a copy of the state after the last round."""

    state: Any = None

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Copy the state that is saved now."""
        if not report.row.get("final"):
            self.state = copy.deepcopy(run.state)


@dataclass
class Kept:
    """Runs of a case that several tests look at, or compare theirs with; each is run once."""

    case: Case
    folders: pytest.TempPathFactory
    runs: ClassVar[dict[tuple[str, Case], Run]] = {}

    def __call__(self, name: str, case: Case | None = None) -> Run:
        """Return the run called `ordinary` or `crash`."""
        case = case or self.case
        if (name, case) not in self.runs:
            folder = self.folders.mktemp("kept") / "run"
            self.runs[name, case] = (self._ordinary if name == "ordinary" else self._crash)(case, folder)
        return self.runs[name, case]

    def _ordinary(self, case: Case, folder: Path) -> Run:
        exchanges: list[tuple[RecordDict, Message]] = []
        app = Tampering(after=lambda message, client, reply: exchanges.append((message.content, reply)))
        remembering = Remembering()
        done = run(folder, case.settings(PARTIAL), app=app, observers=[remembering])
        return Run(done.folder, exchanges, remembering.state)

    def _crash(self, case: Case, folder: Path) -> Run:
        """Client 1 does nothing in the second of three rounds: that is what any fault of it must come to."""
        app = Tampering(before=raising(at([2], "1"), RuntimeError("out of order")))
        return run(folder, case.settings(rounds=3), app=app)
