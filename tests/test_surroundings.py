"""Commands in environments that lack what is usual: a home folder that can be written to, an open terminal."""

import os
import subprocess
import sys
import tomllib
from types import ModuleType

import pytest

from fedhet.errors import ConfigError
from fedhet.utils.files import expanded
from fedhet.utils.machine import in_ray

SMALL = ["local", *(f"--set={each}" for each in ("clients=2", "rounds=1", "samples-per-client=20", "report=false"))]


def fedhet(*words, home, then=""):
    script = f'"$@" {then}'
    words = ["bash", "-c", script, "bash", sys.executable, "-m", "fedhet", *words]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, "HOME": str(home)})


@pytest.mark.parametrize("home", ["/proc/nohome", "/dev/null"])
def test_a_home_folder_that_cannot_be_written_to(tmp_path, home):
    done = fedhet("run", *SMALL, "--out", tmp_path / "run", home=home)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "models" / "0.safetensors").is_file()


def test_an_unknown_home_folder(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="~/runs: the home folder is unknown: set the environment variable HOME"):
        expanded("~/runs")


def test_closed_streams(tmp_path):
    done = fedhet("compare", *SMALL, "--seeds=0", "--out", tmp_path / "compared", home=tmp_path, then="<&- >&- 2>&-")
    assert done.returncode == 0
    assert (tmp_path / "compared" / "comparison.html").is_file()


@pytest.mark.parametrize("name", ["run", "FedAvg"])
def test_the_level_of_flowers_logger_stays(name):
    lines = f"import logging, fedhet; logger = logging.getLogger('flwr'); logger.setLevel(40); fedhet.{name}"
    subprocess.run([sys.executable, "-c", f"{lines}; assert logger.level == 40"], check=True)


def test_paths_that_begin_in_the_home_folder(tmp_path):
    for number, further in enumerate(([], ["--set=start-from=~/0", "--set=state-dir=~/state"])):
        done = fedhet("run", *SMALL, f"--set=out=~/{number}", *further, home=tmp_path)
        assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {".fedhet", "0", "1", "state"}
    written = tomllib.loads((tmp_path / "1" / "config.toml").read_text())
    assert written["start-from"] == str(tmp_path / "0")


def test_a_module_of_the_user_named_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert not in_ray()
