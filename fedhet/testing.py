"""Tests for your own method: properties that every method must have. Requires pytest.

```python
from fedhet.testing import MethodContract


class TestMine(MethodContract):
    method = "mine"  # a registered name, "package.module:name", or a Method
    settings = {"mine.weight": 0.5}  # in addition to the tests' settings (`COMMON`)
```

Runs take place in this process, on the data set `digits`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest

import fedhet
from fedhet.client.app import make_client_app
from fedhet.config import configuration, validation
from fedhet.engines.running import run_locally
from fedhet.flower import ClientApp, Context, Message
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.methods import registry
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config, Value
from fedhet.results.history import MEASURED, read_clients, read_history
from fedhet.results.observers import Observer
from fedhet.utils.files import read_arrays
from fedhet.utils.statistics import ClientRow

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
    "report": False,
    "client-batching": "off",  # as in a run with an app of its own, such as `Tampering`
}
"""Values of configuration keys for all test runs, each of which takes a fraction of a second."""

# Settings with which a method is expected to learn.
LEARNS = {"rounds": 4, "local-epochs": 3, "samples-per-client": 0, "momentum": 0.9, "learning-rate": 0.05}
# Settings with which three of four clients train in each round, and every second round is evaluated.
PARTIAL = {"clients": 4, "rounds": 4, "fraction-train": 0.75, "closing-epochs": 1, "evaluate-every": 2}
# Architectures by the networks that a method allows; in `alike`, heads and some layers have equal shapes.
MIXED = {
    "equal": "mlp-30",
    "parts": "mlp-30",
    "widths": "mlp-30,mlp-20",
    "any": "mlp-20,cnn-1-1",
    "alike": "cnn-2-2,cnn-3-2",
}


def at(rounds: Sequence[int], client: str, kind: str = "train") -> Callable[[Message, str], bool]:
    """Return a function of (message, client name): True for messages of type `kind` to `client` in one of `rounds`."""
    hits = [(client, kind, str(number)) for number in rounds]
    return lambda message, to: (to, message.metadata.message_type, message.metadata.group_id) in hits


def raising(hit: Callable[[Message, str], bool], error: BaseException) -> Callable[[Message, str], None]:
    """Return a function for `Tampering(before=...)` that raises `error` if `hit(message, client name)` is true."""

    def fault(message: Message, client: str) -> None:
        if hit(message, client):
            raise error

    return fault


class Tampering(ClientApp):
    """fedhet's ClientApp with injected faults: calls `before(message, client)` and `after(message, client, reply)`.

    `client` is the client's name. The functions may change message and reply; `before` may raise an error.
    """

    def __init__(
        self,
        before: Callable[[Message, str], None] = lambda message, client: None,
        after: Callable[[Message, str, Message], None] = lambda message, client, reply: None,
    ) -> None:
        super().__init__()
        self.before, self.after, self.app = before, after, make_client_app()

    def __call__(self, message: Message, context: Context) -> Message:
        """Call `before`, let fedhet's ClientApp answer the message, call `after`, and return the reply."""
        client = str(context.node_config["partition-id"])
        self.before(message, client)
        reply = self.app(message, context)
        self.after(message, client, reply)
        return reply


@dataclass(frozen=True)
class Case:
    """A method to test: its name or reference (`package.module:name`), settings, and the clients' architectures.

    `own` has the settings as pairs (key, value). `architectures` are names separated by commas, such as `mlp-20,cnn`;
    if empty, networks differ as much as the method allows.
    """

    reference: str
    own: tuple[tuple[str, Value], ...] = ()
    architectures: str = ""

    @classmethod
    def of(cls, method: str | Method, settings: Mapping[str, Value], architectures: str = "") -> Self:
        """Create the case of a method, given as name, reference or Method, with `settings` and `architectures`."""
        if isinstance(method, Method):
            registry.register(method)
            method = method.name
        return cls(method, tuple(settings.items()), architectures)

    @property
    def method(self) -> Method:
        """The registered `Method` object to test."""
        return registry.method(self.reference)

    @cached_property
    def traits(self) -> Traits:
        """The properties of the method (`Traits`), given the settings of the case."""
        settings = {"method": self.reference, **COMMON, **dict(self.own)}
        return self.method.traits_of(configuration.resolve(settings, strict=False).options)

    def settings(self, changes: Mapping[str, Value] | None = None, **keys: Value) -> dict[str, Value]:
        """Return the values of a run's keys: those of `COMMON`, of the case (`own`), `changes`, and `keys`.

        Later ones take precedence; `keys` are written with `_` for `-`. Keys without an effect are left out.
        """
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
        idle = validation.ineffective(config, self.method.traits_of(config.options))
        return {key: value for key, value in chosen.items() if key not in idle}

    def config(self, changes: Mapping[str, Value] | None = None, **keys: Value) -> Config:
        """Return the configuration of a run with the case's settings, `changes` and `keys` (see `settings`)."""
        return configuration.resolve(self.settings(changes, **keys))


@dataclass
class Run:
    """The files of a finished run, without entries that differ from run to run, such as durations."""

    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of `history.jsonl` as dicts, one for each round."""
        return [{key: row[key] for key in row if key != "timing"} for row in read_history(self.folder)]

    @property
    def clients(self) -> list[ClientRow]:
        """The rows of `clients.csv`, one for each client and round."""
        return read_clients(self.folder)

    @property
    def models(self) -> dict[str, bytes]:
        """The content of the saved models, by file name."""
        return {path.name: path.read_bytes() for path in sorted((self.folder / "models").glob("*.safetensors"))}

    @property
    def checkpoint(self) -> dict[str, Any]:
        """The content of the last checkpoint's files: by file and name, arrays as (dtype, shape, bytes), and texts.

        The checkpoint's hashes of `history.jsonl` and `clients.csv` are left out, since these two files have durations.
        """
        contents: dict[str, Any] = {}
        for path in (self.folder / "checkpoint").glob("*.safetensors"):
            arrays, values = read_arrays(path)
            contents[path.name] = {
                name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()
            }
            contents[path.name] |= {name: value for name, value in values.items() if name != "digests"}
        return contents

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json` but for what a repeated run measures anew, or how it was started."""
        summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return {key: value for key, value in summary.items() if key not in MEASURED}

    @property
    def files(self) -> dict[str, Any]:
        """Results that must be equal if the run is repeated, by name of the property; `summary` is without warnings."""
        summary = {name: value for name, value in self.summary.items() if name != "warnings"}
        files = {"models": self.models, "checkpoint": self.checkpoint}
        return {"clients": self.clients, "rows": self.rows, "summary": summary, **files}

    @property
    def failures(self) -> list[tuple[int, str]]:
        """Pairs of the round and the client's name of each failure."""
        return [(row["round"], failure["client"]) for row in self.rows for failure in row["failures"]]

    def row(self, number: int) -> dict[str, Any]:
        """Return the line of `history.jsonl` for the round `number`, as a dict."""
        return next(row for row in self.rows if row["round"] == number)


def run(
    folder: Path, settings: Mapping[str, Value], *, app: ClientApp | None = None, observers: Sequence[Observer] = ()
) -> Run:
    """Execute a run with `settings` by key and the ClientApp `app` (by default fedhet's); return the run's files."""
    run_locally(configuration.resolve(settings), folder, app=app, observers=observers)
    return Run(folder)


class RunCache:
    """Runs shared by tests, by name and `Case`: `normal` (without failures) or `crash` (client 1 fails in round 2)."""

    runs: ClassVar[dict[tuple[str, Case], Run]] = {}

    def __init__(self, case: Case, folders: pytest.TempPathFactory) -> None:
        self.case, self.folders = case, folders

    def __call__(self, name: str) -> Run:
        """Return a run by name: `normal` (settings `PARTIAL`), or `crash`, in which client 1 fails in round 2."""
        if (name, self.case) not in self.runs:
            done = getattr(self, name)(self.folders.mktemp("runs") / "run")
            refused = [failure["reason"] for row in done.rows if row["round"] == 0 for failure in row["failures"]]
            assert refused == [], "a client was refused: set `settings` or `architectures` of the test"
            self.runs[name, self.case] = done
        return self.runs[name, self.case]

    def normal(self, folder: Path) -> Run:
        """Execute an uninterrupted run in `folder`, with the settings `PARTIAL`, and return its files."""
        return run(folder, self.case.settings(PARTIAL))

    def crash(self, folder: Path) -> Run:
        """Execute a run in `folder` in which client 1 fails in round 2, and return its files."""
        app = Tampering(before=raising(at([2], "1"), RuntimeError("out of order")))
        return run(folder, self.case.settings(rounds=4), app=app)


class MethodContract:
    """Tests of a method, which pytest collects from a subclass.

    Attributes:
        method: a registered name, `"package.module:name"`, or a Method.
        settings: configuration keys and values that the method needs, in addition to the tests' settings (`COMMON`).
        architectures: names, separated by commas, such as `"mlp-20,cnn"`; if empty, as different as the method allows.
    """

    method: ClassVar[str | Method]
    settings: ClassVar[Mapping[str, Value]] = {}
    architectures: ClassVar[str] = ""

    @pytest.fixture
    def case(self) -> Case:
        """The method to test, with its settings."""
        return Case.of(self.method, self.settings, self.architectures)

    @pytest.fixture
    def cache(self, case: Case, tmp_path_factory: pytest.TempPathFactory) -> RunCache:
        """Runs of `case` that several tests share."""
        return RunCache(case, tmp_path_factory)

    @pytest.mark.slow
    def test_it_learns(self, case: Case, tmp_path: Path) -> None:
        """Check that the method reaches an accuracy of 0.8 on IID digits in a few rounds."""
        done = run(tmp_path / "run", case.settings({**LEARNS, **dict(case.own)}))
        assert done.summary["status"] == "completed"
        assert done.summary["personal_accuracy"]["weighted"] >= 0.8
        assert done.failures == []

    def test_same_seed_same_bytes(self, case: Case, cache: RunCache, tmp_path: Path) -> None:
        """Check that a repeated run writes the same files."""
        assert run(tmp_path / "same", case.settings(PARTIAL)).files == cache("normal").files

    def test_a_client_that_crashes_is_named_and_used_again(self, cache: RunCache) -> None:
        """Check that a client's failure in round 2 is reported by name, and that the client takes part in round 4."""
        done = cache("crash")
        assert done.failures == [(2, "1")]
        assert "out of order" in done.row(2)["failures"][0]["reason"]
        assert [done.row(number)["participants"] for number in (2, 4)] == [["0", "2"], ["0", "1", "2"]]
        assert (done.summary["status"], done.summary["failures"]) == ("completed", 1)

    def test_a_reply_with_nan_is_refused(self, case: Case, cache: RunCache, tmp_path: Path) -> None:
        """Check that a reply with NaN has the same effect as a client that does not reply."""
        seen = []

        def spoil(message: Message, client: str, reply: Message) -> None:
            if at([2], "1")(message, client):
                for name, group in reply.content.array_records.items():
                    arrays = decode_arrays(group).items()
                    spoilt = {key: np.full_like(a, np.nan) if a.dtype.kind == "f" else a for key, a in arrays}
                    reply.content[name] = encode_arrays(spoilt)
                    seen.append(name)

        done = run(tmp_path / "run", case.settings(rounds=4), app=Tampering(after=spoil))
        if seen:  # else its clients send no arrays
            assert_same_but_for_the_fault(done, cache("crash"))

    def test_resuming_equals_not_stopping(
        self, case: Case, cache: RunCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Check that a run that is interrupted in round 3 and resumed writes the same files as a run without a stop."""
        folder = tmp_path / "run"
        whole = cache("normal")
        settings = case.settings(PARTIAL)
        dying = Tampering(before=raising(at([3], whole.row(3)["participants"][-1]), KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(folder, settings, app=dying)
        assert Run(folder).summary["status"] == "failed"
        assert len(Run(folder).rows) == 3
        resume(case, folder, monkeypatch)
        assert Run(folder).files == whole.files


def resume(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume the run of `case` in `folder`; a method given as `package.module:name` is imported again."""
    by_reference = ":" in case.reference
    if by_reference:
        monkeypatch.setattr(registry, "_registered", {})
    fedhet.run({"method": case.reference} if by_reference else {}, resume=folder)


def assert_same_but_for_the_fault(done: Run, expected: Run) -> None:
    """Check that two runs are equal except for the reason of a failure and the bytes sent by the failing client."""
    for row, other in zip(done.rows, expected.rows, strict=True):
        assert row | {"failures": [], "bytes_up": 0} == other | {"failures": [], "bytes_up": 0}
    assert done.failures == expected.failures
    assert done.models == expected.models
    assert done.checkpoint == expected.checkpoint


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `slow`, if a `conftest.py` has `pytest_plugins = ["fedhet.testing"]`."""
    config.addinivalue_line("markers", "slow: a test of fedhet's contract that takes more than a few seconds")
