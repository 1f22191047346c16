"""Flower's commands: a SuperLink of a run's own, `flwr run` followed round by round, and an orderly end of both."""

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from fedhet import registry
from fedhet.errors import FedhetError
from fedhet.flower.insides import started_run, status_of_run
from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.options import Config
from fedhet.results.history import read_clients, read_history
from fedhet.rows import client_order
from fedhet.state import State

SIMULATION = "ray"
STARTUP, FAREWELL, PATIENCE = 60.0, 3.0, 30.0
"""Seconds for a SuperLink to start, for processes to end when they are asked to, and for a command to answer."""

_log = logging.getLogger("flwr").getChild("fedhet")

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def flwr_home() -> Path:
    """Where Flower keeps its config."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def environment_of_commands() -> dict[str, str]:
    """Flower's commands start each other by name, so they must be found where the virtual environment is not active."""
    path = os.pathsep.join(filter(None, [sysconfig.get_path("scripts"), os.environ.get("PATH")]))
    return {**os.environ, **_QUIET, "PATH": path}


def command(name: str) -> str:
    """The path of one of Flower's commands.

    Raises:
        FedhetError: it is not installed.
    """
    path = shutil.which(name, path=environment_of_commands()["PATH"])
    if path is None:
        raise FedhetError(f"Flower's command {name!r} is not installed beside {sys.executable}")
    return path


@contextlib.contextmanager
def superlink(home: Path, work: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A SuperLink for one simulation, in a folder without code; it and all that it starts end with this context."""
    port = _free_port()
    (work / "empty").mkdir()
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{SIMULATION}"\n\n[superlink.{SIMULATION}]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n",
        encoding="utf-8",
    )
    words = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    words += ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port)]
    process = _begin(words, work / "empty", environment, work / "superlink.log")
    try:
        _await_health(port, process, work / "superlink.log")
        yield
    finally:
        end(process)


def _begin(
    words: Sequence[str], place: Path, environment: Mapping[str, str], output: Path
) -> "subprocess.Popen[bytes]":
    """Start one of Flower's commands in a session of its own: Ctrl-C is for this process, which ends the others."""
    with output.open("wb") as sink:
        return subprocess.Popen(
            [command(words[0]), *words[1:]],
            cwd=place,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _await_health(port: int, process: subprocess.Popen[bytes], output: Path) -> None:
    patience = time.monotonic() + STARTUP
    while process.poll() is None and time.monotonic() < patience:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        time.sleep(0.1)
    raise FedhetError(f"Flower's SuperLink did not start:\n{tail(output)}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: Flower's simulation goes on training when it is only asked to stop."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        process.terminate()
        patience = time.monotonic() + FAREWELL
        while any(map(_lives, family)) and time.monotonic() < patience:
            time.sleep(0.05)
        for each in [*family, *(child for parent in family for child in _children(parent))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a file, indented."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


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

    def ask(*words: str) -> str:
        options: Any = {"cwd": place, "env": environment, "capture_output": True, "text": True, "timeout": PATIENCE}
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run([command("flwr"), *words], check=False, **options).stdout
        return ""

    process = _begin(["flwr", "run", *arguments], place, environment, output)
    watch = _Watch(config, folder, observers)
    try:
        while process.poll() is None:
            watch.look()
            time.sleep(0.2)
        watch.look()
    except BaseException as error:  # Ctrl-C and SIGTERM
        watch.failed(error)
        if (run := _run_id(output)) is not None:
            _log.warning("stopping the run")
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
        traits = registry.traits(config)
        self._run = RunInfo(config.method_name, traits, State())
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
