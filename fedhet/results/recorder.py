"""The run directory, which is written round by round, so that an interrupted run can be resumed."""

import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from fedhet.config import toml
from fedhet.config.toml import to_toml
from fedhet.config.validation import SUPPLIED, ineffective
from fedhet.errors import ConfigError, FedhetError, in_words
from fedhet.flower import __version__ as FLOWER
from fedhet.methods import registry
from fedhet.methods.options import Config, keys_that, listed
from fedhet.results.history import read_clients, read_history, showing
from fedhet.results.observers import Observer, RoundReport, RunInfo, loggers
from fedhet.results.report import write_report
from fedhet.results.state import State
from fedhet.results.summary import summarised
from fedhet.utils import files
from fedhet.utils.machine import cores, revision, spent
from fedhet.utils.statistics import ClientRow
from fedhet.utils.text import __version__, log

S = TypeVar("S", bound=State)

EARLIER = "earlier"  # in `checkpoint/`: folder of the checkpoint before the last round, to resume from for more rounds
NAME = r"[\w-]*(?:token|passw|secret|credential|api.?key|private.?key)[\w-]*"
SECRET = re.compile(rf"({NAME}[= ]).*|(?<=://)[^/\s]+(?=@)", re.IGNORECASE | re.DOTALL)
PACKAGES = ("torch", "numpy", "scipy")


class RunDirectory(Observer):
    """Observer that writes the files of a run into `folder`, which must be usable (see `check_folder`).

    `config` is the run's configuration, and `engine` says how clients run, such as `local`. With `resume`, the run in
    the folder is continued. `supplied` has descriptions of the user's model and data by argument, such as `model`,
    `replacing` has what replaces keys (see `UserFunctions.supplied`), and `simulated` says whether
    clients run on this machine.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        engine: str,
        *,
        resume: bool = False,
        supplied: Mapping[str, str] = {},
        replacing: Collection[str] = (),
        simulated: bool = True,
    ) -> None:
        self.folder, self.config, self.engine, self.simulated = folder, config, engine, simulated
        self.started_at = time.perf_counter()
        self._before, _ = spent()
        self._ran = _ran()
        self.earlier_seconds = 0.0
        self._supplied = supplied
        self._resume = resume
        self._unchanged = True
        self._replacing = replacing
        self._texts = {"history.jsonl": b"", "clients.csv": b""}
        self._digests = dict[str, "hashlib.blake2b"]()
        with showing(folder):
            self._last = self._checkpoint() if resume else None
        if not resume:
            self._begin()
        log.info("results go to %s", folder)

    def _begin(self) -> None:
        """Remove rounds after the checkpoint from the files, and write `config.toml`; further calls have no effect."""
        if not self._unchanged:
            return
        self._unchanged = False
        if self._last and self._last.parent.name == EARLIER:
            self._last = self._last.replace(self._last.parents[1] / self._last.name)
            for path in self._checkpoints():
                if path != self._last:
                    path.unlink()
        for name, text in self._texts.items():
            files.write_text(self.folder / name, text.decode())
            self._digests[name] = _digest(text)
        if self._resume:
            for name in ("summary.json", "report.html"):
                (self.folder / name).unlink(missing_ok=True)
            self._remove_models(int(self._last.stem) if self._last else -1)
        self._write_config()

    def _write_config(self) -> None:
        config = self.config
        supplied = {part for part in SUPPLIED if part in self._replacing}
        reasons = ineffective(config, registry.traits(config), supplied)
        unused = {key for key, reason in reasons.items() if reason.of in supplied and key != "dataset"}
        flat = {key: value for key, value in config.flat().items() if key not in ("out", "resume", *unused)}
        if flat["state-dir"] == str(self.folder / "state"):
            del flat["state-dir"]
        if self._supplied and self.engine == "flwr":
            del flat["dataset"]  # a Flower app's data are its own
        if self.engine not in ("local", "ray") and "clients" not in config.chosen:
            del flat["clients"]  # the federation says how many there are, when the run is resumed too
        versions = {f"versions.{name}": number for name, number in _versions().items()}
        noted = {f"own.{name}": words for name, words in self._supplied.items()}
        noted |= {f"ran.{name}": words for name, words in self._ran.items()}
        files.write_text(self.folder / "config.toml", to_toml({**flat, **noted, **versions}))

    def reconfigure(self, config: Config) -> None:
        """Write `config`, which replaces the configuration during the run, into `config.toml`."""
        self._begin()
        self.config = config
        self._write_config()

    def resumed(self, fresh: S) -> S:
        """Return the state after the last complete round or, without one, the initial state `fresh`.

        `fresh.run` names the subfolder of `state-dir` with the state that clients keep in this run. It is set to "" (no
        subfolder), in place, if `state-dir` is the folder `state` in this directory, which no other run uses.
        """
        if self.simulated and self.config.state_dir == str(self.folder / "state"):
            fresh.run = ""
        return fresh if self._last is None else type(fresh).load(self._last)

    def started(self, run: RunInfo, first: int, last: int) -> None:
        self._begin()
        if run.own_data and self.engine == "flwr":  # the configuration alone makes other clients
            self._supplied = {"data": "of a Flower app, which continues the run with resume = true"}
            self._replacing = run.replaced
            self._write_config()
        if run.test_on not in ("", self.config.test_on):
            self.reconfigure(self.config.replace(test_on=run.test_on))

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Append the round to the files, then save the state; after a crash in between, resuming removes the round."""
        self._begin()
        number = report.row["round"]
        every = self.config.save_every
        final = report.row.get("final")
        path = self.folder / "checkpoint" / f"{number}.safetensors"
        before_last = path.with_name(f"{(run.state.stopped or self.config.rounds) - 1}{path.suffix}")
        earlier = [] if final else [old for old in self._checkpoints() if old != path]
        lines: list[Iterable[object]] = [vars(row).values() for row in report.clients]
        if not (self.folder / "clients.csv").stat().st_size:
            columns = [column.name for column in dataclasses.fields(ClientRow)]
            lines.insert(0, [run.metric if name == "accuracy" else name for name in columns])
        sizes = {name: (self.folder / name).stat().st_size for name in self._texts}
        try:
            self._append("clients.csv", files.csv_lines(lines))
            self._append("history.jsonl", json.dumps(report.row) + "\n")
            if every and number and number % every == 0 and not final:
                self._collect_models(run, number)
            if before_last in earlier:
                (path.parent / EARLIER).mkdir(exist_ok=True)
            # A new file before the old one is removed: replacing a file makes the disk's journal wait for the data.
            digests = json.dumps({name: digest.hexdigest() for name, digest in self._digests.items()})
            if not final:
                run.state.save(path, digests=digests)
        except OSError:  # the round does not count
            for name, size in sizes.items():
                os.truncate(self.folder / name, size)
            raise
        for old in earlier:
            if old == before_last:
                old.replace(path.parent / EARLIER / old.name)
            else:
                old.unlink()

    def finished(self, run: RunInfo) -> None:
        self._collect_models(run)
        if self.config.keep_best:
            self._collect_best(run)
        self._write_summary(run, "completed")
        self._show()
        log.info("results are in %s", self.folder)

    def failed(self, run: RunInfo, error: BaseException) -> None:
        if self._unchanged:
            return
        reason = str(error) if isinstance(error, FedhetError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = in_words(error)
        with suppress(OSError):  # the disk may be full, as `error` then says
            self._write_summary(run, "failed", error=reason)
            self._show()

    def _write_summary(self, run: RunInfo, status: str, **further: str) -> None:
        summary = summarised(read_history(self.folder), run, self.config)
        seconds = round(self.earlier_seconds + time.perf_counter() - self.started_at, 3)
        cpu, peak = spent()
        summary |= {"engine": self.engine, "seconds": seconds, "cpu_seconds": round(cpu - self._before, 3)}
        summary |= {"peak_memory": peak, "ran": self._ran, "versions": _versions(), "status": status, **further}
        files.write_text(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _show(self) -> None:
        if not self.config.report:
            return
        try:
            write_report(self.folder)
        except Exception as error:
            log.warning(
                "report.html was not written (%s: %s); try fedhet report", type(error).__name__, error, exc_info=error
            )

    def _collect_models(self, run: RunInfo, round: int = 0) -> None:
        """Move the models that clients saved on this machine to the run directory, and write the global model.

        `round` is the round after which they were saved (`save-every`), or 0 at the end of the run.
        """
        name = Path("models", files.round_folder(round))
        for path in self._saved(run, name):
            files.write_whole(self.folder / name / path.name, partial(shutil.move, path))
        names = {files.NAMES: run.state.names} if run.state.names else {}
        if (run.traits.whole or run.state.serves) and run.state.model:
            files.write_arrays(self.folder / name / "global.safetensors", run.state.model, metadata=names)

    def _collect_best(self, run: RunInfo) -> None:
        """Copy the clients' best models, which a resumed run may improve, and write the best global model."""
        name = Path("models", files.BEST)
        for path in self._saved(run, name):
            client = unquote(path.stem)
            best, _ = run.state.best.get(client, (None, None))
            tensors = files.read_tensors(path) or {}
            if files.BEST_ROUND not in tensors or int(tensors[files.BEST_ROUND]) != best:
                log.warning("the best model of client %s is lost: %s is from a round that was repeated", client, path)
                continue
            files.write_whole(self.folder / name / path.name, partial(shutil.copyfile, path))
        if run.state.best_model:
            names = {files.NAMES: run.state.names} if run.state.names else {}
            files.write_arrays(self.folder / name / "global.safetensors", run.state.best_model, metadata=names)

    def _saved(self, run: RunInfo, name: Path) -> Iterator[Path]:
        """Yield the models that clients saved on this machine in the subfolder `name` of the run's state."""
        places = [
            files.expanded(self.config.state_dir or self.folder / "state"),
            *([files.state_folder("", "")] if run.state.run else []),
        ]
        for place in places:
            yield from sorted((place / run.state.run / name).glob("*.safetensors"))

    def _remove_models(self, round: int) -> None:
        kept = {files.round_folder(number) for number in range(1, round + 1)}
        for path in (self.folder / "models").glob("*"):
            if path.is_file():
                path.unlink()
            elif path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _checkpoints(self) -> list[Path]:
        return [path for path in (self.folder / "checkpoint").glob("*.safetensors") if path.stem.isdecimal()]

    def _checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from, or None; keep the history only up to the checkpoint's round."""
        rounds = self.config.rounds
        planned = toml.load(self.folder / "config.toml").get("rounds", 0)
        last = max(self._checkpoints(), key=lambda path: int(path.stem), default=None)
        if last and 0 < planned < rounds:
            schedule, method = self.config.lr_schedule, self.config.method_name
            if schedule != "constant" or self.config.options.planned:
                log.warning(
                    "the rounds so far ran with rounds = %d, and their results depend on it (method = %s, lr-schedule "
                    "= %s), so they differ from those of a run with rounds = %d from the start",
                    *(planned, method, schedule, rounds),
                )
            # A run that gets more rounds continues before its last one, which some methods treat differently.
            earlier = self.folder / "checkpoint" / EARLIER / f"{planned - 1}.safetensors"
            if planned <= int(last.stem) and earlier.is_file():
                last = earlier
            elif planned < int(last.stem):
                raise ConfigError(
                    f"the run in {self.folder} completed its closing-epochs and has no checkpoint before them, so it "
                    f"cannot get more rounds: start a new run with rounds = {rounds}"
                )
        complete = int(last.stem) if last else -1
        done = complete - bool(self.config.closing_epochs)
        if 0 < rounds < done:
            raise ConfigError(f"rounds = {rounds}: {self.folder} has {done} rounds already; set rounds >= {done}")
        if last is None:
            return None
        digests = json.loads(files.read_arrays(last)[1].get("digests", "{}"))
        rows = [row for row in read_history(self.folder) if row["round"] <= complete and not row.get("final")]
        clients = [row for row in read_clients(self.folder) if row.round <= complete]
        self.earlier_seconds = sum(row["timing"]["seconds"] for row in rows)
        for name, number in (("history.jsonl", len(rows)), ("clients.csv", 1 + len(clients))):
            path = self.folder / name
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            self._texts[name] = b"".join(lines[:number])
            if digests.get(name) != _digest(self._texts[name]).hexdigest():
                raise FedhetError(
                    f"{path} is damaged: its lines up to round {complete} do not match the digest in {last}; restore "
                    "the folder from a copy, or start a new run"
                )
        return last

    def _append(self, name: str, text: str) -> None:
        path = self.folder / name
        with files.writing(path), path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)
        self._digests[name].update(text.encode())


@contextmanager
def recorded(
    folder: Path, config: Config, engine: str, *, resume: bool = False, free: Collection[str] = (), **arguments: Any
) -> Iterator[tuple[RunDirectory, *tuple[Observer, ...]]]:
    """Context manager that locks a run directory, and yields a `RunDirectory` and the loggers of the configuration.

    The arguments are those of `RunDirectory`; `free` has keys that a resumed run may change, besides those that are
    resumable. Raises a ConfigError if the folder or a logger cannot be used or a resumed run has other settings, and a
    FedhetError that says how to resume the run if writing fails.
    """
    check_folder(folder, resume=resume)
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(folder))
            if resume:
                _check_settings(folder, config, free)
            # First, so that a logger that is not installed leaves no run directory.
            logging_to = loggers(listed(config.log), folder, config.flat())
            directory = RunDirectory(folder, config, engine, resume=resume, **arguments)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{folder} cannot be the directory of a run: {reason}; choose another one") from error
        try:
            yield directory, *logging_to
        except OSError as error:
            again = (
                resuming(folder, arguments.get("supplied", ())) if engine != "flwr" else "the app with resume = true"
            )
            raise FedhetError(
                f"the run in {folder} stopped, since {in_words(error)}; complete rounds are saved. Solve the problem, "
                f"and continue with {again}"
            ) from error


def resuming(folder: Path, supplied: Collection[str]) -> str:
    """Return the command to resume a run: a Python call if the user passed arguments (`supplied`), else for a shell."""
    functions = "".join(f", {name}=..." for name in supplied)
    return f"fedhet.run(resume={str(folder)!r}{functions})" if supplied else f"fedhet run --resume {folder}"


def check_folder(folder: Path, *, resume: bool = False) -> None:
    """Check that `folder` is usable for a new run or, with `resume`, has a run; raise a `ConfigError` otherwise."""
    files.check_place(folder)
    if resume and not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} contains no run to resume: give the directory of a run, with its config.toml")
    if resume:
        files.check_links(folder)
    history = folder / "history.jsonl"
    begun = bool(history.read_bytes()) if history.is_file() else (folder / "config.toml").exists()
    if not resume and begun:  # a run that failed before its first round has nothing to lose
        raise ConfigError(f"{folder} already contains a run: choose another folder (out), or resume that run")


def _check_settings(folder: Path, config: Config, free: Collection[str]) -> None:
    there = toml.chosen(toml.load(folder / "config.toml"))
    # The first handshake may replace `test-on`, and a method may be named with the place of its code.
    allowed = {*keys_that("resumable"), "test-on", *free}
    if there.get("method") == config.method_name:
        allowed.add("method")
    other = [key for key, value in config.flat().items() if key not in allowed and there.get(key, value) != value]
    if other:
        raise ConfigError(
            f"the run in {folder} has other values of {', '.join(other)}, which a resumed run cannot change: give its "
            "values, or start another run"
        )


def _versions() -> dict[str, str]:
    packages = {package: version(package) for package in PACKAGES}
    return {"flwr": FLOWER, **packages, "fedhet": __version__, "python": platform.python_version()}


def _ran() -> dict[str, str]:
    """Return this machine and the command, and the commits of fedhet and of the user's program, if git has them."""
    words: list[str] = []
    for word in sys.argv:
        named = words and re.fullmatch(NAME, words[-1], re.IGNORECASE)
        words.append("..." if named else SECRET.sub(r"\1...", word))
    ran = {"host": f"{platform.system()} {platform.machine()}, {cores()} cores"}
    ran["command"] = shlex.join(words) if any(words[:1]) else "Python"
    package = Path(__file__).resolve().parents[2]
    program = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    user = Path.cwd() if program.is_relative_to(sys.prefix) else program.parent
    commits = {"fedhet": _loaded(package) if (package / "pyproject.toml").is_file() else "", "program": revision(user)}
    return ran | {f"commit of {name}": commit for name, commit in commits.items() if commit}


_loaded = cache(revision)  # this code was read when it was imported


def _digest(text: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(text, digest_size=16)
