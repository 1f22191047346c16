"""Processes of one's own."""

import subprocess
import sys

import psutil
import pytest

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
