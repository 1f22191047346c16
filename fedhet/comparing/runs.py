"""The runs of a comparison: which are complete already, and carrying out the others, several at a time."""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fedhet import config as configuration
from fedhet import population, registry
from fedhet.comparing.settings import PLACES, PlannedRun
from fedhet.engines import messages
from fedhet.engines.children import Child, ChildError
from fedhet.errors import ConfigError, FedhetError
from fedhet.files import LOCK
from fedhet.given import Given
from fedhet.results.history import read_history, scored_curve
from fedhet.results.run_files import read_run
from fedhet.results.tables import format_seconds, format_value
from fedhet.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN = 30
"""The most runs in the table on a terminal, those under way first."""


def check(runs: Iterable[PlannedRun], given: Given = Given()) -> None:  # noqa: B008 - it is frozen
    """Find out at once whether runs can be carried out in their folders.

    Raises:
        FedhetError: every problem of the folders that are there already; data that cannot be had.
    """
    runs = list(runs)
    if problems := [problem for run in runs if (problem := _conflict(run, given))]:
        raise ConfigError("\n".join(problems))
    for run in runs:
        population.check(run.settings, own_model=given.model is not None, own_data=given.data is not None)


def _conflict(run: PlannedRun, given: Given) -> str | None:
    """Why the run's folder cannot be used, if it cannot."""
    if not run.folder.exists():
        return None
    if run.folder.is_dir() and {path.name for path in run.folder.iterdir()} <= {LOCK}:  # killed as it began
        return None
    if not (run.folder / "config.toml").is_file():
        return f"{run.folder} is there already and is not the directory of a run: choose another folder"
    there, wanted = configuration.read(run.folder / "config.toml", given.words.keys()), run.settings.flat()
    different = [
        f"{key} = {there.get(key, 'not set')!r} instead of {wanted.get(key, 'not set')!r}"
        for key in sorted((there.keys() | wanted.keys()) - PLACES)
        if there.get(key, "") != wanted.get(key, "")
    ]
    if different:
        return f"{run.folder} holds a run with other settings ({'; '.join(different)}): choose another folder"
    return None


def _why_incomplete(run: PlannedRun) -> str | None:
    """Why the folder does not hold a completed run; None if it does."""
    summary = (read_run(run.folder).summary if (run.folder / "config.toml").is_file() else None) or {}
    return None if summary.get("status") == "completed" else str(summary.get("error", "ended without completing"))


@dataclass(frozen=True)
class Execution:
    """Carries out runs.

    Attributes:
        function: runs one configuration, as `fedhet.run` does; cloudpickle must be able to copy it.
        at_once: runs at a time, each in a process of its own.
        console: where progress goes.
    """

    function: Callable[..., object]
    at_once: int
    console: "Console"

    def __call__(self, runs: Sequence[PlannedRun]) -> dict[str, str]:
        """Complete the runs; returns the names of those that failed, and why."""
        kept = {run.name for run in runs if _why_incomplete(run) is None}
        if kept:
            self.tell(f"{len(kept)} of {len(runs)} runs were completed before and are kept")
        for note in dict.fromkeys(f"{run.variant}: {why}" for run in runs for _, why in run.settings.idle):
            self.tell(note)
        by_name = {run.name: run for run in runs}
        jobs = [self._job(run) for run in runs if run.name not in kept]
        failed: dict[str, str] = {}
        progress = Progress(runs, dict.fromkeys(kept, "kept"))
        with progress.shown_on(self.console) if jobs else contextlib.nullcontext():
            for number, (name, reason) in enumerate(run_jobs(jobs, self.at_once), start=len(kept) + 1):
                reason = reason or _why_incomplete(by_name[name])
                if reason is not None:
                    failed[name] = reason
                progress.ended[name] = "failed" if reason else "completed"
                self.tell(f"[{number}/{len(runs)}] {name}: {reason or 'completed'}")
        return failed

    def tell(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(printable(line), markup=False)

    def _job(self, run: PlannedRun) -> "Job":
        settings: Mapping[str, object] | None
        settings, resume = {**run.settings.flat(), "preset": ""}, {}
        if (run.folder / "config.toml").is_file():
            reference = run.settings.method  # which the user named, and not the folder alone
            settings, resume = {"method": reference} if ":" in reference else None, {"resume": run.folder}
        call = partial(self.function, settings, out=run.folder, engine="local", **resume)
        return Job(run.name, call, run.folder.parent / "logs" / f"{run.name}.log")


@dataclass(frozen=True)
class Job:
    """A call with a name, and a file for what it prints."""

    name: str
    call: Callable[[], object]
    log: Path


def run_jobs(jobs: Iterable[Job], at_once: int) -> Iterator[tuple[str, str | None]]:
    """Run each job in a fresh child process with one thread, `at_once` at a time, in order.

    Processes that still run when the iteration is left (Ctrl-C, an error of the caller) are ended.

    Yields:
        As jobs end: the job's name, and why it failed or None.
    """
    waiting, running = list(jobs)[::-1], dict[Connection, tuple[Job, Child]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job, child = waiting.pop(), Child(_call, name="fedhet run")
                running[child.connection] = job, child
                child.send(job)
            for ready in wait(list(running)):
                connection = cast(Connection, ready)
                job, child = running[connection]
                try:
                    reason = child.receive()
                except ChildError as error:
                    reason = f"{error}; see {job.log}"
                child.end()
                del running[connection]
                yield job.name, reason
    finally:
        for _, child in running.values():
            child.end()


def _call(connection: Connection) -> None:
    job: Job = messages.receive(connection)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        job.call()
        messages.send(connection, None)
    except FedhetError as error:
        messages.send(connection, str(error))
    except Exception as error:  # whatever it is, it is this job's failure and is reported as such
        traceback.print_exc()
        messages.send(connection, f"{type(error).__name__}: {error} (see {job.log})")


class Progress:
    """The progress of the runs, as a table that renews itself on a terminal.

    Args:
        runs: in order.
        ended: what became of those that ended, by name.
    """

    def __init__(self, runs: Sequence[PlannedRun], ended: dict[str, str]) -> None:
        self.runs, self.ended = runs, ended
        self._begun: dict[str, float] = {}  # when each was first seen to run, by name

    def shown_on(self, console: "Console") -> contextlib.AbstractContextManager[object]:
        """A context in which the table is shown, if the console is a terminal."""
        if not console.is_terminal:
            return contextlib.nullcontext()
        from rich.live import Live

        return Live(get_renderable=self.table, console=console, refresh_per_second=1, transient=True)

    def table(self) -> "Table":
        """The table now."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table("run", "round", "accuracy", "time left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        left = [run for run in self.runs if run.name not in self.ended]
        running = [run for run in left if (run.folder / "config.toml").is_file()]
        waiting = [run for run in left if run not in running]
        ended = [run for run in reversed(self.runs) if run.name in self.ended]
        for run in [*running, *waiting, *ended][:SHOWN]:
            cells = ("", "", "waiting") if run in waiting else self._cells(run)
            table.add_row(run.name, *cells)
        table.caption = f"{len(ended)} of {len(self.runs)} ended, {len(running)} running"
        return table

    def _cells(self, run: PlannedRun) -> tuple[str, str, str]:
        try:
            rows = read_history(run.folder)
        except FedhetError:  # being written
            return "", "", ""
        settings = run.settings
        curve = scored_curve(rows, registry.traits(settings).scored)
        done = max((row["round"] for row in rows if not row.get("final")), default=0)
        last = settings.rounds + bool(settings.closing_epochs)
        left = self.ended.get(run.name)
        if left is None:
            spent = time.monotonic() - self._begun.setdefault(run.name, time.monotonic())
            left = format_seconds(spent / done * (last - done)) if done and settings.rounds else "starting"
        accuracy = format_value(curve[-1][1]) if curve else ""
        return f"{done}/{last if settings.rounds else '?'}", accuracy, left
