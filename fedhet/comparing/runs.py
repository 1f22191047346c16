"""The plan of a comparison, and its runs in child processes, several at a time; completed runs are kept."""

import math
import os
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedhet.comparing.settings import FILES, PLACES, PlannedRun
from fedhet.config import configuration
from fedhet.config.validation import ineffective
from fedhet.engines import children, running
from fedhet.engines.children import RUN, Child, ChildError
from fedhet.engines.running import shake_hands
from fedhet.errors import ConfigError, FedhetError, check_kinds
from fedhet.methods import registry
from fedhet.methods.options import default_of
from fedhet.results.history import read_run
from fedhet.results.report import complete_report
from fedhet.results.terminal import format_seconds
from fedhet.server.run import numbered
from fedhet.setup.user_functions import UserFunctions
from fedhet.utils import text
from fedhet.utils.files import LOCK, check_links, check_place, expanded
from fedhet.utils.machine import device_of, runs_at_once
from fedhet.utils.process import standard_settings
from fedhet.utils.statistics import grouped
from fedhet.utils.text import counted, printable

STARTING = 3.0
"""Seconds that a run takes to start and to end."""

WRITTEN = ("logs", "tuning", "tried", "compared", "*-seed*")  # patterns of the folders that a comparison creates


@contextmanager
def continued() -> Iterator[None]:
    """Context manager of a comparison, which adds to a KeyboardInterrupt how to go on."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note("stopped; the same command continues where it was")
        raise


def check(runs: Iterable[PlannedRun], functions: UserFunctions = UserFunctions()) -> None:  # noqa: B008 - it is frozen
    """Raise a FedhetError if a run's folder has a run with other settings, or if data or models do not exist."""
    runs = list(runs)
    conflicts = grouped((problem, str(run.folder)) for run in runs if (problem := _conflict(run, functions)))
    if conflicts:
        raise ConfigError("\n".join(f"{', '.join(folders)}: {conflict}" for conflict, folders in conflicts.items()))
    firsts = {run.variant: run for run in reversed(runs)} if functions else {}
    if problems := [each for run in firsts.values() if (each := _another(run, functions))]:
        raise ConfigError("\n".join(problems))
    for run in runs:
        functions.check(run.settings)


def unused(
    folder: Path, runs: Callable[[Path], Iterable[PlannedRun]], besides: Container[str], functions: UserFunctions
) -> Path:
    """Return `folder`, or the first of `folder-2`, `folder-3`, ... in which the planned runs can be carried out.

    `runs` is a function that returns the runs planned in a folder. Existing runs in the folder must have the settings
    of the planned ones, except for the keys in `besides`. `functions` has the user's models and data.
    """
    place = numbered(folder, lambda place: any(_conflict(run, functions, besides) for run in runs(place)))
    _check_links(place)
    return place


def _conflict(run: PlannedRun, functions: UserFunctions, besides: Container[str] = ()) -> str | None:
    if not run.folder.exists():
        return None
    if run.folder.is_dir() and {path.name for path in run.folder.iterdir()} <= {LOCK}:  # killed as it began
        return None
    path = run.folder / "config.toml"
    wanted = run.settings.flat()
    if not path.is_file():
        return "exists and is not a run directory: choose another folder"
    defaults = {key: default_of(spec) for key, spec in run.settings.specs().items()}  # of keys that came after that run
    try:
        there = defaults | configuration.read(path, functions.words.keys())
    except configuration.NotPassed:
        return "holds a run with your own model or data: pass the same again, or choose another folder"
    in_vain = ineffective(run.settings, registry.traits(run.settings), functions.replacing(run.settings)).keys()
    different = [
        f"{key} = {there.get(key, 'not set')!r} instead of {wanted.get(key, 'not set')!r}"
        for key in sorted((there.keys() | wanted.keys()) - PLACES - FILES - in_vain)
        if key not in besides and there.get(key, "") != wanted.get(key, "")
    ]
    if different:
        return f"holds a run with other settings ({'; '.join(different)}): choose another folder"
    return None


def _another(run: PlannedRun, functions: UserFunctions) -> str | None:
    if not any(run.folder.glob("checkpoint/*.safetensors")):
        return None
    config = functions.adapted(run.settings).replace(device="cpu")
    try:
        shake_hands(config, functions, functions.public_dataset(config), begun=run.folder)
    except FedhetError as error:
        return f"{run.folder}: {error}; or choose another folder"
    return None


def why_incomplete(run: PlannedRun) -> str | None:
    """Return why a run is not complete, or None if it is."""
    summary = read_run(run.folder).summary if (run.folder / "config.toml").is_file() else {}
    return None if summary.get("status") == "completed" else str(summary.get("error", "ended without completing"))


def prepared(
    config: Mapping[str, Any] | str | Path | None,
    functions: UserFunctions,
    out: str | Path,
    jobs: int | None,
    console: Console | None,
) -> tuple[dict[str, Any], "Execution"]:
    """Check arguments that `compare` and `recommend` share; return the settings by key, and an `Execution` for runs."""
    children.prepare("matplotlib.backends.backend_agg")  # imported while the arguments are checked
    check_kinds(config=(config, (Mapping, str, Path)), out=(out, (str, Path)), jobs=(jobs, (int,)))
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs}: must be at least 1")
    settings = configuration.settings_of(config, functions.words.keys())
    out = expanded(out)
    check_place(out)
    _check_links(out)
    run = partial(running.run, **functions.arguments) if functions else running.run
    jobs = jobs or runs_at_once(device_of(str(settings.get("device", "auto"))))
    return settings, Execution(run, jobs, console or text.console(soft_wrap=True))


def _check_links(out: Path) -> None:
    for path in chain.from_iterable(map(out.glob, WRITTEN)):
        check_links(path, out)


@dataclass(frozen=True)
class Execution:
    """A callable that carries out runs in child processes, `at_once` at a time, and prints progress to `console`.

    `function` is called for each run with arguments of `fedhet.run`. At the `deadline` (in seconds, as
    `time.monotonic()`), unfinished runs are stopped; they can be resumed later.
    """

    function: Callable[..., object]
    at_once: int
    console: Console
    deadline: float = math.inf

    def __call__(self, runs: Sequence[PlannedRun]) -> dict[str, str]:
        """Carry out the runs that are not complete; return the reason of each failure, by the run's name."""
        ended = [run.name for run in runs if why_incomplete(run) is None]
        if ended:
            self.tell(f"{len(ended)} of {len(runs)} runs were completed before and are not repeated")
        for run in runs:
            if run.name in ended:
                complete_report(run.folder)  # it may have been killed before it wrote this last file
        jobs = (self._job(run) for run in runs if run.name not in ended)
        by_name = {run.name: run for run in runs}
        failed: dict[str, str] = {}
        began = time.monotonic()
        earlier = len(ended)
        columns = TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task("runs", total=len(runs), completed=len(ended))
            for name, error in run_jobs(jobs, self.at_once, self.deadline):
                ended.append(name)
                bar.update(task, completed=len(ended))
                outcome = "completed"
                if reason := " ".join((error or why_incomplete(by_name[name]) or "").split()):  # on one line
                    before = next((other for other, why in failed.items() if why == reason), None)
                    outcome = f"failed as {before} did" if before else reason
                    failed[name] = reason
                left = (time.monotonic() - began) / (len(ended) - earlier) * (len(runs) - len(ended))
                more = f", about {format_seconds(left)} left" if left else ""
                self.tell(f"[{len(ended)}/{len(runs)}] {name}: {outcome}{more}")
        return failed

    def tell(self, words: str) -> None:
        """Print one or several lines of text literally, without interpreting rich's markup."""
        self.console.print(printable(words, keep="\n"), markup=False)

    def show(self, table: RenderableType) -> None:
        """Print a rich table or text, without wrapping its lines if the output is a file."""
        self.console.print(table, soft_wrap=not self.console.is_terminal)

    def _job(self, run: PlannedRun) -> "Job":
        settings: dict[str, object] = {**run.settings.flat(), "preset": ""}
        resume = {}
        if (run.folder / "config.toml").is_file():
            reference = run.settings.method  # named by the user, not only by the folder
            settings = {key: settings[key] for key in FILES if settings[key]}
            settings |= {"method": reference} if ":" in reference else {}
            resume = {"resume": run.folder}
        call = partial(self.function, settings or None, out=run.folder, engine="local", **resume)
        return Job(run.name, call, run.folder.parent / "logs" / f"{run.name}.log")


def announce(
    tuned: Sequence[PlannedRun], reported: Sequence[PlannedRun], functions: UserFunctions, execute: Execution
) -> None:
    """Shake hands for each method, time a round of it, and print the plan of the runs that are not complete.

    Raises a ConfigError that names each method that cannot train the clients, and the reason.
    """
    missing = [run for run in (*tuned, *reported) if why_incomplete(run) is not None]
    seconds = dict[str, float]()
    problems = []
    firsts = dict[str, PlannedRun]()
    for run in missing:
        firsts.setdefault(run.variant, run)
    for run in firsts.values():
        config = functions.adapted(run.settings, strict=False).replace(keep_best=False, save_every=0)
        try:
            with standard_settings():
                strategy = shake_hands(config, functions, functions.public_dataset(config), train=True)
        except Exception as error:  # whatever a method raises
            problems.append(f"{run.variant} cannot train these clients: {error}\nleave it out, or correct the cause")
            continue
        seconds[run.variant] = time.perf_counter() - strategy.run.round.started
        served = sum(not strategy.run.state.clients[client].failed for client in strategy.federation.nodes)
        all_of_them = config.clients - config.unseen_clients
        refused = "; ".join(strategy.run.round.lines())
        who = f"all {served}" if served >= all_of_them else f"{served} of {all_of_them}"
        execute.tell(f"{run.variant} serves {who} clients{refused and f' ({refused})'}")
    if problems:
        raise ConfigError("\n".join(problems))
    needed = [STARTING + max(run.settings.rounds, 1) * seconds[run.variant] for run in missing]
    if needed:
        left = max(sum(needed) / execute.at_once, *needed)
        numbers = [f"{counted(len(tuned), 'run')} for tuning"] * bool(tuned) + [counted(len(reported), "run")]
        done = len(tuned) + len(reported) - len(missing)
        completed = f" ({done} of them completed before)" if done else ""
        execute.tell(
            f"plan: {' and '.join(numbers)} to report{completed}, {execute.at_once} at a time: about "
            f"{format_seconds(left)}, by a round of each method"
        )


@dataclass(frozen=True)
class Job:
    """A function (`call`) for a child process, which writes its output to `log`."""

    name: str
    call: Callable[[], object]
    log: Path


def run_jobs(jobs: Iterable[Job], at_once: int, deadline: float = math.inf) -> Iterator[tuple[str, str | None]]:
    """Run jobs, `at_once` at a time, each in a process with one thread; kill them at `deadline` (`time.monotonic()`).

    Yields a pair when a job ends: the job's name, and the reason if it failed, else None.
    """
    waiting = iter(jobs)
    running = dict[Connection, tuple[Job, Child]]()
    try:
        while (left := deadline - time.monotonic()) > 0:
            while len(running) < at_once and (job := next(waiting, None)):
                child = Child(_call, name=RUN)
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
    job: Job = children.receive(connection)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        job.call()
        children.send(connection, None)
    except FedhetError as error:
        children.send(connection, str(error))
    except Exception as error:  # reported as the failure of this job
        traceback.print_exc()
        children.send(connection, f"{type(error).__name__}: {error} (see {job.log})")
