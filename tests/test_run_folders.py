"""Folders of runs are data, and may be anybody's: whatever they hold, nothing is imported, and no traceback is shown.

A finished and an interrupted run are made once. `fedhet report` and `fedhet run --resume` of damaged copies must answer
with an exit code and a sentence.
"""

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fedhet
from fedhet import cli
from fedhet.config import configuration
from fedhet.config.toml import toml_value
from fedhet.errors import ConfigError, FedhetError
from fedhet.methods import registry
from fedhet.results.observers import Observer, RunInfo

SETTINGS = {"method": "fedhenn", "clients": 3, "rounds": 2, "local-epochs": 1, "architectures": "mlp", "workers": 1}
PYTHON = re.compile(
    r"Traceback|\w+Error|datetime|NoneType|list ind|' object|invalid literal|convert|not supported|must be real"
)
EVIL = 'from pathlib import Path\nPath("marker").touch()\n'
MINE = """
from pathlib import Path
from fedhet.methods.method import Method
from fedhet.methods.options import Options

Path("imported").touch()
method = Method("mine")
"""


class Stop(Observer):
    def round(self, run: RunInfo, report: Any) -> None:
        if report.row["round"] == 1:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, with its report, and one that was interrupted after its first round."""
    folder = tmp_path_factory.mktemp("runs")
    fedhet.run(SETTINGS | {"fedhenn.target": "kernel"}, out=folder / "finished", progress=False)
    with pytest.raises(KeyboardInterrupt):
        fedhet.run(SETTINGS, out=folder / "interrupted", observers=[Stop()], progress=False)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working folder is on the path, as it is where `fedhet` is called, and holds modules that leave a mark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("evil.py").write_text(EVIL)
    Path("mine.py").write_text(MINE)
    level = logging.getLogger("flwr").level
    yield
    logging.getLogger("flwr").setLevel(level)
    for name in ("evil", "mine"):
        sys.modules.pop(name, None)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed gets as far as its first message, and no further."""
    found = registry.strategy

    def strategy(name: str) -> Any:
        def start(self: Any, *args: Any, **keywords: Any) -> None:
            raise FedhetError("it goes on")

        return type("Stopping", (found(name),), {"start": start})

    monkeypatch.setattr("fedhet.server.app.registry.strategy", strategy)


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="fedhet")


def answered(*arguments: str | Path) -> Result:
    """Assert that a command ends with an exit code and, unless it is 0, with a sentence; nothing is imported."""
    result = command(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2)
    assert not PYTHON.search(result.output), result.output
    assert result.exit_code == 0 or "fedhet: " in result.stderr
    assert all(char.isprintable() or char == "\n" for char in result.output)
    assert not Path("marker").exists()
    assert "evil" not in sys.modules
    return result


def copied(run: Path, name: str = "run") -> Path:
    shutil.rmtree(name, ignore_errors=True)
    return Path(shutil.copytree(run, name))


def rename_method(folder: Path, method: str, *others: str) -> None:
    path = folder / "config.toml"
    path.write_text("\n".join([*others, path.read_text().replace('"fedhenn"', json.dumps(method), 1)]))


class TestPathsThatLeadOutOfAFolder:
    """Nothing elsewhere is written or removed, unless the command itself names it."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        for name in ("clients/0/7.safetensors", "models/0.safetensors", "1.safetensors", "accuracy.png", "a.log"):
            (tmp_path / "outside" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "outside" / name).write_text("of somebody else")
        return tmp_path / "outside"

    def refused(self, outside: Path, words: str, *arguments: str | Path) -> None:
        before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
        assert words in " ".join(answered(*arguments).stderr.split())
        assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before

    @pytest.mark.parametrize("part", ["state", "checkpoint", "report.html", "more/a"])
    def test_are_refused_where_links_are_such_paths(self, runs: dict[str, Path], outside: Path, part: str) -> None:
        folder = copied(runs["finished"])
        if (folder / part).is_dir():
            shutil.rmtree(folder / part)
        (folder / part).unlink(missing_ok=True)
        (folder / part).parent.mkdir(exist_ok=True)
        (folder / part).symlink_to(outside)
        self.refused(outside, "is a link to", "run", "--resume", folder, "--set", "rounds=3")
        self.refused(outside, "is a link to", "report", folder)

    @pytest.mark.parametrize("name", ["config.toml", "history.jsonl", "models/0.safetensors"])
    def test_are_refused_where_files_are_pipes(self, runs: dict[str, Path], name: str) -> None:
        folder = copied(runs["finished"])
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert answered("report", folder).exit_code == 2
        assert answered("report", runs["finished"], folder).exit_code == 2
        assert answered("run", "--resume", folder).exit_code == 2
        if name == "config.toml":
            assert "is a pipe or a device" in answered("run", folder / name).stderr

    def test_are_refused_in_a_comparison(self, outside: Path) -> None:
        for part in ("logs", "local-seed0", "tuning"):
            shutil.rmtree("compared", ignore_errors=True)
            Path("compared").mkdir()
            Path("compared", part).symlink_to(outside)
            self.refused(outside, "is a link to", "compare", "local", "--seeds", "0", "--out", "compared")

    def test_links_within_a_folder_are_followed(self, runs: dict[str, Path]) -> None:
        folder = copied(runs["finished"])
        (folder / "figures").rename(folder / "drawn")
        (folder / "figures").symlink_to("drawn")
        Path("link").symlink_to(folder)
        assert answered("report", "link").exit_code == 0

    def test_are_refused_as_the_folder_of_state(self, runs: dict[str, Path], outside: Path, stopping: None) -> None:
        folder = copied(runs["interrupted"])
        config = folder / "config.toml"
        config.write_text(f'state-dir = "{outside}"\n{config.read_text()}')
        self.refused(outside, f"set state-dir = {outside} for the resumed run", "run", "--resume", folder)
        assert "it goes on" in answered("run", "--resume", folder, "--set", f"state-dir={outside}").stderr

    @pytest.mark.parametrize("values", ["x = " + "[" * 200 + "]" * 200, "[" + ".".join("a" * 900) + "]\nx = 1"])
    def test_files_that_are_nested_too_deeply_are_refused(self, runs: dict[str, Path], values: str) -> None:
        folder = copied(runs["finished"])
        with (folder / "config.toml").open("a") as file:
            file.write(f"\n{values}\n")
        for arguments in (["report", folder], ["run", "--resume", folder], ["run", folder / "config.toml"]):
            assert "nested too deeply" in answered(*arguments).stderr


class TestMethodsThatAFolderNames:
    @pytest.mark.parametrize("method", ["evil:method", "os:system", ":"])
    def test_are_not_imported(self, runs: dict[str, Path], method: str) -> None:
        folder = copied(runs["interrupted"])
        rename_method(folder, method)
        assert answered("report", folder).exit_code == 0
        for arguments in (["run", "--resume", folder], ["run", folder / "config.toml"]):
            result = answered(*arguments)
            assert result.exit_code == 2
            assert "names the method" in result.stderr
            assert "--method MODULE:NAME" in result.stderr
        with pytest.raises(ConfigError, match="--method MODULE:NAME"):
            fedhet.run({"rounds": 3}, resume=folder)
        with pytest.raises(ConfigError, match="--method MODULE:NAME"):
            fedhet.run(folder / "config.toml")
        with pytest.raises(ConfigError, match=rf"call fedhet\.methods\.registry\.method\('{method}'\) in Python"):
            fedhet.load_model(folder, 0)
        assert not Path("marker").exists()
        assert not Path("runs").exists()

    def test_are_not_imported_from_other_keys_either(self, runs: dict[str, Path]) -> None:
        folder = copied(runs["interrupted"])
        rename_method(folder, "fedhenn", "extra-keys = 'method = \"evil:method\"'")
        assert "extra-keys" in answered("run", "--resume", folder).stderr
        assert "extra-keys" in answered("run", folder / "config.toml").stderr
        assert answered("report", folder).exit_code == 0

    def test_are_not_imported_from_several_folders(self, runs: dict[str, Path]) -> None:
        folder = copied(runs["finished"])
        rename_method(folder, "evil:method")
        assert answered("report", folder, runs["interrupted"]).exit_code == 0
        assert answered("compare", "local", "--config", folder / "config.toml").exit_code == 2
        shutil.copytree(folder, "compared/local-seed0")
        assert answered("compare", "local", "--seeds", "0", "--out", "compared").exit_code == 2

    @pytest.mark.slow
    def test_are_imported_if_named_on_resuming(self, tmp_path: Path) -> None:
        settings = {"method": "mine:method", "clients": 2, "rounds": 1, "architectures": "mlp", "local_epochs": 0}
        fedhet.run({**settings, "preset": "", "workers": 1}, out="run", progress=False)
        resume = ["run", "--resume", "run", "--set"]
        registry._registered.clear()  # as in another process
        assert command(*resume, "rounds=2").exit_code == 2
        assert "other values of method, which" in command(*resume, "rounds=2", "--method", "fedavg").stderr
        assert command(*resume, "rounds=2", "--method", "mine:method").exit_code == 0
        assert command(*resume, "rounds=3").exit_code == 0, "it is known in this process"
        registry._registered.clear()
        assert fedhet.run({"method": "mine:method", "rounds": 4}, resume="run").summary["rounds"] == 4
        registry._registered.clear()
        Path("run/config.toml").write_text(Path("run/config.toml").read_text().replace("mine:method", "mine"))
        assert "--method MODULE:NAME" in command(*resume, "rounds=5").stderr
        assert command(*resume, "rounds=5", "--method", "mine:method").exit_code == 0
        assert configuration.read(Path("run/config.toml"))["method"] == "mine:method"

    def test_of_a_file_of_ones_own_are_imported(self) -> None:
        Path("own.toml").write_text('method = "mine:method"\nrounds = 1\nclients = 2\narchitectures = "mlp"\n')
        assert command("run", "own.toml", "--out", "run", "--set", "local-epochs=0").exit_code == 0
        registry._registered.clear()
        assert command("run", "run/config.toml", "--out", "again").exit_code == 2
        assert command("run", "run/config.toml", "--out", "again", "--method", "mine:method").exit_code == 0


CUT, JUNK, NESTED, GONE = "cut", b"\xff\xfe\x00", b"[" * 100_000, "gone"
VALUES = {
    "config.toml": {"seed": [date(2020, 1, 2)], "method": 7, "clients": 2**70, "own": "$^$", "ran": "/"},
    "summary.json": {
        "personal": [],
        "metric": {},
        "bytes_up": "\x1b[31m",
        "personal_accuracy": {"weighted": "x" * 9999},
    },
    "history.jsonl": {
        "round": None,
        "participants": 3,
        "received": {"accuracy": {"weighted": 10**400}},
        "failures": [[]],
    },
}


def damage(path: Path, how: str | bytes) -> None:
    if how == GONE:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if how == CUT else how)


class TestDamage:
    @pytest.mark.parametrize("how", [CUT, JUNK, NESTED, GONE], ids=["cut", "junk", "nested", "gone"])
    def test_of_any_file_is_answered(
        self, runs: dict[str, Path], stopping: None, monkeypatch: pytest.MonkeyPatch, how: str | bytes
    ) -> None:
        monkeypatch.setattr("fedhet.results.figures.run_figures", lambda run: {})
        files = ["config.toml", "history.jsonl", "clients.csv", "summary.json"]
        for name in [*files, "checkpoint/2.safetensors"]:
            folder = copied(runs["finished"])
            damage(folder / name, how)
            answered("report", folder)
            answered("run", "--resume", folder)

    @pytest.mark.parametrize("name", VALUES)
    def test_by_values_that_no_run_writes_is_answered(self, runs: dict[str, Path], stopping: None, name: str) -> None:
        for key, value in VALUES[name].items():
            folder = copied(runs["finished"])
            path = folder / name
            if name == "config.toml":
                lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} =")]
                path.write_text("\n".join([f"{key} = {toml_value(value)}", *lines]))
            else:
                *lines, last = path.read_text().splitlines() if name == "history.jsonl" else [path.read_text()]
                path.write_text("\n".join([*lines, json.dumps(json.loads(last) | {key: value})]) + "\n")
            answered("report", folder)
            answered("run", "--resume", folder)
