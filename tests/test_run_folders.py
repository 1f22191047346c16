"""Folders of runs are data, and may be anybody's: whatever they hold, nothing is imported, and no traceback is shown.

A finished and an interrupted run are made once. Then their files are damaged in every way, and `fedhet report` and
`fedhet run --resume` must answer with an exit code and a sentence.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedhet
from fedhet import cli, registry
from fedhet import config as configuration
from fedhet.errors import ConfigError, FedhetError
from fedhet.observing import Observer, RunInfo

SETTINGS = {"method": "fedhenn", "clients": 3, "rounds": 2, "local-epochs": 1, "architectures": "mlp", "workers": 1}
EVIL = 'from pathlib import Path\nPath("marker").touch()\n'
MINE = """
from pathlib import Path
from fedhet.method import Drawing, Method
from fedhet.options import Parameters

Path("imported").touch()
method = Method("mine", drawings={"cka": Drawing("fedhet.results.drawings:cka_figure", "of mine")})
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
    assert {"matrices.json", "digests.csv"} <= {*os.listdir(folder / "finished")}
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

    monkeypatch.setattr("fedhet.serving.registry.strategy", strategy)


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="fedhet")


def answered(*arguments: str | Path) -> Result:
    """Assert that a command ends with an exit code and, unless it is 0, with a sentence; nothing is imported."""
    result = command(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2)
    assert "Traceback" not in result.output
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

    @pytest.mark.parametrize(
        "part", ["state", "state/clients", "models", "checkpoint", "figures", "report.html", "more/a"]
    )
    def test_are_refused_where_links_are_such_paths(self, runs: dict[str, Path], outside: Path, part: str) -> None:
        folder = copied(runs["finished"])
        if (folder / part).is_dir():
            shutil.rmtree(folder / part)
        (folder / part).unlink(missing_ok=True)
        (folder / part).parent.mkdir(exist_ok=True)
        (folder / part).symlink_to(outside)
        self.refused(outside, "is a link out of", "run", "--resume", folder, "--set", "rounds=3")
        self.refused(outside, "is a link out of", "report", folder)

    def test_are_refused_in_a_comparison(self, outside: Path) -> None:
        for part in ("logs", "local-seed0", "tuning"):
            shutil.rmtree("compared", ignore_errors=True)
            Path("compared").mkdir()
            Path("compared", part).symlink_to(outside)
            self.refused(outside, "is a link out of", "compare", "local", "--seeds", "0", "--out", "compared")

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
        self.refused(outside, f"set state-dir = {outside} again", "run", "--resume", folder)
        assert "it goes on" in answered("run", "--resume", folder, "--set", f"state-dir={outside}").stderr

    @pytest.mark.parametrize("values", ["x = " + "[" * 200 + "]" * 200, "[" + ".".join("a" * 900) + "]\nx = 1"])
    def test_files_that_are_nested_too_deeply_are_refused(self, runs: dict[str, Path], values: str) -> None:
        folder = copied(runs["finished"])
        with (folder / "config.toml").open("a") as file:
            file.write(f"\n{values}\n")
        for arguments in (["report", folder], ["run", "--resume", folder], ["run", folder / "config.toml"]):
            assert "nested too deeply" in answered(*arguments).stderr


class TestMethodsThatAFolderNames:
    @pytest.mark.parametrize("method", ["evil:method", "os:system", "evil.of:method", ":", "evil:"])
    def test_are_not_imported(self, runs: dict[str, Path], method: str) -> None:
        folder = copied(runs["interrupted"])
        rename_method(folder, method)
        for arguments in (["report", folder], ["run", "--resume", folder], ["run", folder / "config.toml"]):
            result = answered(*arguments)
            assert result.exit_code == 2
            assert "names the method" in result.stderr
            assert "--method MODULE:NAME" in result.stderr
        with pytest.raises(ConfigError, match="--method MODULE:NAME"):
            fedhet.run({"rounds": 3}, resume=folder)
        with pytest.raises(ConfigError, match="--method MODULE:NAME"):
            fedhet.run(folder / "config.toml")
        assert not Path("marker").exists()
        assert not Path("runs").exists()

    def test_are_not_imported_from_other_keys_either(self, runs: dict[str, Path]) -> None:
        folder = copied(runs["interrupted"])
        rename_method(folder, "fedhenn", "extra-keys = 'method = \"evil:method\"'")
        assert "extra-keys" in answered("run", "--resume", folder).stderr
        assert "extra-keys" in answered("run", folder / "config.toml").stderr
        assert answered("report", folder).exit_code == 0

    def test_are_not_imported_by_what_takes_several_folders(self, runs: dict[str, Path]) -> None:
        folder = copied(runs["finished"])
        rename_method(folder, "evil:method")
        assert answered("report", folder, runs["interrupted"]).exit_code == 0
        assert answered("compare", "local", "--config", folder / "config.toml").exit_code == 2
        shutil.copytree(folder, "compared/local-seed0")
        assert answered("compare", "local", "--seeds", "0", "--out", "compared").exit_code == 2

    @pytest.mark.slow
    def test_are_imported_where_the_user_names_them_too(self, runs: dict[str, Path]) -> None:
        folder = copied(runs["finished"])
        rename_method(folder, "mine:method")
        assert command("report", folder).exit_code == 2
        assert not Path("imported").exists()
        assert command("report", folder, "--method", "mine:method").exit_code == 0
        assert Path("imported").exists()
        assert "of mine" in (folder / "report.html").read_text()

    @pytest.mark.slow
    def test_are_imported_in_a_run_that_is_resumed_with_their_name(self, tmp_path: Path) -> None:
        settings = {"method": "mine:method", "clients": 2, "rounds": 1, "architectures": "mlp", "local_epochs": 0}
        fedhet.run({**settings, "preset": "", "workers": 1}, out="run", progress=False)
        resume = ["run", "--resume", "run", "--set"]
        registry._given.clear()  # as in another process
        assert command(*resume, "rounds=2").exit_code == 2
        assert "run with another method" in command(*resume, "rounds=2", "--method", "fedavg").stderr
        assert command(*resume, "rounds=2", "--method", "mine:method").exit_code == 0
        assert command(*resume, "rounds=3").exit_code == 0, "it is known in this process"
        registry._given.clear()
        assert fedhet.run({"method": "mine:method", "rounds": 4}, resume="run").summary["rounds"] == 4
        registry._given.clear()
        Path("run/config.toml").write_text(Path("run/config.toml").read_text().replace("mine:method", "mine"))
        assert "--method MODULE:NAME" in command(*resume, "rounds=5").stderr
        assert command(*resume, "rounds=5", "--method", "mine:method").exit_code == 0
        assert configuration.read(Path("run/config.toml"))["method"] == "mine:method"

    def test_of_a_file_of_ones_own_are_imported(self) -> None:
        Path("own.toml").write_text('method = "mine:method"\nrounds = 1\nclients = 2\narchitectures = "mlp"\n')
        assert command("run", "own.toml", "--out", "run", "--set", "local-epochs=0").exit_code == 0
        registry._given.clear()
        assert command("run", "run/config.toml", "--out", "again").exit_code == 2
        assert command("run", "run/config.toml", "--out", "again", "--method", "mine:method").exit_code == 0


LONG = "[" * 100_000
JUNK = (b"", b"\xff\xfe\x00", b"[]", b"3", b"null", b"{}", b"{", LONG.encode(), b"\x00" * 30, b"a = " + LONG.encode())
VALUES = (
    *(None, True, -1, 0, 7, 2**70, 10**400, float("nan"), float("inf"), 1e308, -0.5),
    *([], {}, [[]], {"a": []}, [None], "", "$^$", "\x1b[31m", "\u202e\x00", "=1+1", "[/red]", "<script>"),
    *("evil:method", "os:system", "../..", "/", "x" * 10_000, "0", "received"),
)
SETTING = st.sampled_from(
    [
        *("method", "extra-keys", "preset", "dataset", "architectures", "assign", "rounds", "clients", "log", "head"),
        *(
            "partition",
            "device",
            "engine",
            "seed",
            "own",
            "ran",
            "versions",
            "fedhenn",
            "evil.method",
        ),
    ]
)
STRUCTURED = (".json", ".jsonl")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at a place; `...` removes what is there."""
    if not path:
        return {} if new is ... else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def damage(draw: Callable[..., Any], folder: Path) -> None:
    """Damage one file of a run."""
    names = sorted(
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and "figures" not in str(path)
    )
    path = folder / draw(st.sampled_from([name for name in names if str(name) not in (".lock", "report.html")]))
    content = path.read_bytes()
    ways = ["flip", "cut", "junk", "gone", "folder", "lines"]
    ways += ["value"] * 6 if path.suffix in STRUCTURED else ["setting"] * 6 if path.suffix == ".toml" else []
    match draw(st.sampled_from(ways)):
        case "flip":
            flipped = bytearray(content or b"\0")
            for place in draw(st.lists(st.integers(0, len(flipped) - 1), min_size=1, max_size=3)):
                flipped[place] ^= 1 << draw(st.integers(0, 7))
            path.write_bytes(flipped)
        case "cut":
            path.write_bytes(content[: draw(st.integers(0, len(content)))])
        case "junk":
            path.write_bytes(draw(st.sampled_from(JUNK)))
        case "gone" | "folder" as way:
            path.unlink()
            if way == "folder":
                path.mkdir()
        case "lines":
            lines = content.splitlines(keepends=True) or [b""]
            place = draw(st.integers(0, len(lines) - 1))
            lines[place : place + 1] = lines[place : place + 1] * draw(st.sampled_from([0, 2]))
            path.write_bytes(b"".join(lines))
        case "value":
            lines = (content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]) or [""]
            place = draw(st.integers(0, len(lines) - 1))
            value = json.loads(lines[place])
            where = draw(st.sampled_from(list(places(value))))
            lines[place] = json.dumps(changed(value, where, draw(st.sampled_from([..., *VALUES]))))
            path.write_text("\n".join(lines) + "\n")
        case "setting":
            value = draw(st.sampled_from([each for each in VALUES if isinstance(each, str | int | float | list)]))
            key = draw(SETTING)
            kept = [line for line in content.decode().splitlines() if not line.startswith(f"{key} =")]
            text = (
                "1" + "0" * 400
                if value == 10**400
                else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")
            )
            path.write_text("\n".join([f"{key} = {text}", *kept]))


class TestFuzzing:
    @pytest.fixture
    def answer(self, runs: dict[str, Path], stopping: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
        monkeypatch.setattr("fedhet.results.plotting.save_png", lambda figure, path: None)

        def answer(draw: Callable[..., Any], *, drawn: bool = True) -> None:
            folder = copied(runs[draw(st.sampled_from(sorted(runs)))])
            for _ in range(draw(st.integers(1, 2))):
                with contextlib.suppress(ValueError):  # what is damaged already may be no text or JSON any more
                    damage(draw, folder)
            commands = [["run", "--resume", folder], ["run", folder / "config.toml", "--out", folder]]
            answered(*(["report", folder] if drawn and draw(st.booleans()) else draw(st.sampled_from(commands))))

        return answer

    @pytest.mark.parametrize("drawn", [True, False])
    def test_damaged_folders_are_answered(self, answer: Callable[..., None], drawn: bool) -> None:
        @given(st.data())
        @settings(
            max_examples=12 if drawn else 60,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        def fuzz(data: st.DataObject) -> None:
            answer(data.draw, drawn=drawn)

        fuzz()

    @pytest.mark.long
    def test_damaged_folders_are_answered_at_length(self, answer: Callable[..., None]) -> None:
        @given(st.data())
        @settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
        def fuzz(data: st.DataObject) -> None:
            answer(data.draw)

        fuzz()
