"""The house: imports go down and nowhere in circles, and no module is a drawer."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedhet

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fedhet", "strategies", "client_apps", "run_configs", "tests")
LONGEST = 450
BELOW_FLOWER = ("algorithms", "training", "data", "models", "tasks")

WITHOUT_FLOWER = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "flwr":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
for room in sys.argv[1:]:
    package = importlib.import_module("fedhet." + room)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
assert not [name for name in sys.modules if name.startswith("fedhet.messages")]
"""


def test_imports_follow_the_layers():
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", lint, "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_every_room_is_in_a_layer():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " : ".join(contracts[0]["layers"]).replace(" | ", " : ").split(" : ")
    rooms = {f"fedhet.{path.parent.name}" for path in (ROOT / "fedhet").glob("*/__init__.py")}
    assert rooms <= {*layers}


def test_no_file_is_too_long():
    package = Path(fedhet.__file__).parent
    folders = (package, ROOT / "strategies", ROOT / "client_apps")
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in folder.rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > LONGEST} == {}


@pytest.mark.slow
def test_lower_rooms_do_not_need_flower():
    command = [sys.executable, "-c", WITHOUT_FLOWER, *BELOW_FLOWER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
