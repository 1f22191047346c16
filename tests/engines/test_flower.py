"""Flower's engines: the app that is shipped, and its runs on Ray, which equal local ones."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

import fedhet
from fedhet.cli import new_project
from fedhet.config import configuration
from fedhet.config.toml import flatten, to_toml
from fedhet.engines import flower, results
from fedhet.engines.flower import make_app
from fedhet.engines.superlink import command, environment_of_commands, superlink
from fedhet.errors import ConfigError, FedhetError
from fedhet.methods import registry
from fedhet.results.observers import Observer, RunInfo
from fedhet.results.state import State
from fedhet.testing import Run

ROOT = Path(fedhet.__file__).resolve().parent.parent
METHODS = ("fedavg", "fedrep", "fedhenn", "fedma", "flha-ghn", "fedproto", "heterofl")
"""Methods that run on Ray: one for each way in which something is shared or trained."""
THREE = configuration.resolve({"clients": 3, "engine": "ray", "device": "cpu"})


@pytest.fixture
def pyproject() -> dict[str, Any]:
    path = ROOT / "pyproject.toml"
    if not path.is_file():
        pytest.skip("fedhet is installed; only a checkout is a Flower app")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def members(fab: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(fab)).namelist())


class TestApp:
    def test_the_bundle_of_a_checkout(self, pyproject: dict[str, Any]) -> None:
        fab = build_fab_from_disk(ROOT)
        names = members(fab)
        wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fedhet").rglob("*.py")}
        for method in registry.own_methods():
            wanted.add(f"run_configs/{method}/digits.toml")
        wanted |= {
            path.relative_to(ROOT).as_posix()
            for side in ("strategies", "client_apps")
            for path in (ROOT / side).rglob("*.py")
        }
        assert wanted <= names
        assert {name.split("/")[0] for name in names} == {
            "fedhet",
            "strategies",
            "client_apps",
            "run_configs",
            "pyproject.toml",
            "README.md",
            "CHANGELOG.md",
            "LICENSE",
            ".info",
            "tests",  # pages of measurements
        }
        assert {Path(name).name for name in names if name.startswith("tests/")} == {"README.md"}

    @pytest.mark.slow
    @pytest.mark.parametrize("installed", [False, True])
    def test_the_app_of_a_run_has_the_code_that_runs(
        self, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if installed:
            package = tmp_path / "site-packages" / "fedhet"
            shutil.copytree(ROOT / "fedhet", package)
            for name in ("strategies", "client_apps", "run_configs"):
                shutil.copytree(ROOT / name, package / name, dirs_exist_ok=True)
            monkeypatch.setattr(flower, "__file__", str(package / "engines" / "flower.py"))
        app = make_app(tmp_path / "app")
        settings, warnings = load_and_validate(app / "pyproject.toml")
        assert not warnings
        assert settings["tool"]["flwr"]["app"]["config"]["preset"] == "fedhenn/digits"
        inside = "fedhet/" if installed else ""
        names = members(build_fab_from_disk(app))
        assert {f"{inside}strategies/families/classifiers.py", f"{inside}run_configs/fedavg/digits.toml"} <= names
        copied = subprocess.run(
            [sys.executable, "-c", "import fedhet.client.app, fedhet.strategies as s; print(s.__file__)"],
            cwd=app,
            env={**os.environ, "PYTHONPATH": str(app)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert copied.stdout.startswith(str(app))

    def test_the_run_config_of_a_simulation_is_complete(self, tmp_path: Path) -> None:
        for method in registry.own_methods():
            config = configuration.resolve({"preset": f"{method}/digits", "seed": 4})
            settings = flower._run_config(config, tmp_path, False, True)
            again = configuration.resolve(tomllib.loads(to_toml(settings)))
            assert settings["preset"] == ""
            assert (again.out, again.state_dir) == (str(tmp_path), str(tmp_path / "state"))
            # Settings without effect were reset where the run was started, which said so.
            assert again.replace(out="", state_dir="", remarks=config.remarks) == config

    def test_outside_methods_keys_travel_in_extra_keys(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pyproject: dict[str, Any]
    ) -> None:
        monkeypatch.setattr(registry, "_registered", {"mine": replace(registry.method("fedprox"), name="mine")})
        config = configuration.resolve({"method": "mine", "mine.mu": 0.75})
        settings = flower._run_config(config, tmp_path, False, True)
        assert settings.keys() <= flatten(pyproject["tool"]["flwr"]["app"]["config"]).keys()
        assert tomllib.loads(settings["extra-keys"]) == {"mine": {"mu": 0.75}}
        assert configuration.resolve(settings).options == config.options

    def test_remote_nodes_keep_state_dir_and_clients(self, tmp_path: Path) -> None:
        for chosen, told in (({}, False), ({"clients": 3}, True)):
            config = configuration.resolve({"preset": "fedavg/digits", "engine": "remote", **chosen})
            settings = flower._run_config(config, tmp_path, False, False)
            assert "state-dir" not in settings
            assert ("clients" in settings) == told


class TestConnections:
    @pytest.mark.parametrize(
        ("clients", "chosen", "cores", "gigabytes", "gpus", "expected"),
        [
            (3, "0,0", 8, 64, 0, (1, 0)),
            (100, "0,0", 8, 64, 0, (1, 0)),
            (100, "0,0", 8, 4.5, 0, (2, 0)),
            (100, "0,0", 8, 0.5, 0, (8, 0)),
            (5000, "0,0", 2048, 4096, 1, (102, 0.05)),
            (5000, "0,0", 16, 128, 1, (1, 0.062)),
            (5000, "0,0", 4000, 8192, 200, (1, 0.05)),
            (1, "0,0", 16, 128, 2, (1, 1)),
            (3, "0,0", 16, 128, 2, (1, 0.5)),
            (8, "0,0", 1, 128, 2, (1, 1)),
            (100, "4,0", 8, 64, 0, (4, 0)),
            (100, "4,0", 8, 64, 1, (4, 0.5)),
            (100, "0,0.25", 8, 64, 1, (2, 0.25)),
            (100, "3, 0.3", 8, 64, 2, (3, 0.3)),
        ],
    )
    def test_a_simulation_fits_cores_memory_and_gpus(
        self, clients: int, chosen: str, cores: int, gigabytes: float, gpus: int, expected: tuple[float, float]
    ) -> None:
        config = configuration.resolve({"clients": clients, "engine": "ray", "client-resources": chosen})
        assert flower.client_resources(config, cores, int(gigabytes * 10**9), gpus, min(cores, 20)) == expected

    @pytest.mark.parametrize("chosen", ["1", "1,2", "-1,0", "0.5,0", "0,0.0001", "2000,0", "0,nan", "a,b", "1,0,0"])
    def test_shares_that_no_client_can_have_are_refused(self, chosen: str) -> None:
        with pytest.raises(ConfigError, match=r"client-resources = .*: write a client's number of CPUs and its share"):
            configuration.resolve({"engine": "ray", "client-resources": chosen})

    def test_shares_reach_flower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flower, "device_of", lambda name: torch.device("cuda" if name == "auto" else "cpu"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(flower, "runs_at_once", lambda device: 4)
        monkeypatch.setattr(flower, "cores", lambda: 2)
        settings = {"clients": 3, "engine": "ray", "client-resources": "2,0.25"}
        given = "num-supernodes=3 client-resources-num-cpus=2 client-resources-num-gpus=0.25"
        assert flower._federation(configuration.resolve(settings))[1] == given
        for changed, told in (({"device": "cpu"}, "on no GPU: set"), ({"client-resources": "3,0"}, "needs 3 CPUs")):
            with pytest.raises(ConfigError, match=told):
                flower._federation(configuration.resolve(settings | changed))

    def test_unknown_engines_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLWR_HOME", str(tmp_path))
        (tmp_path / "config.toml").write_text('[superlink]\ndefault = "hospital"\n[superlink.hospital]\naddress = ""\n')
        with pytest.raises(ConfigError, match=r"'hospitall'; did you mean 'hospital'\? known: hospital, local, ray"):
            fedhet.run({"method": "fedavg"}, engine="hospitall", out=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_a_damaged_flower_config_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLWR_HOME", str(tmp_path))
        (tmp_path / "config.toml").write_text("= =")
        with pytest.raises(ConfigError, match=r"config\.toml is not a TOML file"):
            fedhet.run({"method": "fedavg"}, engine="hospital", out=tmp_path / "run")


def settings_of(method: str) -> dict[str, Any]:
    """Something small that exercises a method; mixed architectures where it takes them."""
    preset = configuration.preset_settings(f"{method}/digits")
    rounds = min(2, preset["rounds"])  # 0: as many as the method needs
    small = {"clients": 3, "rounds": rounds, "local-epochs": 2, "samples-per-client": 30, "public-samples": 64}
    own = {"fedrep.body-epochs": 1} if method == "fedrep" else {}
    return preset | {key: value for key, value in small.items() if key in preset} | own


def simulate(app: Path, environment: dict[str, str], run_config: str, federation: str) -> str:
    """Return the output of `flwr run` of an app."""
    options = ["--stream", "--run-config", run_config, "--federation-config", federation]
    arguments = [command("flwr"), "run", str(app), *options]
    home = Path(environment["FLWR_HOME"])
    done = subprocess.run(arguments, cwd=home, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def simulating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a SuperLink that simulates, the same for several runs."""
    work = tmp_path_factory.mktemp("superlink")
    environment = environment_of_commands() | {"FLWR_HOME": str(work / "flower"), "OMP_NUM_THREADS": "1"}
    environment["HOME"] = str(work)
    with superlink(work / "flower", work / "empty", environment, work / "superlink.log"):
        yield environment


@pytest.mark.long
def test_flower_runs_what_fedhet_new_writes(simulating: dict[str, str], tmp_path: Path) -> None:
    """Every run prints its rounds, and has a folder of its own in the user's home, which it prints."""
    new_project.write(tmp_path / "mine", flower=True)
    for name in ("first", "first-2"):
        printed = simulate(tmp_path / "mine", simulating, "num-server-rounds=1", flower._federation(THREE)[1])
        folder = Path(simulating["HOME"]) / ".fedhet" / "runs" / name
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
        assert f"results go to {folder}\n" in printed
        assert "round 1/1: 3 clients" in printed


FAILING = """
from flwr.app import MetricRecord, RecordDict, Message
from flwr.clientapp import ClientApp
from torch import nn

import fedhet

app = ClientApp()


@app.train()
def train(msg, context):
    raise ValueError("\\x1b[31mthe scanner\\nis broken")


@app.evaluate()
def evaluate(msg, context):
    metrics = MetricRecord({"eval_acc": 0.5, "eval_loss": 1.0, "num-examples": 4})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


app = fedhet.wrap(app, lambda: nn.Linear(2, 2))
"""


@pytest.mark.long
def test_a_client_that_raises_is_one_line(simulating: dict[str, str], tmp_path: Path) -> None:
    new_project.write(tmp_path / "mine", flower=True)
    (tmp_path / "mine" / "client_app.py").write_text(FAILING)
    server = (tmp_path / "mine" / "server_app.py").read_text()
    server = re.sub(r"strategy = .*", "strategy = FedAvg()", server).replace("import FedHeNN", "import FedAvg")
    (tmp_path / "mine" / "server_app.py").write_text(server)
    printed = simulate(tmp_path / "mine", simulating, "num-server-rounds=1", flower._federation(THREE)[1])
    log = Path(simulating["HOME"]) / ".fedhet" / "clients.log"
    reason = f"ValueError: \\x1b[31mthe scanner is broken (traceback in {log})"
    assert f"  3 clients (0, 1, 2): the client failed: {reason}" in printed
    assert printed.count("the scanner is broken") <= 3
    assert "in train" not in printed.partition("ServerApp")[0]
    assert log.read_text().count("raise ValueError") == 3


ONE_AFTER_THE_OTHER = """
import tomllib
from pathlib import Path

from flwr.serverapp import ServerApp

from fedhet.server.app import app as serve

app = ServerApp()


@app.main()
def main(grid, context):
    run_config = context.run_config
    for run in sorted(Path(context.run_config["runs"]).glob("*.toml")):
        context.run_config = tomllib.loads(run.read_text())
        try:
            serve(grid, context)
        except Exception as error:  # its directory says so
            print(run.stem, error)
    context.run_config = run_config  # Flower sends the context back, and takes flat ones only
"""


@pytest.fixture(scope="module")
def ray_runs(tmp_path_factory: pytest.TempPathFactory, simulating: dict[str, str]) -> Path:
    """A folder with a run directory for each of these methods.

    Ray and its workers take some twenty seconds to start, so all methods run in one simulation: each with the
    run config that the engine would start its own with.
    """
    folder = tmp_path_factory.mktemp("ray")
    for method in METHODS:
        config = configuration.resolve(settings_of(method) | {"engine": "ray"})
        run_config = flower._run_config(config, folder / method, False, True)
        (folder / f"{method}.toml").write_text(to_toml(run_config))
    app = make_app(folder / "app")
    (app / "one_after_the_other.py").write_text(ONE_AFTER_THE_OTHER)
    project = (app / "pyproject.toml").read_text()
    project = project.replace("fedhet.server.app:app", "one_after_the_other:app")
    (app / "pyproject.toml").write_text(
        project.replace("[tool.flwr.app.config]", '[tool.flwr.app.config]\nruns = ""', 1)
    )
    simulate(
        app,
        simulating,
        f'runs="{folder}"',
        flower._federation(config)[1],
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_ray_and_local_give_the_same_history(method: str, ray_runs: Path, tmp_path: Path) -> None:
    local = fedhet.run(settings_of(method) | {"client-batching": "off"}, out=tmp_path / "local")
    ray = ray_runs / method
    summary = json.loads((ray / "summary.json").read_text())
    assert (summary["engine"], summary["status"]) == ("ray", "completed")
    assert Run(ray).rows == Run(local.folder).rows
    assert Run(ray).models == Run(local.folder).models


@pytest.mark.slow
def test_flwr_run_of_a_checkout_gives_the_same_history(
    tmp_path: Path, pyproject: dict[str, Any], simulating: dict[str, str]
) -> None:
    settings = {"preset": "fedavg/digits", "rounds": 2, "clients": 3, "client-batching": "off"}
    local = fedhet.run(settings, out=tmp_path / "local")
    run_config = f'preset="fedavg/digits" rounds=2 clients=3 out="{tmp_path / "flwr"}"'
    output = simulate(ROOT, simulating, run_config, "num-supernodes=3 client-resources-num-cpus=1")
    assert "round 2/2" in output
    assert Run(tmp_path / "flwr").rows == Run(local.folder).rows


PRINTED = (
    "Successfully started run 7\n\x1b[93mWARNING \x1b[0m:     1 of 3 clients took no part: client 2: too few\n"
    "fedavg: 1 round in 3 s; 1 \nof 3 clients took no part: client 2: too \nfew\n"
)


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Sequence[str]]]:
    """Follows a run of which `flwr run` prints a text, and whose status is each of those given in turn."""

    def follow(
        *statuses: str, printed: str = PRINTED, observers: Sequence[Observer] = (), patience: float = 0.0
    ) -> list[Sequence[str]]:
        following = [*statuses]
        begun: list[Sequence[str]] = []

        def listed(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
            status = following.pop(0) if len(following) > 1 else following[0]
            text = json.dumps({"runs": [{"status": status, "status-details": ""}]}) if status else ""
            return subprocess.CompletedProcess((), 0, stdout=text)

        monkeypatch.setattr(flower, "PENDING", patience)
        monkeypatch.setattr(flower.superlink, "command", lambda name: sys.executable)
        monkeypatch.setattr(flower.subprocess, "run", listed)

        def begin(words: Sequence[str], place: Path, environment: object, output: Path) -> subprocess.Popen[bytes]:
            begun.append(words)
            code = f"import time; print({printed!r}, flush=True); time.sleep(0.5)"
            return subprocess.Popen([sys.executable, "-c", code], stdout=output.open("ab"))

        monkeypatch.setattr(flower.superlink, "begin", begin)
        run = RunInfo("fedavg", registry.traits(configuration.resolve({})), State())
        watch = flower._Watch(run, 1, tmp_path, observers)
        flower._follow([], tmp_path, {}, "hospitals", tmp_path / "run.log", watch)
        return begun

    return follow


def test_absent_clients_are_named_at_the_end(follow: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    follow("finished:completed")
    assert caplog.messages == ["1 of 3 clients took no part: client 2: too few"]


def test_rounds_of_a_server_elsewhere_are_told(follow: Callable[..., None], tmp_path: Path) -> None:
    heard: list[str] = []

    class Listener(Observer):
        def heard(self, line: str) -> None:
            heard.append(line)

    lines = f"{PRINTED}round 1/2: 3 clients\nround 2/2: 3 clients\n"
    follow("finished:completed", printed=lines, observers=[Listener()])
    assert heard == ["round 1/2: 3 clients", "round 2/2: 3 clients"]
    (tmp_path / "history.jsonl").write_text("{}")  # whose rounds are read from here
    follow("finished:completed", printed=lines, observers=[Listener()])
    assert len(heard) == 2


def test_a_run_whose_log_stops_is_followed_to_its_end(follow: Callable[..., list[Sequence[str]]]) -> None:
    """A proxy that restarts ends the stream of the log; meanwhile nobody answers."""
    heard: list[str] = []

    class Listener(Observer):
        def heard(self, line: str) -> None:
            heard.append(line)

    lines = f"{PRINTED}round 1/2: 3 clients\n"
    begun = follow("running", "", "", "finished:completed", printed=lines, observers=[Listener()], patience=5.0)
    assert begun == [[], ["flwr", "log", "7", "hospitals"]]
    assert heard == ["round 1/2: 3 clients"]


def test_results_arrive_from_the_servers_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "models").mkdir(parents=True)
    cut: list[int | None] = [None]

    def ran(words: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        context: Any = SimpleNamespace(run_config=tomllib.loads(words[-1]))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            results.main(cast(Any, None), context)
        return subprocess.CompletedProcess(words, 0, output.getvalue()[: cut[0]], "")

    def refused(words: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "Using SuperLink: hospitals", "403 Forbidden")

    monkeypatch.setattr(results, "check_connection", lambda engine: None)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(results.subprocess, "run", refused)
    with pytest.raises(FedhetError, match=r"(?s)nothing arrived from the run .*403 Forbidden"):
        results.fetch(str(there), "hospitals", here)
    monkeypatch.setattr(results.subprocess, "run", ran)
    with pytest.raises(FedhetError, match="has no run, or its files did not arrive"):
        results.fetch(str(there), "hospitals", here)
    for name in results.FILES:
        (there / name).write_text(f"content of {name}")
    (there / "key.pem").touch()
    for cut[0] in range(1, 100):  # the connection breaks
        with pytest.raises(FedhetError, match="arrive"):
            results.fetch(str(there), "hospitals", here)
    cut[0] = None
    results.fetch(str(there), "hospitals", here)
    sent = {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}
    assert sent == {*results.FILES}
    assert all((here / name).read_text() == f"content of {name}" for name in sent)


def test_pending_and_failed_runs_are_reported(
    follow: Callable[[str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.toml").touch()
    with pytest.raises(FedhetError) as failed:
        follow("pending", "finished:failed")
    assert caplog.messages[0].startswith(
        "the run is still pending: the SuperLink of the federation 'hospitals' has not"
    )
    assert str(failed.value).endswith(f"continue with: fedhet run --resume {tmp_path}")
    assert "\x1b" not in str(failed.value)


def test_a_ray_that_cannot_start_ends_the_run(
    follow: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FedhetError, match=r"Ray cannot start clients' processes.* engine = 'local'.*:\n.*crashed during start"
    ):
        follow("running", printed="(raylet) The process is dead, probably it crashed during start.\n")
    monkeypatch.setattr(sys, "executable", "/opt/my python/bin/python")
    with pytest.raises(ConfigError, match=r"my python/bin/python, since its path has a space"):
        flower.run_on_flower(configuration.resolve({"engine": "ray"}), tmp_path / "run", resume=False)
