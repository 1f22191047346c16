"""The run directory, written round by round so that a run that stops at any moment can be resumed."""

import dataclasses
import hashlib
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from fedhet.config import toml
from fedhet.config.toml import to_toml
from fedhet.errors import ConfigError, FedhetError, in_words
from fedhet.methods.options import Config, listed
from fedhet.methods.registry import traits
from fedhet.results import models
from fedhet.results.history import read_clients, read_history, showing
from fedhet.results.observers import Observer, RoundReport, RunInfo, loggers
from fedhet.results.report import write_report
from fedhet.results.state import State
from fedhet.results.summary import summarised
from fedhet.utils.files import (
    check_links,
    check_place,
    csv_lines,
    locked,
    read_arrays,
    write_text,
)
from fedhet.utils.machine import host
from fedhet.utils.statistics import ClientRow
from fedhet.utils.text import __version__, log

S = TypeVar("S", bound=State)

COLUMNS = [field.name for field in dataclasses.fields(ClientRow)]
EARLIER = "earlier"
"""Folder in `checkpoint/` with the checkpoint before the last round of training."""
PACKAGES = ("flwr", "torch", "numpy", "scipy")


class RunDirectory(Observer):
    """Observer that writes the files of a run; `folder` must be usable (see `check_folder`).

    `supplied` has descriptions of the user's model and data, and `simulated` says whether clients run on this machine.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        engine: str,
        *,
        resume: bool = False,
        supplied: Mapping[str, str] = {},
        simulated: bool = True,
    ) -> None:
        self.folder, self.config, self.engine, self.simulated = folder, config, engine, simulated
        self.started_at = time.perf_counter()
        self.earlier_seconds = 0.0
        check_folder(folder, resume=resume)
        self._supplied = supplied
        self._unchanged, self._digests = True, dict[str, "hashlib.blake2b"]()
        with showing(folder):
            self._last, self._rewind = self._rewinding() if resume else (None, partial(self._restart, {}))
        if not resume:
            self._begin()
        log.info("results go to %s", folder)

    def _begin(self) -> None:
        """Restore the files to the checkpoint and write `config.toml`, once resuming can no longer be refused."""
        if self._unchanged:
            self._unchanged = False
            self._rewind()
            self._write_config()

    def _write_config(self) -> None:
        config = self.config
        flat = {key: value for key, value in config.flat().items() if key not in ("out", "resume")}
        if flat["state-dir"] == str(self.folder / "state"):
            del flat["state-dir"]
        if self.engine not in ("local", "ray") and "clients" not in config.chosen:
            del flat["clients"]  # the federation says how many there are, when the run is resumed too
        versions = {f"versions.{package}": version(package) for package in PACKAGES}
        versions |= {"versions.fedhet": __version__, "versions.python": platform.python_version()}
        noted = {f"own.{name}": words for name, words in self._supplied.items()}
        noted |= {"ran.host": host(), "ran.command": shlex.join(sys.argv) if sys.argv[0] else "Python"}
        write_text(self.folder / "config.toml", to_toml({**flat, **noted, **versions}))

    def reconfigure(self, config: Config) -> None:
        """Write the configuration that `train_config` changed into `config.toml`."""
        self._begin()
        self.config = config
        self._write_config()

    def resumed(self, fresh: S) -> S:
        """Return the state after the last complete round, or `fresh` if there is none.

        If clients keep their state in this run directory, `fresh.run` is set to an empty string.
        """
        if self.simulated and self.config.state_dir == str(self.folder / "state"):
            fresh.run = ""
        return fresh if self._last is None else type(fresh).load(self._last)

    def started(self, run: RunInfo, first: int, last: int) -> None:
        """Write the value of `test-on` that the handshake determined into `config.toml`."""
        self._begin()
        if run.test_on not in ("", self.config.test_on):
            self.config = self.config.replace(test_on=run.test_on)
            self._write_config()

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Append the round to the files, then save the state; after a crash in between, resuming removes the round."""
        self._begin()
        self._append("clients.csv", csv_lines(vars(row).values() for row in report.clients))
        self._append("history.jsonl", json.dumps(report.row) + "\n")
        if not report.row.get("final"):
            number, every = report.row["round"], self.config.save_every
            if every and number and number % every == 0:
                models.collect(self.folder, self.config.state_dir, run, number)
            path = self.folder / "checkpoint" / f"{report.row['round']}.safetensors"
            before_last = (run.state.stopped or self.config.rounds) - 1
            earlier = [old for old in path.parent.glob("*.safetensors") if old.stem.isdecimal() and old != path]
            # A new file before the old one is removed: replacing a file makes the disk's journal wait for the data.
            run.state.save(path, digests=json.dumps({name: each.hexdigest() for name, each in self._digests.items()}))
            for old in earlier:
                if int(old.stem) == before_last:
                    (path.parent / EARLIER).mkdir(exist_ok=True)
                    old.replace(path.parent / EARLIER / old.name)
                else:
                    old.unlink()

    def finished(self, run: RunInfo) -> None:
        """Write models, summary and report."""
        models.collect(self.folder, self.config.state_dir, run)
        self._write_summary(run, "completed")
        self._show()
        log.info("results are in %s", self.folder)

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Write the summary of an incomplete run and a report of its rounds, unless resuming the run was refused."""
        if self._unchanged:
            return
        reason = str(error) if isinstance(error, FedhetError) else f"{type(error).__name__}: {error}"
        self._write_summary(run, "failed", error=reason)
        self._show()

    def _write_summary(self, run: RunInfo, status: str, **further: str) -> None:
        summary = summarised(read_history(self.folder), run, self.config)
        seconds = round(self.earlier_seconds + time.perf_counter() - self.started_at, 3)
        self._write("summary.json", {**summary, "engine": self.engine, "seconds": seconds, "status": status, **further})

    def _show(self) -> None:
        """Write the report; errors are logged as warnings, since the result does not need it."""
        if not self.config.report:
            return
        try:
            write_report(self.folder)
        except Exception as error:
            log.warning("the report was not written: %s: %s", type(error).__name__, error, exc_info=error)

    def _rewinding(self) -> tuple[Path | None, Callable[[], None]]:
        """Return the checkpoint to continue from, and a function that removes all later results from the folder."""
        rounds, planned = self.config.rounds, toml.load(self.folder / "config.toml").get("rounds", 0)
        ends = [path for path in (self.folder / "checkpoint").glob("*.safetensors") if path.stem.isdecimal()]
        last = max(ends, key=lambda path: int(path.stem), default=None)
        if last and 0 < planned < rounds:
            schedule, method = self.config.lr_schedule, self.config.method_name
            if schedule != "constant" or traits(self.config).planned:
                log.warning(
                    "the rounds so far were planned for rounds = %d (method = %s, lr-schedule = %s), so results differ "
                    "from those of a run with rounds = %d from the start",
                    *(planned, method, schedule, rounds),
                )
            # A run that gets more rounds continues before its last one, which some methods treat differently.
            earlier = self.folder / "checkpoint" / EARLIER / f"{planned - 1}.safetensors"
            if planned <= int(last.stem) and earlier.is_file():
                last = earlier
            elif planned < int(last.stem):
                raise ConfigError(
                    f"the run in {self.folder} completed its closing round and has no checkpoint before it, so it "
                    f"cannot get more rounds: start a new run with rounds = {rounds}"
                )
        complete = int(last.stem) if last else -1
        done = complete - bool(self.config.closing_epochs)
        if 0 < rounds < done:
            raise ConfigError(f"rounds = {rounds}: {self.folder} has {done} rounds already; set at least {done}")
        texts = dict[str, bytes]()
        if last is not None:
            digests = json.loads(read_arrays(last)[1].get("digests", "{}"))
            rows = [row for row in read_history(self.folder) if row["round"] <= complete and not row.get("final")]
            clients = [row for row in read_clients(self.folder) if row.round <= complete]
            self.earlier_seconds = sum(row["timing"]["seconds"] for row in rows)
            for name, number in (("history.jsonl", len(rows)), ("clients.csv", 1 + len(clients))):
                path = self.folder / name
                lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
                texts[name] = b"".join(lines[:number])
                if digests.get(name) != _digest(texts[name]).hexdigest():
                    raise FedhetError(
                        f"{path} is damaged: up to round {complete} it differs from its digest in {last}; restore the "
                        "folder from a copy, or start a new run"
                    )

        def rewind() -> None:
            if last and last not in ends:
                last.replace(self.folder / "checkpoint" / last.name)
                for path in ends:
                    path.unlink()
            self._restart(texts)
            for name in ("summary.json", "report.html"):
                (self.folder / name).unlink(missing_ok=True)
            models.remove_after(self.folder, complete)

        return last, rewind

    def _restart(self, texts: Mapping[str, bytes]) -> None:
        """Write `history.jsonl` and `clients.csv` with `texts`, or without rounds if a text is missing."""
        for name, text in ({"history.jsonl": b"", "clients.csv": csv_lines([COLUMNS]).encode()} | {**texts}).items():
            write_text(self.folder / name, text.decode())
            self._digests[name] = _digest(text)

    def _append(self, name: str, text: str) -> None:
        with (self.folder / name).open("a", encoding="utf-8", newline="") as file:
            file.write(text)
        self._digests[name].update(text.encode())

    def _write(self, name: str, value: Any) -> None:
        write_text(self.folder / name, json.dumps(value, indent=2) + "\n")


@contextmanager
def recorded(
    folder: Path, config: Config, engine: str, *, resume: bool = False, **arguments: Any
) -> Iterator[tuple[RunDirectory, *tuple[Observer, ...]]]:
    """Open and lock a run directory; yield its `RunDirectory`, created with `arguments`, and the loggers.

    Raises a ConfigError if folder or loggers cannot be used, and a FedhetError that says how to resume if writing
    failed.
    """
    check_folder(folder, resume=resume)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
            # First, so that a logger that is not installed leaves no run directory.
            logging_to = loggers(listed(config.log), folder, config.flat())
            directory = RunDirectory(folder, config, engine, resume=resume, **arguments)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{folder} cannot be the directory of a run: {reason}; choose another one") from error
        try:
            yield directory, *logging_to
        except OSError as error:
            raise FedhetError(
                f"the run in {folder} stopped, since {in_words(error)}; complete rounds are saved. Correct this, and "
                f"continue with {resuming(folder, arguments.get('supplied', ()))}"
            ) from error


def resuming(folder: Path, supplied: Collection[str]) -> str:
    """Return the command that resumes a run; if the user `supplied` a model or data, it is a Python call."""
    functions = "".join(f", {name}=..." for name in supplied)
    return f"fedhet.run(resume={str(folder)!r}{functions})" if supplied else f"fedhet run --resume {folder}"


def check_folder(folder: Path, *, resume: bool = False) -> None:
    """Raise a `ConfigError` if a folder cannot be written to, contains a run or, with `resume`, contains none."""
    check_place(folder)
    if resume and not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} contains no run to resume: give the directory of a run, with its config.toml")
    if resume:
        check_links(folder)
    history = folder / "history.jsonl"
    begun = bool(history.read_bytes()) if history.is_file() else (folder / "config.toml").exists()
    if not resume and begun:  # a run that failed before its first round has nothing to lose
        raise ConfigError(f"{folder} already contains a run: choose another folder (out), or resume that run")


def _digest(text: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(text, digest_size=16)
