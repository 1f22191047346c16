"""The walk of run_configs/deployment/README.md on one machine, by its own commands; nodes that come and go."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

import fedhet
from fedhet.config import configuration
from fedhet.config.toml import to_toml
from fedhet.engines.running import run_locally
from fedhet.engines.superlink import _free_port, command, end, environment_of_commands
from fedhet.results.history import read_history
from fedhet.testing import Tampering, at, raising

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("deployment")]

ROOT = Path(fedhet.__file__).resolve().parent.parent
PAGE = "run_configs/deployment/README.md"
SETTINGS: dict[str, Any] = {
    "preset": "",
    "method": "lg-fedavg",
    "architectures": "cnn-2-2,cnn-3-2",
    "rounds": 6,
    "samples-per-client": 30,
    "learning-rate": 0.1,
    "clients": 3,
    "wait-for-clients": 90.0,
    "min-clients": 2,
    "timeout": 240.0,
}
PATIENCE = 300.0
"""Seconds for anything to happen, on a machine that has other things to do."""
TRAIN = "Receiving: train message"
UNSHARED = "unshare", "--map-root-user", "--mount"
HOSPITALS = "north", "south", "west", "east"
"""Folders of the nodes; the page registers the first three."""


@dataclass
class Federation:
    """A SuperLink with certificates and keys, and how nodes are started.

    Attributes:
        work: where everything lies; a node's home is its hospital's folder.
        port: of the SuperLink.
        environment: of all commands.
        printed: the page's commands that begin with a word.
        processes: those that were started and are to end, by name.
    """

    work: Path
    port: int
    environment: dict[str, str]
    printed: Callable[[str, str], list[str]]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def here(self, text: str, home: Path | None = None) -> str:
        """Something that the page prints, with this machine's port and folders, and nothing else."""
        places = {"9092": self.port, "9093": self.port, "/etc/fedhet": self.work, "/srv/fedhet": self.work}
        places |= {"/data/chest": home / "chest", "/var/lib/fedhet": home / "state"} if home else {}
        for printed, place in places.items():
            text = text.replace(printed, str(place))
        return text

    def do(self, line: str, folder: Path | None = None) -> None:
        """Do what a line of the page says."""
        words = self.knowing("bash", "-c", self.here(line))
        done = subprocess.run(
            words, cwd=folder or self.work, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def knowing(self, *words: str) -> list[str]:
        """Words of a command that finds this machine under the page's name for the coordinator."""
        (self.work / "hosts").write_text("127.0.0.1 localhost flower.example.org\n")
        mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return [*UNSHARED, "sh", "-c", mount, str(self.work / "hosts"), *words]

    def start(self, name: str, /, *words: str, home: Path | None = None, **own: str) -> subprocess.Popen[bytes]:
        """Start a process, which writes to the log of its name."""
        own |= {"HOME": str(home), "FLWR_HOME": str(home / ".flwr")} if home else {}
        with self.log(name).open("ab") as output:
            process = subprocess.Popen(
                self.knowing(*words),
                cwd=home or self.work,
                env=self.environment | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self.work / f"{name}.log"

    def superlink(self) -> None:
        """Start the SuperLink, with all that it knew before."""
        words = shlex.split(self.here(self.printed(PAGE, "flower-superlink")[0]))
        process, patience = self.start("superlink", *words), time.monotonic() + PATIENCE
        asked = self.knowing(command("flwr"), "list", "hospitals")
        while subprocess.run(asked, cwd=self.work, env=self.environment, capture_output=True, check=False).returncode:
            assert process.poll() is None
            assert time.monotonic() < patience
            time.sleep(1)

    def node(self, number: int, *, printed: bool = False) -> None:
        """Start a SuperNode as printed; otherwise without the policy, under its number, as in a simulation."""
        home = self.work / HOSPITALS[number]
        line = self.here(self.printed(PAGE, "flower-supernode")[0], home)
        if not printed:
            line = line.replace(" allow='prototypes,metrics'", f" partition-id={number} num-partitions=3")
        name = HOSPITALS[number] if printed else str(number)
        line += f" --port {_free_port()}"  # one for each node of a machine
        self.start(f"node-{number}", "bash", "-c", f"exec {line}", home=home, name=name)

    def kill(self, name: str, part: str = "") -> None:
        """Kill a process with all that it started, or those of them that have `part` in their command line."""
        root = psutil.Process(self.processes[name].pid)
        living = [each for each in (root, *root.children(recursive=True)) if each.status() != psutil.STATUS_ZOMBIE]
        hit = [each for each in living if part in " ".join(each.cmdline())]
        assert hit
        for each in hit:
            each.send_signal(signal.SIGKILL)
        if not part:
            self.processes.pop(name).wait()

    def trained(self, number: int) -> int:
        """How often a node was asked to train."""
        return self.log(f"node-{number}").read_text().count(TRAIN)

    def run(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `fedhet run`."""
        return self.start("run", sys.executable, "-m", "fedhet", "run", *words)


def until(happened: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait; a process that must be alive meanwhile may be given."""
    patience = time.monotonic() + PATIENCE
    while not happened():
        assert process is None or process.poll() is None, "it ended"
        assert time.monotonic() < patience, "it did not happen"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def federation(
    tmp_path_factory: pytest.TempPathFactory, printed: Callable[[str, str], list[str]]
) -> Iterator[Federation]:
    if shutil.which("unshare") is None or subprocess.run([*UNSHARED, "true"], check=False).returncode:
        pytest.skip("another machine's name can be given to this one only where unshare works")
    work = tmp_path_factory.mktemp("deployment")
    port, home = _free_port(), work / "flower"
    environment = environment_of_commands() | {"FLWR_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    federation = Federation(work, port, environment, printed)
    for line in printed(PAGE, "(openssl|echo)"):
        federation.do(line)
    home.mkdir()
    (connection,) = re.findall(r"```toml\n(.*?)```", (ROOT / PAGE).read_text(), re.DOTALL)
    (home / "config.toml").write_text(federation.here(connection))
    (generate,) = printed(PAGE, "ssh-keygen")
    for name in HOSPITALS:
        (work / name).mkdir()
        shutil.copy(work / "ca.crt", work / name)
        federation.do(generate, work / name)
    try:
        federation.superlink()
        for line in printed(PAGE, "flwr supernode register"):
            federation.do(line)
        for number in range(4):
            federation.node(number)
        yield federation
    finally:
        for process in federation.processes.values():
            end(process)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The history but for what must differ: seconds, the words of failures, bytes of handshakes that are repeated."""
    apart = ("timing", "failures", "bytes_up", "bytes_down")
    return [{key: value for key, value in row.items() if key not in apart} for row in read_history(folder)]


def to_four_digits(value: Any) -> Any:
    """A history with the metrics of nodes elsewhere: four significant digits."""
    if isinstance(value, dict):
        return {key: to_four_digits(each) for key, each in value.items()}
    if isinstance(value, list):
        return [to_four_digits(each) for each in value]
    return pytest.approx(value, rel=1e-3, abs=1e-3) if isinstance(value, float) else value


def test_a_run_survives_node_server_and_superlink(federation: Federation, tmp_path: Path) -> None:
    """It ends as a run on one machine in which that client missed those rounds; an unregistered node stays out."""
    out, settings = tmp_path / "run", tmp_path / "settings.toml"
    settings.write_text(to_toml(SETTINGS))

    run = federation.run(str(settings), "--engine", "hospitals", "--out", str(out))
    until(lambda: federation.trained(1) == 2, run)
    federation.kill("node-1")

    def back() -> bool:  # as a service manager would have it: the SuperLink takes it after two missed heartbeats
        if "node-1" not in federation.processes or federation.processes["node-1"].poll() is not None:
            federation.node(1)
        return federation.trained(1) == 3

    until(back, run)
    federation.kill("superlink", "flwr-serverapp")
    assert run.wait(PATIENCE) == 1

    asked = federation.trained(0)
    run = federation.run("--resume", str(out))
    until(lambda: federation.trained(0) == asked + 2, run)
    federation.kill("superlink")
    assert run.wait(PATIENCE) == 1

    federation.superlink()
    assert federation.run("--resume", str(out)).wait(2 * PATIENCE) == 0

    missed = [row["round"] for row in read_history(out) if row["failures"]]
    assert missed in ([2], [2, 3], [2, 3, 4])
    assert {each["client"] for row in read_history(out) for each in row["failures"]} == {"1"}
    local = tmp_path / "local"
    absent = Tampering(before=raising(at(missed, "1"), RuntimeError("is killed")))
    run_locally(configuration.resolve(SETTINGS), local, app=absent)
    assert rows_of(out) == to_four_digits(rows_of(local))
    assert federation.trained(0) > 0 == federation.trained(3), "an unregistered node is given nothing"
    models = {path.stem: path.read_bytes() for path in federation.work.glob("*/state/*/models/*.safetensors")}
    assert models == {path.stem: path.read_bytes() for path in (local / "models").iterdir()}
    assert configuration.read(out / "config.toml")["engine"] == "hospitals"
    assert os.listdir(out / "checkpoint")


def test_the_check_of_a_node_passes(federation: Federation) -> None:
    home = federation.work / "north"
    for number in range(40):
        path = home / "chest" / ("ill", "healthy")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(path)
    (line,) = federation.printed(PAGE, "fedhet node check")
    line = federation.here(line, home).replace("fedhet node", f"{sys.executable} -m fedhet node", 1)
    check = federation.start("check", "bash", "-c", line, home=home)
    assert check.wait(PATIENCE) == 0, federation.log("check").read_text()
    text = federation.log("check").read_text()
    for words in ("trains on 32 of 32 examples (healthy: 16, ill: 16)", "certificate: valid from", "clock: "):
        assert words in text, text


def test_the_page_ends_in_a_finished_run(federation: Federation) -> None:
    def models() -> set[Path]:
        return set(federation.work.glob("*/state/*/models/*.safetensors"))

    (line,), before = federation.printed(PAGE, "fedhet run"), models()
    for number in range(3):
        end(federation.processes[f"node-{number}"])
    run = federation.start("run", *shlex.split(federation.here(line)))

    def ended() -> bool:  # a service manager starts nodes until the SuperLink has missed their heartbeats
        for number in range(3):
            if federation.processes[f"node-{number}"].poll() is not None:
                federation.node(number, printed=True)
        return run.poll() is not None

    until(ended)
    assert run.returncode == 0, federation.log("run").read_text()
    history = read_history(federation.work / "first")
    assert [row["failures"] for row in history] == [[]] * len(history)
    assert sorted(path.stem for path in models() - before) == ["north", "south", "west"]
    assert history[-1]["trained"]["accuracy"]["mean"] > 0.5, "each node has all digits"
    assert "train (fedproto, run" in federation.log("node-0").read_text()
