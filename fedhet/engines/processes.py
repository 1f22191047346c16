"""Flower's processes: commands found where they are installed, a SuperLink of a run's own, and an orderly end."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from fedhet.errors import FedhetError

SIMULATION = "ray"
STARTUP, FAREWELL = 60.0, 3.0
"""Seconds for a SuperLink to start, and for processes to end when they are asked to."""

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
    found = shutil.which(name, path=environment_of_commands()["PATH"])
    if found is None:
        raise FedhetError(f"Flower's command {name!r} is not installed beside {sys.executable}")
    return found


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
    arguments = [command("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
    arguments += ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port)]
    with (work / "superlink.log").open("wb") as output:
        process = subprocess.Popen(
            arguments,
            cwd=work / "empty",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the others in order
        )
    try:
        _await_health(port, process, work / "superlink.log")
        yield
    finally:
        end(process)


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
