"""The time until a run begins."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark

BARE = "import time, torch, flwr.app, flwr.clientapp, flwr.serverapp; print(time.process_time())"
RUN = """
import os, sys, time
from fedhet.results.recorder import RunDirectory

def began(*_):
    print(time.process_time(), flush=True)
    os._exit(0)

RunDirectory.started = began
sys.argv = ["fedhet", "run", "fedavg", "--out", sys.argv[1]]
from fedhet.cli import main
main()
"""


def seconds(*command: str) -> float:
    """CPU seconds of a fresh interpreter, which prints them last."""
    done = subprocess.run([sys.executable, "-c", *command], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def test_a_run_begins_little_later_than_torch_and_flower_are_imported(tmp_path: Path) -> None:
    """Until all clients have answered the first message: data are read, and dealt."""
    pairs = [(seconds(RUN, str(tmp_path / str(number))), seconds(BARE)) for number in range(11)][1:]
    ratio = statistics.median(run / bare for run, bare in pairs)
    run, bare = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"\nbegins after {run:.2f} s of CPU, torch and Flower alone {bare:.2f} s: {ratio:.2f}")
    assert ratio <= 1.4
