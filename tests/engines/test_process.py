"""Runs and the program that starts them share a process, and do not change each other."""

import os
import random
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedhet
from fedhet.errors import FedhetError
from fedhet.utils.files import read_tensors
from fedhet.utils.process import _SETTINGS, settings_restored

pytestmark = pytest.mark.usefixtures("home", "no_report")
INPUTS, LABELS = torch.randn(60, 4, generator=torch.Generator().manual_seed(7)), torch.arange(60) % 3


def network(client):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def data(client):
    part = slice(client.partition_id, None, 2)
    return {"train": (INPUTS[part][:20], LABELS[part][:20]), "test": (INPUTS[part][20:], LABELS[part][20:])}


def trained(folder: Path, *, model=network, data=data) -> bytes:
    settings = {"method": "fedavg", "clients": 2, "rounds": 2, "workers": 1, "report": False, "learning-rate": 0.1}
    done = fedhet.run(settings, model=model, data=data, out=folder, progress=False)
    tensors = read_tensors(done.folder / "models" / "global.safetensors")
    return b"".join(tensor.numpy().tobytes() for tensor in tensors.values())


def states():
    drawn = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    return [*drawn, torch.is_inference_mode_enabled(), *(read() for read, _ in _SETTINGS.values())]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone") / "run")


CHANGES = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "gradients": lambda: torch.set_grad_enabled(False),
    "threads": lambda: torch.set_num_threads(2),
    "algorithms": lambda: torch.use_deterministic_algorithms(True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "numpy": lambda: np.seterr(all="raise"),
    "warnings": lambda: warnings.simplefilter("error"),
    "folder": lambda: os.chdir("/"),
    "signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_are_neither_used_nor_changed(alone, tmp_path, change):
    def changing(function):
        def call(client):
            value = function(client)
            CHANGES[change]()
            return value

        return call

    before = states()
    assert trained(tmp_path / "function", model=changing(network), data=changing(data)) == alone
    assert states() == before
    with settings_restored():
        CHANGES[change]()
        changed = states()
        assert changed != before
        assert trained(tmp_path / "caller") == alone
        assert states() == changed


@pytest.mark.parametrize("context", [torch.inference_mode(), torch.no_grad(), torch.device("meta")], ids="abc")
def test_contexts_of_the_caller_are_not_used(alone, tmp_path, context):
    with context:
        assert trained(tmp_path / "run") == alone


def test_runs_in_threads_take_turns(alone, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda name: trained(tmp_path / name), "ab")] == [alone, alone]


def test_a_run_in_a_thread_has_random_numbers_of_its_own(alone, tmp_path, caplog):
    """Clients compute in another process, so that this program can draw numbers, and the log says from where."""
    caplog.set_level("INFO", "flwr")
    results = []
    thread = threading.Thread(target=lambda: results.append(trained(tmp_path / "run", data=data)))
    thread.start()
    while thread.is_alive():
        torch.rand(())
        np.random.rand()
        time.sleep(0.001)
    assert results == [alone]
    assert "let the program draw its own numbers from generators of its own" in caplog.text


def test_the_log_says_that_all_threads_have_the_default_dtype_of_the_run(tmp_path, caplog):
    with settings_restored({"dtype": torch.float64}):
        trained(tmp_path / "run")
    assert "until the run ends, the default dtype is torch.float32 in all threads, not torch.float64" in caplog.text


def test_a_run_within_a_run_is_refused(tmp_path):
    def within(client):
        trained(tmp_path / "within")

    message = "started by a function of another run, such as its data function or an observer: start it before or after"
    for argument in ("model", "data"):
        with pytest.raises(FedhetError, match=message):
            trained(tmp_path / argument, **{argument: within})
