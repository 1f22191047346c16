"""Processes of one's own."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe, resource_tracker

import numpy as np
import psutil
import pytest
import torch
from flwr.app import Array

from fedhet.comparing.runs import Job, run_jobs
from fedhet.engines import children

PROGRAM = """
import sys, time
from pathlib import Path
from functools import partial
from fedhet.comparing.runs import Job, _call
from fedhet.engines.children import Child

if __name__ == "__main__":
    child = Child(_call, name="sleeper")
    child.send(Job("sleeper", partial(time.sleep, 120), Path(sys.argv[1])))
    print(child.process.pid, flush=True)
    child.receive()
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


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts this process, also if it was started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted():
    with children._starting():
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)  # another thread may be given the signal, a moment later


def test_ctrl_c_while_processes_start_ends_this_process_and_none_of_them(interruptible):
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    child = children.Child(answer_after_ctrl_c, name="deaf")
    try:
        assert child.receive() == "alive"
    finally:
        child.end()


def answer_after_ctrl_c(connection):
    os.kill(os.getpid(), signal.SIGINT)
    children.send(connection, "alive")


def test_processes_start_without_a_fork_server_as_on_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert dict(run_jobs([Job("spawned", os.getpid, tmp_path / "log")], 1)) == {"spawned": None}


@pytest.mark.slow
def test_processes_start_with_a_long_temporary_folder(tmp_path):
    folder = tmp_path / ("x" * 140)
    folder.mkdir()
    program = PROGRAM.replace("time.sleep, 120", "time.sleep, 0") + "    child.end()\n"
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, tmp_path / "program.py", tmp_path / "log"]
    done = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


SCRIPT = """
import functools, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import fedhet

@functools.lru_cache
def everything():
    whole = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12) % 2)
    return [torch.cat(part) for part in zip(*DataLoader(whole, 4, num_workers=2))]

def data(client):
    inputs, labels = everything()
    return (inputs[:8], labels[:8]), (inputs[8:], labels[8:])

if __name__ == "__main__":
    settings = {"method": "local", "clients": 2, "rounds": 1, "workers": 2, "timeout": 600, "report": False}
    fedhet.run(settings, model=lambda client: torch.nn.Linear(2, 2), data=data, out=sys.argv[1], progress=False)
"""


@pytest.mark.slow
def test_a_scripts_cached_functions_and_loaders_with_processes_of_their_own(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert '"failures": 0' in (tmp_path / "run" / "summary.json").read_text()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_whose_process_dies_fails_alone(tmp_path):
    jobs = [Job(name, call, tmp_path / name) for name, call in (("dies", _die), ("lives", os.getpid))]
    ended = dict(run_jobs(jobs, 2))
    assert ended["lives"] is None
    assert "the process 'fedhet run' ended with exit code -9" in ended["dies"]


# ---- messages


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_what_is_sent_arrives(system, monkeypatch):
    monkeypatch.setattr(children.sys, "platform", system)
    large = torch.arange(1 << 18)
    sent = {
        "int64": large,
        "again": large,
        "bfloat16": large.to(torch.bfloat16).view(16, -1),
        "strided": large.view(2, -1).T,
        "learns": torch.rand(1 << 18, requires_grad=True),
        "numpy": np.arange(float(1 << 18)).reshape(4, -1),
        "flower": Array("uint8", (1 << 18,), "fedhet.raw", os.urandom(1 << 18)),
        "bytes": os.urandom(1 << 18),
    }
    here, there = Pipe(duplex=True)
    with here, there:
        sending = threading.Thread(target=children.send, args=(here, {**sent, "function": lambda value: value + 1}))
        sending.start()
        came = children.receive(there)
        sending.join()
    assert came.pop("function")(1) == 2
    assert came["again"].data_ptr() == came["int64"].data_ptr()
    assert came["learns"].requires_grad
    assert came.keys() == sent.keys()
    for name, value in sent.items():
        assert type(came[name]) is type(value)
        same = torch.equal if isinstance(value, torch.Tensor) else lambda one, other: np.array_equal(one, other)
        assert came[name] == value if isinstance(value, Array) else same(came[name], value)


def test_tensors_in_a_file_are_shared_until_written(tmp_path):
    tensor = torch.arange(1 << 18)
    torch.save([tensor, lambda: 3], tmp_path / "recipe", pickle_module=children, pickle_protocol=5)
    one, other = (torch.load(tmp_path / "recipe", mmap=True, weights_only=False) for _ in range(2))
    one[0][3] = -1
    assert torch.equal(other[0], tensor)
    assert other[1]() == 3


def test_processes_that_cannot_start_leave_ctrl_c_as_it_is(monkeypatch):
    monkeypatch.setattr(resource_tracker, "ensure_running", lambda: 1 / 0)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), children._starting():
        pass
    assert signal.getsignal(signal.SIGINT) is before
