"""Run a federation from beginning to end, for `fedhet run` and `fedhet.run`."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhet.config import client_setup, configuration
from fedhet.config.user_functions import UserFunctions
from fedhet.config.validation import effective
from fedhet.errors import ConfigError, check_kinds
from fedhet.flower.insides import colour_terminals_only
from fedhet.methods import registry
from fedhet.methods.options import Config, keys_that
from fedhet.results.observers import Observer
from fedhet.results.recorder import check_folder, resuming
from fedhet.results.run_result import RunResult
from fedhet.server.app import new_folder
from fedhet.tasks import Task
from fedhet.utils import text
from fedhet.utils.files import check_place
from fedhet.utils.machine import device_of


def run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    model: Any = None,
    data: Any = None,
    task: str | Task | None = None,
    out: str | Path | None = None,
    engine: str | None = None,
    resume: str | Path | None = None,
    observers: Sequence[Observer] = (),
    progress: bool = True,
) -> RunResult:
    """Run a federation from beginning to end.

    Args:
        config: settings by key (with `-` or `_`), a TOML file, a preset, a method, or a complete configuration.
            Settings change the preset named by `preset`; by default the digits preset of the `method`, or the preset
            `own` if `model` and `data` are given.
        model: the clients' networks: a function of a client, a class, or a network whose weights all clients start
            from (`fedhet.make_client_app`); by default the configured architectures.
        data: the clients' data: a function of a client (`fedhet.make_client_app`); by default the configured data set.
        task: the task of the user's data: a `fedhet.Task` or a name; by default inferred from labels and outputs.
        out: the run directory; by default a new one in `runs/`.
        engine: `local`, `ray`, or a SuperLink connection from Flower's configuration; by default the configured one.
        resume: directory of a run to resume with its configuration; `config` may change some keys. A method that is not
            part of fedhet is imported only if `config` names it, too.
        observers: notified after every round.
        progress: show the progress of the rounds as `fedhet run` does.

    Raises:
        FedhetError: the configuration is invalid, the directory contains another run, or the run failed.
    """
    colour_terminals_only()
    check_kinds(config=(config, (Config, Mapping, str, Path)), out=(out, (str, Path)), engine=(engine, (str,)))
    check_kinds(resume=(resume, (str, Path)), observers=(observers, (Sequence,)))
    functions = UserFunctions(model, data, task)
    complete = _configured(config, engine, resume, functions)
    folder = Path((out if resume is None else resume) or complete.out or new_folder(Path("runs"), complete)).resolve()
    if complete.engine in ("local", "ray"):  # elsewhere only the nodes have the data
        check_folder(folder, resume=resume is not None)
        if complete.state_dir:
            check_place(Path(complete.state_dir).resolve())
        device_of(complete.device)  # raises unless it is available
        if complete.start_from:
            if not (start := Path(complete.start_from).resolve()).is_dir():
                raise ConfigError(f"start-from = {start} does not exist: give the folder of a run, or its models/")
            complete = complete.replace(start_from=str(start))  # workers may have another working directory
        client_setup.check(complete, own_model=model is not None, own_data=data is not None)
    watching = [*observers, *([progress_line()] if progress else [])]
    try:
        if complete.engine == "local":
            from fedhet.engines.local import run_locally

            run_locally(complete, folder, resume=resume is not None, functions=functions, observers=watching)
        else:
            from fedhet.engines.flower import run_on_flower

            run_on_flower(complete, folder, resume=resume is not None, observers=watching)
    except KeyboardInterrupt as stopped:
        if (folder / "config.toml").is_file():
            stopped.add_note(f"stopped; continue with: {resuming(folder, functions.words)}")
        raise
    summary = folder / "summary.json"
    return RunResult(folder, json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {})


def progress_line() -> Observer:
    """Return an observer that shows the progress of a run that was started from Python."""
    from fedhet.results.progress import ProgressLine

    if text.console().is_jupyter:  # a cell keeps what is printed, line by line
        return ProgressLine(text.console(force_jupyter=False, force_terminal=False, width=100))
    return ProgressLine(text.terminal())


def _configured(
    config: Config | Mapping[str, Any] | str | Path | None,
    engine: str | None,
    resume: str | Path | None,
    functions: UserFunctions,
) -> Config:
    names, strict = functions.words.keys(), resume is None
    if isinstance(config, Config):
        complete = config
    elif resume is None:
        complete = configuration.resolve(configuration.completed(config, names))
    else:
        changes = configuration.from_file(Path(config), names) if isinstance(config, str | Path) else dict(config or {})
        complete = configuration.resolve(_resumed(Path(resume), changes, names), strict=False, trusted=False)
    if engine is not None:
        complete = complete.replace(engine=engine)
        complete = effective(complete, registry.traits(complete), complete.chosen, strict=strict)
    complete = functions.adapted(complete, strict=strict)
    if functions and complete.engine != "local":
        raise ConfigError(
            f"engine = {complete.engine!r} cannot use a model or data passed in Python: use engine = 'local', or write "
            "a Flower app with fedhet.make_client_app(model=..., data=...)"
        )
    return complete


def _resumed(folder: Path, changes: Mapping[str, Any], supplied: Collection[str]) -> dict[str, Any]:
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} contains no run to resume: give the directory of a run, with its config.toml")
    there = configuration.read(folder / "config.toml", supplied)
    if not there:
        raise ConfigError(f"{folder / 'config.toml'} is empty, so the run cannot be resumed: start a new run")
    settings = configuration.from_file(
        folder / "config.toml", supplied, reference := changes.get("method"), of_run=True
    )
    if reference is not None and registry.method(str(reference)).name == there.get("method"):
        there["method"] = reference  # where to import it from
    state = str(settings.get("state-dir", ""))
    if state and "state-dir" not in changes and not Path(state).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{folder / 'config.toml'} has state-dir = {state}, outside of the run directory: if files there may be "
            f"written and removed, set state-dir = {state} for the resumed run, too"
        )
    allowed = keys_that("resumable")
    different = [key for key, value in changes.items() if key not in allowed and there.get(key) != value]
    if different:
        raise ConfigError(
            f"the run in {folder} has other values of {', '.join(different)}, which cannot be changed: a resumed run "
            f"may change only {', '.join(allowed)}"
        )
    return {**settings, **changes}
