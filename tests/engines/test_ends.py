"""How `fedhet run` and `fedhet compare` end: what they say, their exit code, and that nothing stays behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedhet.utils.machine import QUIET, Stopped, ended_by_signals, exit_code

COMMAND = """
import signal, fedhet.cli
from fedhet.engines.workers import WorkerGrid
WorkerGrid.patience = 0  # workers from the first message on
signal.signal(signal.SIGINT, signal.default_int_handler)
fedhet.cli.main()
"""
SMALL = ["--set", "clients=2", "--set", "local-epochs=1", "--set", "report=false", "--out", "here"]
RUN = ["run", "local/digits", *SMALL, "--set", "workers=2"]
COMPARE = ["compare", "local", "--seeds", "0,1", "--jobs", "2", *SMALL]


class Command:
    """A command under way in a folder of its own, with one for temporary files."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.temporary, self._family = Path(tempfile.mkdtemp()), []  # a short path: there is a socket in it
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, there: Callable[[], object]) -> None:
        """Wait until something is there, and take notice of the processes meanwhile."""
        until = time.monotonic() + 100
        while not there():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            self._family += psutil.Process(self.process.pid).children(recursive=True)
            time.sleep(0.05)

    def end(self, how: signal.Signals | None = None) -> tuple[int, str]:
        """The exit code, and what was said of errors."""
        self._family += psutil.Process(self.process.pid).children(recursive=True)
        if how is not None:
            self.process.send_signal(how)
        _, said = self.process.communicate(timeout=100)
        return self.process.returncode, said

    def left(self) -> list[object]:
        """Processes and temporary files that are still there a moment after its end."""
        until = time.monotonic() + 0.5
        while (alive := [each for each in set(self._family) if _lives(each)]) and time.monotonic() < until:
            time.sleep(0.05)
        return [*alive, *self.temporary.iterdir()]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts a command; what it left behind is ended."""
    started: list[Command] = []

    def start(arguments: list[str]) -> Command:
        started.append(Command(tmp_path, arguments))
        return started[-1]

    yield start
    for command in started:
        for each in [command.process, *command._family]:
            if each.is_running() if isinstance(each, psutil.Process) else each.poll() is None:
                each.kill()
        command.process.communicate()
        shutil.rmtree(command.temporary)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "rows", "advice", "how", "code"),
    [
        (RUN, "here/history.jsonl", "continue with: fedhet run --resume here", signal.SIGINT, 130),
        (COMPARE, "here/local-seed0/history.jsonl", "the same command continues where it was", signal.SIGTERM, 143),
    ],
    ids=["run", "compare"],
)
def test_a_signal_ends_a_command_in_order(arguments, rows, advice, how, code, start, tmp_path):
    command = start([*arguments, "--set", "rounds=100000"])
    history = tmp_path / rows
    command.wait_for(lambda: history.is_file() and len(history.read_text().splitlines()) > 3)
    assert command.end(how) == (code, f"fedhet: stopped; {advice}\n")
    assert command.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [RUN, COMPARE], ids=["run", "compare"])
def test_nothing_is_left_of_a_command_that_completes(arguments, start):
    command = start([*arguments, "--set", "rounds=1"])
    command.wait_for(lambda: psutil.Process(command.process.pid).children())
    assert command.end() == (0, "")
    assert command.left() == []


@pytest.mark.slow
def test_a_signal_as_a_command_begins(start):
    command = start(["run", "local/digits", "--set", "rounds=100000", "--out", "here"])
    command.process.stdout.readline()
    code, said = command.end(signal.SIGTERM)
    assert code == 143, said
    assert command.left() == []


@pytest.fixture
def in_front():
    """Ctrl-C reaches this process, also where it runs in the background of a shell that has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_front")
def test_signals_end_what_runs_within_and_only_once():
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        try:
            with ended_by_signals():  # which leaves the outer one in charge
                signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # does not disturb what is being ended
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as ended, ended_by_signals():
        work()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyboardInterrupt) as interrupted, ended_by_signals():
        signal.raise_signal(signal.SIGINT)
    assert (exit_code(interrupted.value), exit_code(Stopped(signal.SIGHUP))) == (130, 129)


def test_a_signal_that_was_lost_can_be_sent_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedhet.utils.machine.time.monotonic", lambda: now[0])
    with ended_by_signals():
        for _ in range(2):
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGTERM)
            now[0] += QUIET
