"""The files of `fedhet new`, and the notebook, run as they are at fewer rounds."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedhet.cli.new_project import APP, PARTS, PROGRAM, write
from fedhet.errors import ConfigError
from fedhet.flower.grid import LocalGrid

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("home", "no_report")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in (*PARTS, *PROGRAM, *APP):
        sys.modules.pop(Path(name).stem, None)


@pytest.mark.slow
def test_a_program_compares_as_it_is(folder, monkeypatch, capsys):
    assert write(folder, flower=False) == [*PARTS, *PROGRAM]
    monkeypatch.chdir(folder)
    script = (folder / "run.py").read_text()
    short = script.replace('"clients": 10, "rounds": 10', '"clients": 2, "rounds": 1').replace("[0, 1, 2]", "[0, 1]")
    assert short != script
    (folder / "run.py").write_text(short)
    runpy.run_path(str(folder / "run.py"), run_name="__main__")
    assert (folder / "runs" / "first" / "comparison.html").is_file()
    assert "fedhenn" in capsys.readouterr().out


def test_an_app_runs_as_it_is(folder, monkeypatch):
    assert write(folder, flower=True) == [*PARTS, *APP]
    monkeypatch.chdir(folder)
    client, server = (importlib.import_module(name).app for name in ("client_app", "server_app"))
    server(LocalGrid(client, 3), Context(1, 1, {}, RecordDict(), {"num-server-rounds": 1}))
    assert json.loads((folder / "runs" / "first" / "summary.json").read_text())["status"] == "completed"


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty: give the name of a new one"):
        write(tmp_path, flower=False)
    with pytest.raises(ConfigError, match="exists as a file"):
        write(tmp_path / "notes.txt", flower=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "run_configs" / "first_steps.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    changed = code[0].replace('"clients": 10, "rounds": 10', '"clients": 3, "rounds": 1').replace("[0, 1, 2]", "[0, 1]")
    assert changed.count('"rounds": 1}') == 1
    names = {}
    code[-1] = code[-1].replace("budget=BUDGET", 'methods=["fedhenn", "fedavg"], budget="40s"')
    for source in (changed, *code[1:]):
        exec(compile(source, "first_steps.ipynb", "exec"), names)
    assert names["result"].summary["status"] == "completed"
    assert {each.variant for each in names["comparison"].results} == {"local", "fedhenn", "fedproto"}
    assert {"fedhenn", "fedavg"} & names["found"].refused.keys() == {"fedavg"}
    assert all(not cell.get("outputs") for cell in cells)
