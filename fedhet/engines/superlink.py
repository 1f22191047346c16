"""Processes of Flower's commands, such as a SuperLink for one run, and functions to start, read and end them."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import tomli_w

from fedhet.errors import FedhetError
from fedhet.utils.files import expanded

SIMULATION = "ray"

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def flwr_home() -> Path:
    """Return the folder of Flower's `config.toml`: `FLWR_HOME` in the environment, by default `~/.flwr`."""
    return expanded(os.environ.get("FLWR_HOME") or "~/.flwr")


def environment_of_commands() -> dict[str, str]:
    """Return this process's environment variables with the folder of Flower's commands in PATH and telemetry off."""
    path = os.pathsep.join(filter(None, [sysconfig.get_path("scripts"), os.environ.get("PATH")]))
    return {**os.environ, **_QUIET, "PATH": path}


def command(name: str) -> str:
    """Return the path of the Flower command `name`, such as `flwr`; raises a FedhetError if it is not installed."""
    path = shutil.which(name, path=environment_of_commands()["PATH"])
    if path is None:
        raise FedhetError(f"Flower's command {name!r} is not installed for {sys.executable}: pip install flwr")
    return path


@contextlib.contextmanager
def superlink(home: Path, place: Path, environment: Mapping[str, str], output: Path) -> Iterator[None]:
    """Context manager of a SuperLink with new folders: `home` for its config, `place` to run in; logs to `output`."""
    port = _free_port()
    place.mkdir()
    home.mkdir()
    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
    config = {"superlink": {"default": SIMULATION, SIMULATION: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    words = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    words += ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port)]
    process = begin(words, place, environment, output)
    try:
        healthy = False
        deadline = time.monotonic() + 60
        while not healthy:
            if process.poll() is not None or time.monotonic() > deadline:
                raise FedhetError(f"Flower's SuperLink did not start; correct the error:\n{tail(output)}")
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                healthy = True
        yield
    finally:
        end(process)


def begin(words: Sequence[str], place: Path, environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start the Flower command `words` (name, arguments) in folder `place`, and return its process.

    Its log is appended to the file `output`.
    """
    with output.open("ab") as sink:
        return subprocess.Popen(
            [command(words[0]), *words[1:]],
            cwd=place,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C does not reach it
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, then kill it and its children after 3 seconds, as a simulation may ignore SIGTERM."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
        process.terminate()
        for each in psutil.wait_procs(family, timeout=3)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in (*each.children(recursive=True), each):
                    child.kill()
    process.wait()


def printed(path: Path) -> list[str]:
    """Return the lines of a file with the output of a command, without colour codes."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()


def tail(path: Path) -> str:
    """Return the last 20 lines of a file with the output of a command, indented and without colour codes."""
    return "\n".join(f"  {line}" for line in printed(path)[-20:])


def started_run(output: Path) -> str | None:
    """Return the run id from `output`, a file with the output of `flwr run`, or None if no run has started yet."""
    line = re.search(r"Successfully started run (\d+)", "\n".join(printed(output)))
    return line[1] if line else None


def status_of_run(output: str) -> tuple[str, str]:
    """Return a run's status (such as `finished:completed`) and its details from the output of `flwr list` as JSON."""
    try:
        row = json.loads(output)["runs"][0]
        return str(row["status"]), str(row.get("status-details") or "")
    except (ValueError, LookupError, TypeError):
        return "unknown", ""
