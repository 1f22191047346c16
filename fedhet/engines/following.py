"""A run under way at a SuperLink: started, followed round by round, and judged by what really became of it."""

import contextlib
import json
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhet import registry
from fedhet.engines.processes import command, end, tail
from fedhet.errors import FedhetError
from fedhet.flower.insides import started_run, status_of_run
from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.options import Config
from fedhet.results.history import read_clients, read_history
from fedhet.rows import client_order
from fedhet.state import State

log = logging.getLogger("flwr").getChild("fedhet")

PATIENCE = 30.0
"""Seconds for a command of Flower's to answer."""


def follow(
    arguments: Sequence[str],
    place: Path,
    environment: Mapping[str, str],
    config: Config,
    folder: Path,
    work: Path,
    observers: Sequence[Observer],
) -> None:
    """Start the run, tell the observers of its rounds, and find out how it ended."""
    output = work / "run.log"
    flwr = command("flwr")

    def ask(*words: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                [flwr, *words],
                cwd=place,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE,
            ).stdout
        return ""

    with output.open("wb") as sink:
        process = subprocess.Popen(
            [flwr, "run", *arguments],
            cwd=place,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    watch = _Watch(config, folder, observers)
    try:
        while process.poll() is None:
            watch.look()
            time.sleep(0.2)
        watch.look()
    except BaseException as error:  # Ctrl-C and SIGTERM
        watch.failed(error)
        if (run := _run_id(output)) is not None:
            log.warning("stopping the run")
            ask("stop", run, config.engine)
        raise
    finally:
        end(process)
    try:
        run = _run_id(output)
        if run is None:
            raise FedhetError(f"Flower did not start the run:\n{tail(output)}")
        _judge(ask("list", "--run-id", run, config.engine, "--format", "json"), folder, output)
    except FedhetError as error:
        watch.failed(error)
        raise
    watch.finished()


def _run_id(output: Path) -> str | None:
    return started_run(output.read_text(encoding="utf-8", errors="replace"))


def _judge(answer: str, folder: Path, output: Path) -> None:
    """Flower exits with 0 whatever became of a run; the truth is in its list and in the run's own summary."""
    status, details = status_of_run(answer)
    summary: dict[str, Any] = {}
    if (folder / "summary.json").is_file():
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if summary.get("status", "completed") == "completed" and status == "finished:completed":
        return
    if "error" in summary:
        raise FedhetError(str(summary["error"]))
    raise FedhetError(f"the run ended as {status}: {details}\n{tail(output)}")


class _Watch:
    """Tells observers of rounds as they appear in the run directory."""

    def __init__(self, config: Config, folder: Path, observers: Sequence[Observer]) -> None:
        self._folder, self._observers = folder, observers
        self._last = config.rounds + bool(config.closing_epochs)
        traits = registry.method(config.prefix).traits_of(config.parameters)
        self._run = RunInfo(config.prefix, traits, State())
        self._size, self._seen, self._started = -1, 0, False
        history = folder / "history.jsonl"
        self._earlier = history.stat() if history.is_file() else None

    def look(self) -> None:
        """Read what is new."""
        history = self._folder / "history.jsonl"
        if not self._observers or not history.is_file():
            return
        status = history.stat()
        if status.st_size == self._size or (self._earlier and status.st_ino == self._earlier.st_ino):
            return  # nothing new, or still that of the run to be resumed
        if not history.read_bytes().endswith(b"\n"):
            return  # being written
        self._size = status.st_size
        rows = read_history(self._folder)
        if not self._started:
            self._started, self._seen = True, len(rows) if self._earlier else 0
            first = max((row["round"] for row in rows[: self._seen]), default=0) + 1
            for observer in self._observers:
                observer.started(self._run, first, self._last)
        for row in rows[self._seen :]:
            clients = [each for each in read_clients(self._folder) if each.round == row["round"]]
            report = RoundReport(row, sorted(clients, key=lambda each: client_order(each.client)))
            for observer in self._observers:
                observer.round(self._run, report)
        self._seen = len(rows)

    def finished(self) -> None:
        """The run is at its end."""
        for observer in self._observers if self._started else ():
            observer.finished(self._run)

    def failed(self, error: BaseException) -> None:
        """The run ended before its end."""
        for observer in self._observers if self._started else ():
            observer.failed(self._run, error)
