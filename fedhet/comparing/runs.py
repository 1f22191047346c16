"""The runs of a comparison: which are complete already, and carrying out the others, several at a time."""

import math
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedhet import config as configuration
from fedhet import population, registry
from fedhet.comparing.chosen import PLACES
from fedhet.comparing.settings import FILES, PlannedRun, shake_hands
from fedhet.engines import messages
from fedhet.engines.children import Child, ChildError
from fedhet.errors import ConfigError, FedhetError
from fedhet.files import LOCK, check_links, check_place
from fedhet.keys import default_of
from fedhet.results.history import last_round, read_history, read_run, scored_curve
from fedhet.results.tables import format_value
from fedhet.supplied import Supplied
from fedhet.text import console, printable
from fedhet.validation import ineffective

WIDEST = 1000
"""Characters of a line of a table in a file."""

WRITTEN = ("logs", "tuning", "tried", "compared", "*-seed*")
"""Folders of a comparison."""

HEARTBEAT = 30.0
"""Seconds after which a run's end is printed even where only failures are."""


def check_out(out: Path) -> None:
    """Raise a `ConfigError` if a comparison cannot be written to a folder, or links in it lead out of it."""
    check_place(out)
    for path in chain.from_iterable(map(out.glob, WRITTEN)):
        check_links(path, out)


def check(runs: Iterable[PlannedRun], supplied: Supplied = Supplied()) -> None:  # noqa: B008 - it is frozen
    """Raise a `FedhetError` with every problem of the runs' folders, or of data that cannot be had."""
    runs = list(runs)
    if problems := [problem for run in runs if (problem := _conflict(run, supplied))]:
        raise ConfigError("\n".join(problems))
    if supplied:
        firsts = {key: run for run in reversed(runs) for key in (run.variant, run.seed)}  # of each variant and seed
        chosen = {run.name for run in firsts.values()}
        if problems := [each for run in runs if run.name in chosen and (each := _another(run, supplied))]:
            raise ConfigError("\n".join(problems))
    for run in runs:
        population.check(run.settings, own_model=supplied.model is not None, own_data=supplied.data is not None)


def _conflict(run: PlannedRun, supplied: Supplied) -> str | None:
    """Why the run's folder cannot be used, if it cannot."""
    if not run.folder.exists():
        return None
    if run.folder.is_dir() and {path.name for path in run.folder.iterdir()} <= {LOCK}:  # killed as it began
        return None
    if not (run.folder / "config.toml").is_file():
        return f"{run.folder} is there already and is not the directory of a run: choose another folder"
    wanted = run.settings.flat()
    defaults = {key: default_of(spec) for key, spec in run.settings.specs().items()}  # of keys that came after that run
    there = defaults | configuration.read(run.folder / "config.toml", supplied.words.keys())
    in_vain = ineffective(run.settings, registry.traits(run.settings), supplied.replacing(run.settings)).keys()
    different = [
        f"{key} = {there.get(key, 'not set')!r} instead of {wanted.get(key, 'not set')!r}"
        for key in sorted((there.keys() | wanted.keys()) - PLACES - FILES - in_vain)
        if there.get(key, "") != wanted.get(key, "")
    ]
    if different:
        return f"{run.folder} holds a run with other settings ({'; '.join(different)}): choose another folder"
    return None


def _another(run: PlannedRun, supplied: Supplied) -> str | None:
    """Why the run in the folder, if there is one, was not of this model, data or task."""
    if not any(run.folder.glob("checkpoint/*.safetensors")):
        return None
    config = supplied.adapted(run.settings).but(device="cpu")
    try:
        shake_hands(config, supplied, supplied.public_dataset(config), begun=run.folder)
    except FedhetError as error:
        return f"{run.folder}: {error}; or choose another folder"
    return None


def why_incomplete(run: PlannedRun) -> str | None:
    """Why the folder does not hold a completed run; None if it does."""
    summary = (read_run(run.folder).summary if (run.folder / "config.toml").is_file() else None) or {}
    return None if summary.get("status") == "completed" else str(summary.get("error", "ended without completing"))


@dataclass(frozen=True)
class Execution:
    """Carries out runs.

    Attributes:
        function: is called as `fedhet.run`, and cloudpickle can copy it.
        at_once: so many runs at once.
        deadline: by `time.monotonic()`; runs that are under way then are stopped, and can be resumed.
        expected: the seconds that a run will take, where they are known; it is not started if it would be stopped.
        brief: whether only failures are printed, and every `HEARTBEAT` seconds how many runs there are so far.
    """

    function: Callable[..., object]
    at_once: int
    console: Console
    deadline: float = math.inf
    expected: Callable[[PlannedRun], float] = field(default=lambda run: 0.0)
    brief: bool = False

    def __call__(self, runs: Sequence[PlannedRun]) -> dict[str, str]:
        """Complete the runs before the deadline; return the names of failed runs, with the reasons."""
        ended = {run.name for run in runs if why_incomplete(run) is None}
        if ended:
            self.tell(f"{len(ended)} of {len(runs)} runs were completed before and are kept")
        kept = frozenset(ended)
        jobs = (self._job(run) for run in runs if run.name not in kept and self._in_time(run))
        by_name = {run.name: run for run in runs}
        failed: dict[str, str] = {}
        told = time.monotonic()
        with RunsProgress(runs, ended, self.console):
            for name, error in run_jobs(jobs, self.at_once, self.deadline):
                ended.add(name)
                reason = error or why_incomplete(by_name[name])
                before = next((other for other, why in failed.items() if why == reason), None)
                if reason is not None:
                    failed[name] = reason
                if reason is not None or not self.brief or time.monotonic() - told > HEARTBEAT:
                    told = time.monotonic()
                    ending = reason or "completed" if before is None else f"failed as {before} did"
                    self.tell(f"[{len(ended)}/{len(runs)}] {name}: {ending}")
        return failed

    def _in_time(self, run: PlannedRun) -> bool:
        return time.monotonic() + self.expected(run) <= self.deadline

    def tell(self, text: str) -> None:
        """Print a line, or several, without markup."""
        self.console.print(printable(text, keep="\n"), markup=False)

    def show(self, table: RenderableType) -> None:
        """Print a table, in a file as wide as it is."""
        whole = self.console if self.console.is_terminal else console(file=self.console.file, width=WIDEST)
        whole.print(table, soft_wrap=True)

    def _job(self, run: PlannedRun) -> "Job":
        settings: dict[str, object] = {**run.settings.flat(), "preset": ""}
        resume = {}
        if (run.folder / "config.toml").is_file():
            reference = run.settings.method  # which the user named, and not the folder alone
            settings = {key: settings[key] for key in FILES if settings[key]}
            settings |= {"method": reference} if ":" in reference else {}
            resume = {"resume": run.folder}
        call = partial(self.function, settings or None, out=run.folder, engine="local", **resume)
        return Job(run.name, call, run.folder.parent / "logs" / f"{run.name}.log")


@dataclass(frozen=True)
class Job:
    """A call with a name, a file for its output, and torch's default dtype."""

    name: str
    call: Callable[[], object]
    log: Path
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


def run_jobs(jobs: Iterable[Job], at_once: int, deadline: float = math.inf) -> Iterator[tuple[str, str | None]]:
    """Run each job in a fresh child process with one thread, `at_once` at a time; yield names and why they failed.

    A job is taken from `jobs` when it is its turn. Processes that still run at the deadline, or when the iteration is
    left (Ctrl-C, an error of the caller), are ended.
    """
    waiting, running = iter(jobs), dict[Connection, tuple[Job, Child]]()
    try:
        while (left := deadline - time.monotonic()) > 0:
            while len(running) < at_once and (job := next(waiting, None)):
                child = Child(_call, name="fedhet run")
                running[child.connection] = job, child
                child.send(job)
            if not running:
                return
            for ready in wait(list(running), None if left == math.inf else left):
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
    torch.set_default_dtype(job.dtype)
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


class RunsProgress(Progress):
    """A bar for all runs and one for each that is under way, on a terminal; `ended` names more and more of them."""

    def __init__(self, runs: Sequence[PlannedRun], ended: Collection[str], console: Console) -> None:
        self._ended = ended
        name, accuracy = (TextColumn(each, markup=False) for each in ("{task.description}", "{task.fields[accuracy]}"))
        self._run_of: dict[TaskID, PlannedRun] = {}
        columns = name, BarColumn(), MofNCompleteColumn(), accuracy, TimeRemainingColumn()
        super().__init__(
            *columns, console=console, transient=True, refresh_per_second=1, disable=not console.is_terminal
        )
        self.add_task("runs", total=len(runs), accuracy="")
        for run in runs:
            rounds = run.settings.rounds + bool(run.settings.closing_epochs) if run.settings.rounds else None
            self._run_of[self.add_task(run.name, total=rounds, visible=False, accuracy="")] = run

    def get_renderables(self) -> Iterable[RenderableType]:
        """Read how far the runs are, and return the bars."""
        for task, run in self._run_of.items():
            under_way = run.name not in self._ended and (run.folder / "config.toml").is_file()
            self.update(task, visible=under_way, **(_state(run) if under_way else {}))
        for task in self.task_ids[:1]:  # that of all runs
            self.update(task, completed=len(self._ended))
        yield from super().get_renderables()


def _state(run: PlannedRun) -> dict[str, Any]:
    """The rounds that a run has completed, and its last accuracy."""
    try:
        rows = read_history(run.folder)
    except FedhetError:  # being written
        return {}
    curve = scored_curve(rows, registry.traits(run.settings).scored)
    return {"completed": last_round(rows), "accuracy": format_value(curve[-1][1]) if curve else ""}
