"""Processes of one's own."""

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest

from fedhet.comparing.processes import Job, run_jobs

PROGRAM = """
import sys, time
from pathlib import Path
from fedhet.comparing.processes import Job, _call
from fedhet.engines import children

if __name__ == "__main__":
    job = Job("sleeper", time.sleep, (120,), {}, Path(sys.argv[1]))
    process, connection = children.start(_call, job, name="sleeper")
    print(process.pid, flush=True)
    connection.poll(None)
"""


@pytest.mark.slow
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", tmp_path / "log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    child.wait(timeout=10)


def _write(here: str) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            os.write(descriptor, here.encode())
    time.sleep(0.2)


def test_a_job_that_writes_everywhere_fails_alone(tmp_path):
    jobs = [Job(name, _write, (text,), {}, tmp_path / name) for name, text in (("loud", "a line\n"), ("quiet", ""))]
    ended = dict(run_jobs(jobs, workers=2))
    assert ended["quiet"] is None
    assert "its process was ended: something else than a message came from it" in ended["loud"]
