"""The command line: what it prints, what it exits with, and that bad input is answered and writes nothing."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import fedhet
from fedhet import cli, data, models
from fedhet.config import configuration
from fedhet.engines.running import RunResult
from fedhet.errors import FedhetError
from fedhet.methods import registry
from fedhet.methods.method import KINDS

QUICK = ["local/digits", "--set", "rounds=1", "--set", "clients=2", "--set", "local-epochs=1", "--set", "report=false"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    level = logging.getLogger("flwr").level
    yield
    logging.getLogger("flwr").setLevel(level)


def fedhet_command(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, list(arguments), prog_name="fedhet")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: str) -> str:
    """Asserts that a command is refused as bad input and writes nothing; returns its message."""
    before = sorted(Path().rglob("*"))
    result = fedhet_command(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert sorted(Path().rglob("*")) == before
    return result.stderr


class TestRun:
    def test_a_run_prints_its_table_and_files(self) -> None:
        result = fedhet_command("run", *QUICK[:-2], "--seed", "3", "--out", "here")
        assert result.exit_code == 0
        assert "round 1/1" in result.stdout
        assert "cnn-1-1" in result.stdout
        assert "here: report.html" in result.stdout
        summary = json.loads(Path("here/summary.json").read_text())
        assert (summary["status"], summary["seed"], summary["clients"]) == ("completed", 3, 2)
        Path("here/report.html").unlink()  # as if the run was killed before the page was written
        said = fedhet_command("run", "--resume", "here").stdout
        assert said.startswith("the run in here is complete, and its report.html is written now: ")
        assert Path("here/report.html").is_file()

    def test_a_run_is_repeated_resumed_and_reported(self) -> None:
        assert fedhet_command("run", *QUICK, "--out", "here").exit_code == 0
        assert fedhet_command("run", "here/config.toml", "--set", "out=there").exit_code == 0
        assert fedhet_command("run", "--resume", "here", "--set", "rounds=2").exit_code == 0
        assert fedhet_command("run", "--resume", "here").stdout.startswith("the run in here is complete: ")
        rounds = [json.loads(Path(folder, "summary.json").read_text())["rounds"] for folder in ("here", "there")]
        assert rounds == [2, 1]
        assert not Path("here/report.html").exists()
        assert fedhet_command("report", "here").stdout == "here/report.html\n"
        assert Path("here/report.html").is_file()
        said = fedhet_command("report", "here", "there").stdout
        assert said == f"{Path.cwd() / 'comparison.html'} (--out names another place)\n"
        assert Path("comparison.html").is_file()

    def test_a_failed_run_exits_with_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*args: object, **kwargs: object) -> None:
            raise FedhetError("no client can serve")

        monkeypatch.setattr("fedhet.engines.running.run", run)
        result = fedhet_command("run", *QUICK, "--out", "here")
        assert (result.exit_code, result.stderr) == (1, "fedhet: no client can serve\n")

    def test_control_c_says_how_to_go_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*args: object, **kwargs: object) -> None:
            Path("here").mkdir()
            Path("here/config.toml").touch()
            raise KeyboardInterrupt

        monkeypatch.setattr("fedhet.engines.running.run_locally", run)
        result = fedhet_command("run", *QUICK, "--out", "here")
        assert (result.exit_code, result.stderr) == (130, "fedhet: stopped; continue with: fedhet run --resume here\n")


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["fedhen/digits"], "did you mean 'fedhenn/digits'"),
            (["missing.toml"], "the configuration file missing.toml does not exist"),
            (["nosuch/preset"], "unknown method or preset 'nosuch/preset'; known: "),
            (["--set", "method=.."], "unknown method '..'"),
            (["--set", "method=fedhen"], "unknown method 'fedhen'; did you mean 'fedhenn'"),
            (["--set", "rounds"], "write KEY=VALUE"),
            (["--set", "="], "--set =: write KEY=VALUE"),
            (["--set", "method="], "--set method=: there is no value; write KEY=VALUE, or leave the key out"),
            (["--set", 'head=""'], "there is no value"),
            (["--set", "rounds=1", "--set", "rounds=2"], "--set rounds=2: rounds is set twice, first to 1: remove"),
            (["--set", "batch-size=1", "--set", "batch_size=1"], "batch-size is set twice"),
            (["--set", "seed=1", "--seed", "1"], "--seed 1 and --set seed set the same key: give only one of them"),
            (["--set", "out=one", "--out", "other"], "--out other and --set out set the same key"),
            (["fedavg", "--set", "preset=fedprox/digits"], "fedavg is a preset, and --set preset names another"),
            (["--set", "resume=true"], "--set resume is not possible: use --resume DIR"),
            (["--out", ""], "'' is not the name of a file or folder"),
            (["--data", ""], "'' is not the name of a file or folder"),
            (["--resume", ""], "'' is not the name of a file or folder"),
            (["--set", f"alpha={10**400}"], "must be a number"),
            (["--set", f"method=0x{'f' * 5000}"], "unknown method '0xfff"),
            (["--set", f"seed={'9' * 5000}"], "must be a whole number"),
            (["--set", f"head={'[' * 10000}"], "head"),
            (["--set", "classes-per-client=11"], "11"),
            (["--set", "head=nonsense"], "nonsense"),
            (["fedavg/digits", "--set", "architectures=cnn-family"], "needs equal architectures"),
            (
                ["fedavg/digits", "--set", "optimizer=adam", "--set", "momentum=0.5"],
                "momentum has no effect with optimizer = adam: set optimizer = sgd, or leave momentum out",
            ),
            (["--engine", "rai"], "unknown engine 'rai'; did you mean 'ray'"),
            (["--resume", "nothing"], "nothing contains no run to resume"),
            (["fedavg/digits", "--resume", "nothing"], "leave out CONFIG and --out"),
            (["--seed", "-1"], "seed = -1"),
            (["--set", "dataset=mnist", "--data", "nowhere"], "nowhere"),
        ],
    )
    def test_messages(
        self, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
        assert message in refused("run", *arguments)

    @pytest.mark.parametrize("engine", ["local", "ray"])
    def test_a_folder_that_holds_a_run(self, engine: str) -> None:
        assert fedhet_command("run", *QUICK, "--out", "here").exit_code == 0
        history = Path("here/history.jsonl").read_bytes()
        assert "already contains a run" in refused("run", *QUICK, "--out", "here", "--engine", engine)
        assert Path("here/history.jsonl").read_bytes() == history

    @pytest.mark.parametrize("command", [["run", *QUICK], ["compare", "local", "fedavg"]])
    @pytest.mark.parametrize("place", ["file", "file/below", "x" * 300, "closed/below"])
    def test_a_place_that_cannot_be_written_to(
        self, place: str, command: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("file").touch()
        Path("closed").mkdir()
        allowed = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and allowed(path, mode))
        stderr = refused(*command, "--out", place)
        assert f"{place} cannot be written to (" in stderr
        assert stderr.endswith("): choose another folder\n")

    def test_a_read_only_disk_is_refused_before_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def closed(path: Path, *mode: object, **options: object) -> None:
            raise OSError(30, os.strerror(30), str(path))

        monkeypatch.setattr(Path, "mkdir", closed)
        assert "here cannot be the directory of a run: Read-only file system" in refused("run", *QUICK, "--out", "here")

    def test_of_other_commands(self) -> None:
        for command in (["report", ""], ["report", "one", "two", "--out", ""], ["clean", "--state-dir", ""]):
            assert "'' is not the name of a file or folder" in refused(*command)
        assert "'' is not the name of a file or folder" in refused("compare", "local", "--out", "")
        assert ", ".join(sorted(KINDS)) in refused("recommend", "--allow", "nothing")
        assert "rounds is set twice" in refused("compare", "a=local,rounds=1,rounds=2")
        assert "is given twice" in refused("compare", "local", "--tune", "alpha=.1", "--tune", "alpha=.2")
        assert "no such folder" in refused("report", "nothing")
        assert "unknown method 'fedavgg'" in refused("compare", "fedavgg")
        assert "write whole numbers" in refused("compare", "fedavg", "--seeds", "0;1")
        for setting in ("learning-rate", "learning-rate=", "learning-rate=.1,,.2"):
            assert "write KEY=V1,V2" in refused("compare", "fedavg", "--tune", setting)
        assert "are used for tuning and reported" in refused(
            "compare", "local", "--tune", "learning-rate=.1", "--tune-seeds", "0"
        )
        assert "budget = x: write a number above 0" in refused("recommend", "--budget", "x")
        assert "no effect without --tune" in refused("compare", "local", "--tune-runs", "3")
        assert "baseline local is not among" in refused("compare", "fedavg", "--baseline", "local")
        assert "Usage" in refused("frobnicate")


class TestOtherCommands:
    def test_results_of_a_deployment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedhet.engines.running.run", lambda *config, **options: RunResult(Path("there"), {}))
        said = fedhet_command("run", *QUICK, "--engine", "hospital", "--out", "there").stdout
        assert said.count(f"{Path.cwd() / 'there'} on the server's machine") == 2
        assert not Path("there").exists()

    def test_list_names_everything(self) -> None:
        listed = fedhet_command("list").stdout
        names = [*registry.methods(), *models.names(), *data.names(), *data.partitions()]
        assert all(name in listed for name in [*names, *configuration.presets()])

    @pytest.mark.parametrize("asked", ["list", "keys"])
    def test_lines_fit_the_terminal(self, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
        wide = fedhet_command(asked).stdout
        monkeypatch.setenv("COLUMNS", "80")
        narrow = fedhet_command(asked).stdout
        assert narrow.split() == wide.split()
        assert max(map(len, narrow.splitlines())) <= 80

    def test_keys_shows_every_key(self) -> None:
        shown = fedhet_command("keys").stdout
        keys, *_ = zip(*configuration.keys(), strict=True)
        assert [line.split()[0] for line in shown.splitlines() if re.match(r"  \S", line)] == sorted(
            keys, key=lambda key: shown.index(f"\n  {key} ")
        )

    def test_keys_by_method_and_word(self) -> None:
        shown = fedhet_command("keys", "fedhenn").stdout
        assert len(shown.splitlines()) <= 50
        assert max(map(len, shown.splitlines())) <= 110
        assert "  fedhenn.eta0 = -1.0  (number)" in shown
        assert "fedavg has no keys of its own" in fedhet_command("keys", "fedavg").stdout
        found = fedhet_command("keys", "BATCH").stdout
        assert "  batch-size = 32" in found
        assert "  augment" in found
        assert "  learning-rate" not in found
        missing = fedhet_command("keys", "lerning-rate")
        assert missing.exit_code == 2
        assert "did you mean 'learning-rate'" in missing.stderr

    @pytest.mark.parametrize(
        ("typed", "offered"),
        [
            ("fedhet run fedm", {"fedma", "fedma/digits", "fedmd"}),
            ("fedhet compare local fedp", {"fedproto", "fedprox"}),
            ("fedhet keys fedhen", {"fedhenn"}),
            ("fedhet run --set fedhenn.rad-", {"fedhenn.rad-size=", "fedhenn.rad-source="}),
        ],
    )
    def test_a_shell_completes_names_and_keys(self, typed: str, offered: set[str]) -> None:
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_FEDHET_COMPLETE": "complete_bash"}
        result = CliRunner().invoke(cli.app, [], prog_name="fedhet", env=words)
        assert offered <= {*result.stdout.split()}
        assert all(name.startswith(typed.split()[-1]) for name in result.stdout.split())

    @pytest.mark.parametrize(
        "words", [["keys"], pytest.param(["run", *QUICK, "--out", "unread"], marks=pytest.mark.slow)]
    )
    def test_a_closed_output_ends_a_command(self, words: list[str]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        code = "from fedhet.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code, *words], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, "")
        assert not Path("unread").exists()

    @pytest.mark.parametrize("words", [["list"], ["keys"]])
    def test_a_full_disk_behind_the_output_is_named(self, words: list[str]) -> None:
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-c", "from fedhet.cli import main; main()", *words]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (1, "fedhet: OSError: No space left on device\n")

    def test_help_list_and_keys_import_neither_torch_nor_flower(self) -> None:
        code = (
            "import psutil, sys, fedhet.cli; assert not {'torch', 'flwr', 'rich.table'} & sys.modules.keys()\n"
            "fedhet.cli.list_names(); fedhet.cli.keys(); assert not {'torch', 'flwr', 'ray'} & sys.modules.keys()\n"
            "used = psutil.Process(); assert sum(used.cpu_times()[:2]) < 1 and used.memory_info().rss < 150e6"
        )
        root = str(Path(fedhet.__file__).parent.parent)
        subprocess.run([sys.executable, "-c", code], check=True, cwd=root, stdout=subprocess.DEVNULL)


def test_the_package_is_the_command_too() -> None:
    said = subprocess.run([sys.executable, "-m", "fedhet", "--help"], check=True, capture_output=True, text=True).stdout
    assert "Usage: fedhet" in said


def test_clean_removes_old_runs(tmp_path: Path) -> None:
    old, young = tmp_path / "old" / "clients" / "0", tmp_path / "young" / "clients" / "0"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "1.safetensors").touch()
    os.utime(old / "1.safetensors", (0, 0))
    done = fedhet_command("clean", "--days", "2", "--state-dir", str(tmp_path))
    assert (done.exit_code, done.output.split()) == (0, ["removed", str(tmp_path / "old")])
    assert [path.name for path in tmp_path.iterdir()] == ["young"]


def test_all_that_a_node_wrote_is_removed_but_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = ["state/account.json", "state/audit.jsonl", "state/nodes/north.json"]
    names = ["state/run/clients/0", "state/cache/folder/images", "state/nodes/north.reply", "flower/apps/app"]
    for name in (*kept, *names, "cache/fedhet/folder/images"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    done = fedhet_command("clean", "--all", "--state-dir", str(tmp_path / "state"))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == kept
    assert "remove them by hand, but only with the images" in done.stdout


@pytest.mark.usefixtures("home")
def test_what_left_a_node() -> None:
    line = {"time": "2026-11-28T10:00:00+00:00", "client": "north", "run": "7", "flower-run": 8, "app": "9"}
    answers = [{"sent": {"weights": 10}, "epsilon": 1.0}, {"sent": {"weights": 20}, "epsilon": 2.0}, {"refused": "no"}]
    Path("audit.jsonl").write_text("".join(json.dumps(line | answer) + "\n" for answer in answers))
    heading, total = fedhet_command("node", "log", "--since", "2026-11-27", "--state-dir", ".").stdout.splitlines()
    assert heading == "client north, run 7 (Flower's 8), app 9"
    assert total.endswith(
        "3 messages, of which 1 were refused; sent weights (30 bytes); epsilon 2 over all runs of the node"
    )
    assert (
        "nothing since 2026-11-30 00:00"
        in fedhet_command("node", "log", "--since", "2026-11-30", "--state-dir", ".").stdout
    )
    assert "write today, yesterday or a date" in refused("node", "log", "--since", "Monday")
    assert "has no audit.jsonl" in refused("node", "log"), "the default folder is not this node's"


def test_evaluate_and_describe(tmp_path):
    settings = ["--set", "clients=2", "--set", "rounds=1", "--set", "report=false"]
    assert fedhet_command("run", "local", *settings, "--out", str(tmp_path / "run")).exit_code == 0
    evaluated = fedhet_command("evaluate", str(tmp_path / "run"), "--set", "metric=macro-f1")
    assert evaluated.exit_code == 0, evaluated.output
    assert (tmp_path / "run/evaluation.html").is_file()
    assert "run: macro-f1 in evaluation.html" in evaluated.output
    for page in (True, False):
        folder = tmp_path / f"data-{page}"
        report = f"report={page}".lower()
        described = fedhet_command("describe", "fedavg", *settings[:2], "--set", report, "--out", str(folder))
        assert described.exit_code == 0, described.output
        assert "1x8x8" in described.output
        assert ("report.html" in described.output) == page == (folder / "report.html").is_file()


def test_results_of_a_run_on_this_machine_are_in_its_folder():
    assert "has its files in its folder" in refused("results", "runs/try", "--engine", "local")


def test_a_small_folder_is_described_whole(tmp_path):
    for label, count in {"cat": 6, "dog": 1}.items():
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / "images" / label / f"{number}.png")
    settings = ["--set", "dataset=folder", "--data", str(tmp_path / "images"), "--out", str(tmp_path / "run")]
    described = fedhet_command("describe", *settings)
    assert described.exit_code == 0, described.output
    whole = json.loads((tmp_path / "run/summary.json").read_text())["data"]["all"]
    assert whole["train"] + whole["test"] == 7
