"""Engines that use Flower's runtime: a simulation on Ray, or an existing SuperLink.

A run is started by the `flwr` command, with a Flower app that contains a copy of the installed fedhet, so that server
and clients run the same code. For a simulation, a SuperLink is started and ended with the run.
"""

import contextlib
import csv
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import tomli_w
import torch

from fedhet.config import configuration
from fedhet.config.toml import load, nest, to_toml
from fedhet.engines import superlink
from fedhet.errors import ConfigError, FedhetError, nearest
from fedhet.flower.insides import check_cluster
from fedhet.methods import registry
from fedhet.methods.method import ABSENT
from fedhet.methods.options import LEAST_SHARE, Config
from fedhet.results.history import read_clients, read_history
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.results.state import State
from fedhet.utils.files import expanded
from fedhet.utils.machine import cores, device_of, ended_by_signals, runs_at_once
from fedhet.utils.statistics import ClientRow, client_order
from fedhet.utils.text import __version__, log

PENDING = 60.0  # seconds after which a warning is logged if the SuperLink has not started a run


def run_on_flower(config: Config, folder: Path, *, resume: bool, observers: Sequence[Observer] = ()) -> None:
    """Run a configuration through `flwr run`; raises a FedhetError with the reason if the run failed.

    The engine is `ray`, for a simulation on this machine, or the name of a SuperLink connection in Flower's config.
    `folder` is the run directory on the server's machine; with `resume`, the run in it is continued. `observers` are
    notified of every round if this machine can read the folder, and otherwise receive the server's lines about rounds.
    """
    simulated = config.engine == superlink.SIMULATION
    if config.method_name not in registry.installed_methods():
        raise ConfigError(
            f"method {config.method_name!r} is registered in this process only, and engine = {config.engine!r} uses "
            f"other processes: install it with an entry point of the group {registry.GROUP}, or write a Flower app "
            "that passes it to make_client_app and make_server_app"
        )
    if simulated and " " in sys.executable:
        raise ConfigError(
            f"Ray cannot start {sys.executable}, since its path has a space: set engine = 'local' or use another path"
        )
    if not simulated:
        check_connection(config.engine)
    federation = _federation(config) if simulated else []
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="fedhet-") as temporary, ExitStack() as stack:
        work = Path(temporary)
        run_config = work / "run.toml"
        run_config.write_text(to_toml(_run_config(config, folder, resume, simulated)), encoding="utf-8")
        words = ["flwr", "run", str(make_app(work / "app")), config.engine, "--stream", "--run-config", str(run_config)]
        # Flower may start a SuperLink of its own that stays, so its folder must stay and hold no code.
        place, environment = superlink.flwr_home(), superlink.environment_of_commands()
        if simulated:
            home, place = work / "flower", work / "empty"
            environment |= {"FLWR_HOME": str(home), "OMP_NUM_THREADS": str(config.threads_per_client)}
            environment.setdefault("RAY_worker_register_timeout_seconds", "40")
            environment.setdefault("RAY_ADDRESS", "local")  # else Ray joins whatever cluster it finds on this machine
            stack.enter_context(superlink.superlink(home, place, environment, work / "superlink.log"))
        run = RunInfo(config.method_name, registry.traits(config), State())
        watch = _Watch(run, config.rounds + bool(config.closing_epochs), folder, observers)
        try:
            _follow([*words, *federation], place, environment, config.engine, work / "run.log", watch)
        except BaseException as error:  # Ctrl-C and SIGTERM among them
            watch.end(error)
            raise
        watch.end()


def _follow(
    words: Sequence[str], place: Path, environment: Mapping[str, str], engine: str, output: Path, watch: "_Watch"
) -> None:
    def ask(*words: str) -> str:
        options: Any = {"cwd": place, "env": environment, "capture_output": True, "text": True, "timeout": 30}
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run([superlink.command("flwr"), *words], check=False, **options).stdout
        return ""

    def status() -> tuple[str, str]:
        run = superlink.started_run(output)
        return superlink.status_of_run(ask("list", "--run-id", run, engine, "--format", "json")) if run else ("", "")

    process = superlink.begin(words, place, environment, output)
    ended = details = ""

    def goes_on() -> bool:
        """Return whether the run goes on; if the stream of its log has ended before, stream the log again."""
        # A proxy ends the stream when it restarts, or if there is no line for an hour.
        nonlocal process, ended, details
        patience = time.monotonic() + (0 if engine == superlink.SIMULATION else PENDING)
        while process.poll() is not None:
            ended, details = status()
            if not ended or ended.startswith("finished") or (ended == "unknown" and time.monotonic() > patience):
                return False
            time.sleep(1)
            if ended != "unknown":
                words = ["flwr", "log", superlink.started_run(output) or "", engine]
                process = superlink.begin(words, place, environment, output)
        return True

    try:
        asked = time.monotonic() + PENDING
        while goes_on():
            watch.look()
            watch.hear(superlink.printed(output))
            time.sleep(0.2)
            # Ray says this of worker processes that do not start in 40 seconds, and tries again for ever.
            if not watch.began and any("crashed during start" in line for line in superlink.printed(output)):
                reason = superlink.tail(output)
                raise FedhetError(f"Ray cannot start clients' processes: set engine = 'local', or correct:\n{reason}")
            if time.monotonic() > asked and superlink.started_run(output):
                asked = math.inf
                if status()[0] == "pending":
                    log.warning(
                        "the run is still pending: the SuperLink of the federation %r has not started the ServerApp. "
                        "See the log of flower-superlink, whose certificate must also be valid for 127.0.0.1",
                        engine,
                    )
        watch.look()
        watch.hear(superlink.printed(output))
    except BaseException:  # Ctrl-C too: the run must not go on without us
        if (run := superlink.started_run(output)) is not None:
            log.warning("stopping the run")
            ask("stop", run, engine)
        raise
    finally:
        superlink.end(process)
    warnings = (line for line in superlink.printed(output) if ABSENT in line and line.startswith("WARNING"))
    for line in dict.fromkeys(warnings):
        log.warning("%s", line.split(":", 1)[-1].strip())  # behind the level
    # Flower exits with 0 even if a run failed; its list and the run's summary tell.
    otherwise = f"the run ended as {ended}: {details}" if ended else "Flower did not start the run:"
    if not details:
        otherwise += f"\n{superlink.tail(output)}"
    watch.check(otherwise, completed=ended == "finished:completed")


class _Watch:
    """A reader of the run directory that notifies observers of new rounds."""

    def __init__(self, run: RunInfo, last: int, folder: Path, observers: Sequence[Observer]) -> None:
        self._run, self._last, self._folder, self._observers = run, last, folder, observers
        self._history, self._summary = folder / "history.jsonl", folder / "summary.json"
        self._size, self._seen = -1, -1  # bytes and rounds of the history; -1 before this run writes it
        self._heard = 0  # lines of the server's log
        self._earlier = self._history.stat().st_ino if self._history.is_file() else None
        self._earlier_summary = self._summary.read_bytes() if self._summary.is_file() else b"{}"

    @property
    def began(self) -> bool:
        return self._history.is_file() and self._history.stat().st_size > 0

    def look(self) -> None:
        """Notify observers of the rounds added to `history.jsonl` since the last call."""
        if not self._observers or not self._history.is_file():
            return
        status = self._history.stat()
        if status.st_size == self._size or status.st_ino == self._earlier:
            return  # nothing new, or still the file of the run to be resumed
        if not self._history.read_bytes().endswith(b"\n"):
            return  # being written
        self._size, rows = status.st_size, read_history(self._folder)
        if self._seen < 0:
            self._seen = len(rows) if self._earlier else 0
            self._run = dataclasses.replace(self._run, metric=metric_of(self._folder))
            first = max((row["round"] for row in rows[: self._seen]), default=0) + 1
            for observer in self._observers:
                observer.started(self._run, first, self._last)
        for row in rows[self._seen :]:
            clients = [client_row for client_row in read_clients(self._folder) if client_row.round == row["round"]]
            report = RoundReport(row, sorted(clients, key=lambda client_row: client_order(client_row.client)))
            for observer in self._observers:
                observer.round(self._run, report)
        self._seen = len(rows)

    def hear(self, log: Sequence[str]) -> None:
        """Notify observers of the rounds in the server's log, if this machine cannot read the run directory."""
        # A log that is streamed again begins anew.
        rounds = [] if self.began else [*dict.fromkeys(line for line in log if re.match(r"round \d+/\d+: ", line))]
        for line, observer in product(rounds[self._heard :], self._observers):
            observer.heard(line)
        self._heard = max(self._heard, len(rounds))

    def check(self, otherwise: str, *, completed: bool) -> None:
        """Raise a FedhetError if the run is not `completed`, with the error in `summary.json` or else `otherwise`."""
        found = self._summary.read_bytes() if self._summary.is_file() else self._earlier_summary
        summary = {} if found == self._earlier_summary else json.loads(found)
        if summary.get("status", "completed") != "completed" or not completed:
            begun = (self._folder / "config.toml").is_file()
            way_on = f"\ncontinue with: fedhet run --resume {self._folder}" if begun else ""
            raise FedhetError(f"the run in {self._folder} was not completed: {summary.get('error', otherwise)}{way_on}")

    def end(self, error: BaseException | None = None) -> None:
        for observer in self._observers if self._seen >= 0 else ():
            observer.failed(self._run, error) if error else observer.finished(self._run)


def metric_of(folder: Path) -> str:
    """Return the name of a run's metric, which `clients.csv` in its `folder` has in place of `accuracy`."""
    names = [column.name for column in dataclasses.fields(ClientRow)]
    with (folder / "clients.csv").open(encoding="utf-8", newline="") as lines:
        return next(csv.reader(lines))[names.index("accuracy")]


def check_connection(engine: str) -> None:
    """Check that Flower's config has a SuperLink connection of the name `engine`; raise a ConfigError otherwise."""
    path = superlink.flwr_home() / "config.toml"
    table = load(path).get("superlink", {}) if path.is_file() else {}
    connections = [name for name, value in table.items() if isinstance(value, Mapping)]
    if engine not in connections:
        raise ConfigError(nearest("engine", engine, ["local", superlink.SIMULATION, *connections]))


def _run_config(config: Config, folder: Path, resume: bool, simulated: bool) -> dict[str, Any]:
    settings = config.flat() | {"preset": "", "out": str(folder), "resume": resume}
    if config.method_name not in registry.own_methods():  # whose keys Flower's table cannot declare
        method_keys = {key: settings.pop(key) for key in list(settings) if key.startswith(f"{config.family}.")}
        settings[configuration.EXTRA] = to_toml(method_keys)
    if simulated:
        settings["state-dir"] = str(expanded(config.state_dir).resolve()) if config.state_dir else str(folder / "state")
        settings["data"] = str(expanded(config.data).resolve()) if config.data else ""
        return settings
    del settings["state-dir"]  # a node's own
    return settings if "clients" in config.chosen else {k: v for k, v in settings.items() if k != "clients"}


def _federation(config: Config) -> list[str]:
    """Return options of `flwr run` for a simulation: the number of clients, and the CPUs and GPU share of each."""
    check_cluster()
    device = device_of(config.device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    cpus, share = client_resources(
        config, cores(), psutil.virtual_memory().available, gpus, runs_at_once(device) if gpus else 0
    )
    if config.resources[1] and not gpus:
        raise ConfigError(
            f"client-resources = {config.client_resources!r}, but clients train on no GPU: set the GPU share to 0"
        )
    if cpus > cores() and "RAY_ADDRESS" not in os.environ:
        raise ConfigError(
            f"a client needs {cpus} CPUs, but this machine has {cores()}: lower client-resources or threads-per-client"
        )
    return [
        "--federation-config",
        f"num-supernodes={config.clients} client-resources-num-cpus={cpus} client-resources-num-gpus={share:g}",
    ]


def client_resources(config: Config, cores: int, memory: int, gpus: int, on_gpu: int) -> tuple[int, float]:
    """Return the number of CPUs and the share of a GPU (0 to 1) for each simulated client.

    They are the values of `client-resources`; a value of 0 is replaced by an equal share of the machine, which has
    `cores` CPU cores, `memory` bytes of free memory, and `gpus` GPUs with memory for `on_gpu` clients each.
    """
    (cpus, share), threads = config.resources, config.threads_per_client
    room = memory // 10**9  # torch, Flower and fedhet take a gigabyte for each client
    at_once = max(1, min(config.clients, cores // (cpus or threads), room))
    if gpus:
        at_once = min(at_once, gpus * (int(1 / share) if share else on_gpu))
        share = share or max(LEAST_SHARE, 1000 // math.ceil(at_once / gpus) / 1000)
    return cpus or max(threads, cores // at_once if at_once < config.clients else threads), share


def app_table() -> str:
    """Return the config table of a Flower app, with fedhet's keys, as TOML; all but `preset` are `""` (not set)."""
    keys = [*(key for key, *_ in configuration.keys(outside=False)), configuration.EXTRA]
    keys.sort(key=lambda key: key if "." in key else "")
    declared = {"preset": configuration.DEFAULT_PRESET, **dict.fromkeys(keys, "")}
    return tomli_w.dumps(nest({f"tool.flwr.app.config.{key}": value for key, value in declared.items()}))


def make_app(app: Path, server: str = "fedhet.server.app:app") -> Path:
    """Write a Flower app with a copy of the installed fedhet into the folder `app`, and return the folder.

    `server` is where its ServerApp is imported from.
    """
    package = Path(__file__).resolve().parents[1]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, app / "fedhet", ignore=ignored)
    if not (package / "run_configs").is_dir():  # a checkout, in which these folders are beside the package
        for name in ("strategies", "client_apps", "run_configs"):
            shutil.copytree(package.parent / name, app / name, ignore=ignored)
    project = {"name": "fedhet", "version": __version__, "license": "Apache-2.0"}
    project["description"] = "A copy of fedhet, made for one run"
    components = {"serverapp": server, "clientapp": "fedhet.client.app:app"}
    table = {"project": project, "tool": {"flwr": {"app": {"publisher": "fedhet", "components": components}}}}
    (app / "pyproject.toml").write_text(f"{tomli_w.dumps(table)}\n{app_table()}", encoding="utf-8")
    return app
