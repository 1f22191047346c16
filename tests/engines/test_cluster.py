"""The walk of fedhet/engines/README.md: a Ray cluster of two machines, here two nodes on one."""

import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fedhet
from fedhet.flower.commands import _free_port, end, environment_of_commands

ROOT = Path(fedhet.__file__).resolve().parent.parent
PAGE = "fedhet/engines/README.md"
SMALL = {"clients": 4, "rounds": 3, "closing-epochs": 0}
PATIENCE = 300.0
"""Seconds for anything to happen, on a machine that has other things to do."""


@dataclass
class Cluster:
    """Two Ray nodes, each with a home of its own.

    Attributes:
        work: where everything lies; machine n's home is `home-n` in it.
        port: of the first node.
        lines: the page's commands, by how they begin.
        nodes: the processes that started the nodes, and have all of a node's as their children.
        runs: the processes of runs.
    """

    work: Path
    port: int
    lines: dict[str, list[str]]
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    runs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, line: str, machine: int, log: str, *further: str) -> subprocess.Popen[bytes]:
        """Start a command of the page, with this cluster's address and folder in place of the page's."""
        line = line.replace("192.0.2.1", "127.0.0.1").replace("6379", str(self.port))
        home = self.work / f"home-{machine}"
        home.mkdir(exist_ok=True)
        environment = environment_of_commands() | {
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "RAY_TMPDIR": str(self.work),  # else other Rays of this machine would find this one
            "PYTHONPATH": str(ROOT),
        }
        with (self.work / log).open("wb") as output:
            return subprocess.Popen(
                ["env", *shlex.split(line.replace("/shared", str(self.work))), *further],
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def join(self) -> None:
        """Start the next node, with one core."""
        number = len(self.nodes)
        further = ["--num-cpus", "1", "--block", *(["--include-dashboard", "false"] if number == 0 else [])]
        process = self.start(self.lines["ray start"][number], number, f"ray-{number}.log", *further)
        self.nodes.append(process)
        until(lambda: "Ray runtime started" in (self.work / f"ray-{number}.log").read_text(), process)

    def run(self, out: str, **settings: object) -> tuple[subprocess.Popen[bytes], Path]:
        """Start the page's run, at reduced length, in another folder."""
        (line,) = self.lines["fedhet run"]
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self.runs.append(self.start(line.replace("/first", f"/{out}"), 0, f"{out}.log", *words))
        return self.runs[-1], self.work / out


def until(happened: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    """Wait for what must happen while a process is alive."""
    patience = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < patience, "it did not happen"
        time.sleep(0.3)


@pytest.fixture(scope="module")
def cluster(printed: Callable[[str, str], list[str]]) -> Iterator[Cluster]:
    work = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets are short
    cluster = Cluster(work, _free_port(), {word: printed(PAGE, word) for word in ("ray start", "fedhet run")})
    try:
        cluster.join()
        cluster.join()
        yield cluster
    finally:
        for process in (*cluster.runs, *reversed(cluster.nodes)):
            end(process)
        shutil.rmtree(work, ignore_errors=True)


@pytest.mark.slow
def test_a_machine_without_the_data_refuses_its_clients(cluster: Cluster, stand_ins: str) -> None:
    """By its name and the place where it looked; the first machine has the data in its cache."""
    shutil.copytree(stand_ins, cluster.work / "home-0" / "cache" / "fedhet" / "MNIST" / "raw")
    settings = {"rounds": 1, "local-epochs": 3, "dataset": "mnist", "public-samples": 0, "partition": "iid"}
    run, _ = cluster.run("without", **{**SMALL, **settings, "min-clients": 4})
    assert run.wait(PATIENCE) == 1
    lacking = cluster.work / "home-1" / "cache" / "fedhet"
    reason = f"on machine {platform.node()}: MNIST is not in {lacking}, and nodes download nothing"
    assert reason in (cluster.work / "without.log").read_text()
