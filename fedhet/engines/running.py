"""Runs of a federation from beginning to end: `fedhet.run`, which selects an engine, and the local engine."""

import json
import multiprocessing
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedhet.client.app import make_client_app
from fedhet.config import configuration
from fedhet.data import PublicDataset
from fedhet.engines.children import RUN
from fedhet.engines.workers import WorkerGrid
from fedhet.errors import ConfigError, FedhetError, check_kinds, check_list
from fedhet.flower import ClientApp
from fedhet.flower.grid import LocalGrid
from fedhet.flower.insides import colour_terminals_only
from fedhet.methods import registry
from fedhet.methods.options import Config, keys_that
from fedhet.results.history import Row, read_history, read_run, showing
from fedhet.results.observers import Observer
from fedhet.results.recorder import check_folder, resuming
from fedhet.results.terminal import headline
from fedhet.server.app import serve
from fedhet.server.run import new_folder
from fedhet.setup.user_functions import UserFunctions
from fedhet.tasks import Task
from fedhet.utils import text
from fedhet.utils.files import check_place, expanded
from fedhet.utils.machine import cores, device_of, room_on
from fedhet.utils.process import alone, one_at_a_time, standard_settings
from fedhet.utils.text import log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 20  # largest number of clients that are trained as one batch with `client-batching = auto`


@dataclass(frozen=True)
class RunResult:
    """A finished run: its directory and the content of `summary.json`, empty if the server ran on another machine."""

    folder: Path
    summary: dict[str, Any]

    @property
    def history(self) -> list[Row]:
        """Metrics of the rounds: the lines of `history.jsonl`, as dicts."""
        return read_history(self.folder)

    def plot(self) -> "Figure":
        """Return a figure of the accuracy by round; raises a `FedhetError` if no client was evaluated."""
        from fedhet.results.figures import accuracy_figure

        figure = accuracy_figure(read_run(self.folder))
        if figure is None:
            raise FedhetError(f"no client was evaluated in the run {self.folder}: repeat it with evaluate-every = 1")
        return figure

    def __str__(self) -> str:
        return f"{headline(read_run(self.folder))}\n{self.folder}" if self.summary else str(self.folder)

    def _repr_html_(self) -> str:
        from fedhet.results.figures import accuracy_figure, to_svg

        run = read_run(self.folder)
        with showing(self.folder):
            figure = accuracy_figure(run)
            svg = "" if figure is None else to_svg(figure, self.folder.name)
        return f"<p><b>{escape(headline(run))}</b><br><code>{escape(str(self.folder))}</code></p>{svg}"


def run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    model: Any = None,
    data: Any = None,
    task: str | Task | None = None,
    client_settings: Any = None,
    out: str | Path | None = None,
    engine: str | None = None,
    resume: str | Path | None = None,
    observers: Sequence[Observer] = (),
    progress: bool = True,
) -> RunResult:
    """Run a federation from beginning to end; return its directory and summary.

    Args:
        config: a dict of settings by key (with `-` or `_`), the path of a TOML file, the name of a preset or of a
            method, or a complete `Config`. Settings change the preset named by the key `preset`; by default the
            preset of the `method` on the data set digits, or the preset `own` if `model` and `data` are given.
        model: a function that returns the network of a client (see `fedhet.make_client_app`), a network class, or a
            network whose weights all clients start from; by default the configured architectures.
        data: a function that returns a client's data (see `fedhet.make_client_app`); or all clients' examples, such as
            (inputs, labels), a dataset or `fedhet.by_column(...)`, which keys such as `partition` split among clients;
            by default, the configured data set.
        task: the task of `data`: a `fedhet.Task` or its name; by default inferred from labels and outputs.
        client_settings: a function that returns a dict of settings of a client (see `fedhet.make_client_app`).
        out: the run directory; by default a new one in `runs/`.
        engine: where clients run: in processes of fedhet (`local`), in Flower's simulation (`ray`), or on the nodes of
            a SuperLink, given by the name of its connection in Flower's configuration; by default the key `engine`.
        resume: the directory of a run to continue with its configuration, in which `config` may change `rounds` and
            keys that say where and how a run is executed, such as `workers`. To import your own method again, `config`
            must name it (`{"method": "package.module:name"}`).
        observers: objects that are notified of every round.
        progress: whether to print the progress of the rounds.

    Raises:
        FedhetError: the configuration is invalid, the directory contains another run, or the run failed.
    """
    colour_terminals_only()
    check_kinds(config=(config, (Config, Mapping, str, Path)), out=(out, (str, Path)), engine=(engine, (str,)))
    check_kinds(resume=(resume, (str, Path)))
    check_list("observers", observers, Observer, "[MyObserver()]")
    functions = UserFunctions(model, data, task, client_settings)
    with alone():
        resume = None if resume is None else expanded(resume)
        complete = _configured(config, engine, resume, functions)
        place = resume or out or complete.out or new_folder(Path("runs"), complete)
        folder = expanded(place).resolve()
        if complete.engine in ("local", "ray"):  # elsewhere only the nodes have the data
            check_folder(folder, resume=resume is not None)
            complete = _checked_here(complete, functions)
    if progress:
        from fedhet.results.terminal import ProgressLine

        jupyter = text.console().is_jupyter  # a cell keeps what is printed, line by line
        plain = text.console(force_jupyter=False, force_terminal=False, width=100) if jupyter else text.terminal()
        observers = [*observers, ProgressLine(plain, folder)]
    try:
        if complete.engine == "local":
            run_locally(complete, folder, resume=resume is not None, functions=functions, observers=observers)
        else:
            from fedhet.engines.flower import run_on_flower

            run_on_flower(complete, folder, resume=resume is not None, observers=observers)
    except KeyboardInterrupt as stopped:
        if (folder / "config.toml").is_file():
            stopped.add_note(f"stopped; continue with: {resuming(expanded(place), functions.words)}")
        raise
    summary = folder / "summary.json"
    return RunResult(folder, json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {})


def _checked_here(config: Config, functions: UserFunctions) -> Config:
    if config.state_dir:
        check_place(expanded(config.state_dir).resolve())
    device_of(config.device)  # raises unless it is available
    if config.start_from:
        if not (start := expanded(config.start_from).resolve()).is_dir():
            raise ConfigError(f"start-from = {start} is no folder: give the folder of a run, or its models/")
        config = config.replace(start_from=str(start))  # workers may have another working directory
    functions.check(config)
    return config


def _configured(
    config: Config | Mapping[str, Any] | str | Path | None,
    engine: str | None,
    resume: Path | None,
    functions: UserFunctions,
) -> Config:
    names = functions.supplied
    new = resume is None
    if isinstance(config, Config):
        complete = config
    elif resume is None:
        complete = configuration.configure(config, supplied=names)
    else:
        complete = configuration.of_run(resume, names, _changes(resume, config, names))
    if engine is not None:
        complete = configuration.changed(complete, {"engine": engine}, "code", strict=new)
    complete = functions.adapted(complete, strict=new)
    if functions and complete.engine != "local":
        raise ConfigError(
            f"engine = {complete.engine!r} cannot use a model or data passed in Python: use engine = 'local', or write "
            "a Flower app with fedhet.make_client_app(model=..., data=...)"
        )
    return complete


def _changes(
    folder: Path, config: Mapping[str, Any] | str | Path | None, supplied: Collection[str]
) -> Mapping[str, Any]:
    """Return the settings in `config`, by which a resumed run may differ from the one in `folder`."""
    changes = configuration.from_file(expanded(config), supplied) if isinstance(config, str | Path) else config or {}
    path = folder / "config.toml"
    reference = changes.get("method")
    there = configuration.read(path, supplied) if path.is_file() else {}
    if not there:
        raise ConfigError(f"folder {folder} contains no run to resume: give a run directory, with its config.toml")
    if reference is not None and registry.method(str(reference)).name == there.get("method"):
        there["method"] = reference  # where to import it from
    state = str(there.get("state-dir", ""))
    if state and "state-dir" not in changes and not expanded(state).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"the file {path} has state-dir = {state}, outside of the run directory: if files there may be written and "
            f"removed, set state-dir = {state} for the resumed run, too"
        )
    allowed = keys_that("resumable")
    different = [key for key, value in changes.items() if key not in allowed and there.get(key) != value]
    if different:
        raise ConfigError(
            f"the run in {folder} has other values of {', '.join(different)}, which cannot be changed: a resumed run "
            f"may change only {', '.join(allowed)}"
        )
    run = read_run(folder)
    if run.ended_early and changes.get("rounds") not in (None, run.settings["rounds"]):
        raise ConfigError(
            f"training in {folder} ended early, after round {run.summary['rounds']}, and other rounds do not continue "
            f"it: leave rounds out, or train further in a new run with start-from = {folder}"
        )
    return changes


def run_locally(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    app: ClientApp | None = None,
    functions: UserFunctions = UserFunctions(),  # noqa: B008 - it is frozen
) -> None:
    """Run a complete configuration in this process and its worker processes; raise a FedhetError if the run fails.

    `folder` is the run directory; with `resume`, the run in it is continued. `observers` are notified of every round.
    `app` is the ClientApp, by default made by `make_client_app` from the user's models and data (`functions`).
    """
    if not config.state_dir:
        config = config.replace(state_dir=str(folder / "state"))
    app = app or make_client_app(**functions.arguments)
    device = device_of(config.device)
    workers = config.workers or (1 if device.type == "mps" else cores())
    process = multiprocessing.current_process()
    if process.daemon or process.name == RUN:  # each of several runs has one core
        workers = 1
    grid = WorkerGrid(
        app,
        config.clients,
        batch_size=_batch_size(config),
        least_batches=2 if config.client_batching == "auto" else 1,
        workers=workers,
        timeout=config.timeout,
        datasets=(config.dataset,) if functions.data is None else (),
        room=partial(room_on, device) if device.type == "cuda" and not config.workers else None,
        names=functions.clients,
    )
    grid.doing = partial(_tell, observers)
    if config.timeout < Config().timeout:
        grid.patience = 0.0  # the timeout applies to the first message, too
    if threading.current_thread() is not threading.main_thread():
        # The program may draw random numbers meanwhile, from the generators with which clients would compute here.
        grid.patience, grid.least = 0.0, 1
        log.info(
            "a run in a thread seeds the global random generators while it calls your functions: let the program draw "
            "its own numbers from generators of its own, such as torch.Generator and np.random.default_rng(SEED)"
        )
    with one_at_a_time(), standard_settings(), grid:
        serve(
            config,
            grid,
            folder,
            engine="local",
            resume=resume,
            public=functions.public_dataset(config),
            functions=functions,
            observers=observers,
        )


def _tell(observers: Sequence[Observer], what: str) -> None:
    for observer in observers:
        observer.doing(what)


def _batch_size(config: Config) -> int:
    """Return the largest number of clients to train as one batch; raise a ConfigError if the key is no such number."""
    chosen = config.client_batching
    if chosen not in ("auto", "off") and not (chosen.isdecimal() and int(chosen) > 1):
        raise ConfigError(
            f"client-batching must be off, auto (up to {BATCH} clients) or a number of at least 2, not {chosen!r}"
        )
    if config.compile == "true" and chosen == "off":
        raise ConfigError("compile = true compiles batches of clients: leave client-batching = off out, or compile")
    return {"off": 1, "auto": BATCH}.get(chosen) or int(chosen)


def shake_hands(
    config: Config,
    functions: UserFunctions,
    public: PublicDataset | None,
    node_config: Mapping[str, str] = MappingProxyType({}),
    begun: Path | None = None,
    *,
    train: bool = False,
) -> Any:
    """Return the method's strategy after a handshake with simulated clients and, if `train`, after a round.

    `functions` are the user's model and data, `public` is the public dataset, `node_config` is added to node configs.
    With a run directory `begun`, all continue from its state. Raises a `FedhetError` if no client can take part.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = config.replace(state_dir=str(begun / "state") if begun else folder, out="")
        strategy = registry.strategy(config.method_name)(config, public=public, model=functions.model)
        for path in sorted(begun.glob("checkpoint/*.safetensors"))[:1] if begun else ():
            strategy.state = strategy.state_class.load(path)
        app = make_client_app(**functions.arguments)
        strategy.handshake(LocalGrid(app, config.clients, node_config=node_config, names=functions.clients))
        refused = strategy.run.round.failures
        if train and strategy.config.rounds:
            strategy.run_round(1)
            strategy.run.round.failures[:0] = refused
        return strategy
