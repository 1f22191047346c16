"""Runs on Ray that fedhet starts: what an observer sees, how they fail, and that a stopped one leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from sklearn.datasets import load_digits
from torch import nn

import fedhet
from fedhet.config import configuration
from fedhet.config.toml import to_toml
from fedhet.engines.running import RunResult
from fedhet.errors import ConfigError, FedhetError
from fedhet.results.history import read_clients, read_history
from fedhet.testing import Run
from tests.engines.test_flower import ROOT, settings_of
from tests.simulations import run_on_ray


@pytest.mark.slow
def test_a_run_on_ray_is_followed_and_equals_the_local_one(
    watch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {"metric": "macro-f1", "metrics": "auc", "validation": 0.25, "keep-best": True, "patience": 1}
    settings = settings_of("fedhenn") | chosen
    local = fedhet.run(settings, out=tmp_path / "local")
    ray = fedhet.run(settings, out=tmp_path / "ray", engine="ray", observers=[watch])
    assert (ray.summary["engine"], ray.summary["status"]) == ("ray", "completed")
    printed = capsys.readouterr().out
    assert ("macro-f1" in printed, "accuracy" in printed) == (True, False)
    assert Run(ray.folder).rows == Run(local.folder).rows
    assert Run(ray.folder).models == Run(local.folder).models
    assert watch.rows == ray.history
    assert [row.round for row in watch.clients] == [row["round"] for row in ray.history for _ in range(3)]
    assert watch.begun is not None
    assert watch.begun[0] == 1
    assert watch.ended == "finished"
    assert ray.summary["best"] == local.summary["best"]
    for path in (local.folder / "models/best").iterdir():
        assert (ray.folder / "models/best" / path.name).read_bytes() == path.read_bytes()
    only = settings_of("fedhenn") | {"metric": "macro-f1", "rounds": 0, "start-from": str(ray.folder / "models/best")}
    evaluated = fedhet.run(only, out=tmp_path / "only", engine="ray")
    reported = {client: each["test"] for client, each in ray.summary["best"]["clients"].items()}
    assert {row.client: row.accuracy for row in read_clients(evaluated.folder)} == reported


@pytest.mark.slow
def test_data_are_described_on_ray(tmp_path: Path) -> None:
    settings = settings_of("local") | {"rounds": 0}
    described = fedhet.run(settings, out=tmp_path / "local").summary["data"]
    assert described["all"]["train"] > 0
    assert fedhet.run(settings, out=tmp_path / "ray", engine="ray").summary["data"] == described


@pytest.mark.long
def test_data_of_all_clients_are_split_alike_on_ray(tmp_path: Path) -> None:
    data = load_digits(return_X_y=True)
    settings = {"preset": "own", "method": "local", "clients": 3, "rounds": 1, "partition": "dirichlet"}
    one_by_one = settings | {"client-batching": "off"}
    fedhet.run(one_by_one, model=partial(nn.Linear, 64, 10), data=data, out=tmp_path / "local")
    config = configuration.resolve(settings, supplied={"model", "data"})
    run_on_ray(tmp_path / "ray", config, model=partial(nn.Linear, 64, 10), data=data)
    assert Run(tmp_path / "ray").rows == Run(tmp_path / "local").rows
    assert Run(tmp_path / "ray").models == Run(tmp_path / "local").models


@pytest.mark.slow
def test_a_run_that_fails_on_ray_says_why(tmp_path: Path) -> None:
    with pytest.raises(FedhetError, match="no reply within") as failure:
        fedhet.run(settings_of("fedavg") | {"timeout": 0.001}, out=tmp_path / "run", engine="ray")
    assert not isinstance(failure.value, ConfigError)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_stopped_run_can_be_resumed(tmp_path: Path) -> None:
    settings = settings_of("fedrep") | {"rounds": 500, "engine": "ray"}
    (tmp_path / "run.toml").write_text(to_toml(settings))
    mark, out = uuid.uuid4().hex, tmp_path / "run"
    process = subprocess.Popen(
        # A shell's background job ignores Ctrl-C, and the test may be one.
        [
            *(sys.executable, "-c"),
            "import signal, fedhet.cli; signal.signal(signal.SIGINT, signal.default_int_handler); fedhet.cli.main()",
            *("run", "run.toml", "--out", str(out)),
        ],
        cwd=tmp_path,
        env={**os.environ, "FEDHET_TEST": mark, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not any((out / "checkpoint").glob("[0-9]*.safetensors")):
        time.sleep(0.2)
    assert len(marked(mark)) > 5, "the run, a SuperLink, Ray"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not marked(mark)
    assert f"continue with: fedhet run --resume {out}" in stderr
    done = max(row["round"] for row in read_history(out))
    local = {"rounds": done + 2, "engine": "local", "client-batching": "off"}
    straight = fedhet.run(settings | local, out=tmp_path / "straight")
    resumed: RunResult = fedhet.run({"rounds": done + 2}, resume=out)
    assert resumed.summary["engine"] == "ray"
    assert Run(out).rows == Run(straight.folder).rows


def marked(mark: str) -> list[psutil.Process]:
    """Processes that inherited an environment, dead ones that nobody has collected left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("FEDHET_TEST") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found
