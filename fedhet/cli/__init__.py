"""The command line. PyTorch and Flower are imported only when needed, so that `fedhet --help` is fast."""

import json
import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, NoReturn

import typer

from fedhet.cli import arguments
from fedhet.config import configuration
from fedhet.config.toml import parse_settings, toml_value
from fedhet.errors import ConfigError, DataError, FedhetError, ModelError, in_words
from fedhet.methods import registry
from fedhet.methods.options import Config
from fedhet.utils.files import expanded, state_folder
from fedhet.utils.machine import drop_output, ended_by_signals, exit_code, open_streams
from fedhet.utils.text import __version__, printable, terminal

FAILED, BAD_INPUT = 1, 2

app = typer.Typer(
    help="Federated learning among clients whose neural networks differ.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

node = typer.Typer(help="Commands for the owner of a node.", no_args_is_help=True)
app.add_typer(node, name="node")


def main() -> None:
    """Entry point of the `fedhet` command."""
    open_streams()
    app(prog_name="fedhet")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        typer.echo(f"fedhet {__version__}")
        raise typer.Exit


@app.command()
def run(
    config: arguments.Source = None,
    settings: arguments.Settings = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    out: Annotated[Path | None, arguments.place("Run directory; by default a new one in runs/.")] = None,
    data: arguments.Data = None,
    engine: Annotated[str | None, typer.Option(metavar="ENGINE", help="local, ray, or a SuperLink connection.")] = None,
    resume: Annotated[Path | None, arguments.place("Resume the run in this directory.")] = None,
    again: Annotated[Path | None, arguments.place("Repeat the run in this directory, and compare all bytes.")] = None,
    method: arguments.Named = None,
) -> None:
    """Run a federation from beginning to end, with the settings in CONFIG and --set."""
    with _errors():
        if resume is not None and (config is not None or out is not None):
            raise ConfigError("--resume uses the run's own configuration and directory: leave out CONFIG and --out")
        by_hand = _settings_of(settings, data=data, seed=seed, engine=engine, out=out, method=method)
        if again is not None:
            if config is not None or resume is not None or by_hand.keys() - {"data", "engine", "out", "method"}:
                raise ConfigError("--again repeats a run as it was: leave out CONFIG, --resume, --set and --seed")
            _again(again, by_hand)
            return
        if "resume" in by_hand:
            raise ConfigError("--set resume is not possible: use --resume DIR")
        if resume is not None:
            from fedhet.results.history import read_run
            from fedhet.results.report import complete_report

            written = not by_hand and (resume / "summary.json").is_file()
            if written and (files := read_run(resume)).summary.get("status") == "completed":
                page = ", and its report.html is written now" if complete_report(resume) else ""
                further = "a run with start-from" if files.ended_early else "--set rounds=MORE"
                typer.echo(printable(f"the run in {resume} is complete{page}: to train further, {further}"))
            else:
                _run(by_hand, folder=resume, resume=True)
            return
        complete = configuration.configure(config, by_hand)
        folder = complete.out or _quietly("fedhet.server.run").new_folder(Path("runs"), complete)
        _run(complete, folder=expanded(folder))


@app.command()
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Methods in the order of the table, or [NAME=]METHOD,KEY=VALUE,... for one with its own settings.",
            autocompletion=arguments.method_names,
        ),
    ],
    seeds: Annotated[str, typer.Option(help="Comma-separated; every method runs once with each seed.")] = "0,1,2",
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Settings for all: a TOML file or preset.")] = None,
    settings: arguments.Settings = None,
    out: Annotated[Path | None, arguments.place("Folder of the comparison; by default one in runs/.")] = None,
    jobs: arguments.Jobs = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Method, or NAME given to one, to compare others with; default: the first."),
    ] = None,
    tune: arguments.Tune = None,
    tune_runs: arguments.TuneRuns = None,
    tune_seeds: Annotated[str, typer.Option(help="Comma-separated; for tuning only.")] = "1000,1001,1002",
    data: arguments.Data = None,
) -> None:
    """Run several methods on the same clients and data. If interrupted, the same command continues."""
    with _errors():
        reported, for_tuning = arguments.numbers("--seeds", seeds), arguments.numbers("--tune-seeds", tune_seeds)
        chosen = configuration.settings_of(config) | _settings_of(settings, data=data)
        comparing = _quietly("fedhet.comparing")
        tuning = comparing.Tuning(arguments.tuning_grid(tune), for_tuning, tune_runs) if tune else None
        if tuning is None and tune_runs is not None:
            raise ConfigError("--tune-runs has no effect without --tune: give values with --tune KEY=V1,V2")
        how: dict[str, Any] = {"jobs": jobs, "baseline": baseline, "tuning": tuning, "console": terminal()}
        comparing.compare(methods, chosen, seeds=reported, out=out, **how).check()


@app.command()
def recommend(
    config: arguments.Source = None,
    settings: arguments.Settings = None,
    allow: arguments.Kinds = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum size of a client's messages in a round, such as 500KB.")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Total time, such as 90s, 30m or 2h.")] = "30m",
    methods: Annotated[str, typer.Option(help="Methods to try, comma-separated; by default all suitable ones.")] = "",
    out: Annotated[Path | None, arguments.place("Folder for all runs; by default runs/recommend.")] = None,
    jobs: arguments.Jobs = None,
    data: arguments.Data = None,
) -> None:
    """Find the methods that can train CONFIG's clients, and compare these. If stopped, the same command continues."""
    with _errors():
        chosen = configuration.settings_of(config) | _settings_of(settings, data=data)
        names = [name.strip() for name in methods.split(",") if name.strip()]
        limits: dict[str, Any] = {"allow": allow, "max_bytes": max_bytes, "budget": budget, "methods": names}
        recommending = _quietly("fedhet.comparing.recommending")
        done = recommending.recommend(chosen, **limits, out=out, jobs=jobs, console=terminal())
        folder = done.folder.resolve()
        typer.echo(f"fedhet run {folder / 'recommended.toml'}\n{folder}: comparison.html, recommend.json, all runs")


@app.command()
def evaluate(
    run: Annotated[
        Path, typer.Argument(help="A run directory, or models in it (models/best).", parser=arguments.path_of)
    ],
    settings: arguments.Settings = None,
    data: arguments.Data = None,
    engine: Annotated[str | None, typer.Option(metavar="ENGINE", help="Evaluate on this engine, at its nodes.")] = None,
    out: Annotated[Path | None, arguments.place("Folder of the results; by default that of the run.")] = None,
) -> None:
    """Evaluate the saved models of RUN on test data, without training: a table of models by clients."""
    with _errors():
        chosen = _settings_of(settings, data=data)
        evaluating = _quietly("fedhet.engines.evaluating")
        if engine in (None, "local"):
            result = evaluating.evaluate(run, chosen, out=out)
        else:
            complete = evaluating.evaluation_only(run, {**chosen, "engine": engine})
            folder = out or _quietly("fedhet.server.run").new_folder(Path("runs"), complete)
            _run(complete, folder=folder)
            result = evaluating.reported(folder, complete)
        if result:
            terminal().print(import_module("fedhet.results.terminal").TerminalTable(result.table, "evaluation.csv"))
            typer.echo(printable(f"{result.folder}: {result.metric} in evaluation.html, .csv and .png"))


@app.command()
def describe(
    config: arguments.Source = None,
    settings: arguments.Settings = None,
    data: arguments.Data = None,
    engine: Annotated[str | None, typer.Option(metavar="ENGINE", help="local, ray, or a SuperLink connection.")] = None,
    out: Annotated[Path | None, arguments.place("Run directory; by default a new one in runs/.")] = None,
) -> None:
    """Describe the clients' data before training: numbers, classes, missing values, ranges and shapes."""
    with _errors():
        # Without a round, the method local only asks for descriptions and evaluates.
        chosen = _settings_of(settings, data=data, engine=engine, out=out) | {"method": "local", "rounds": 0}
        # A data set that is named without a configuration is described whole, not split as the preset splits digits.
        whole = config is None and "dataset" in chosen and "preset" not in chosen
        source = {"preset": "", "clients": 1} if whole else config
        result = _quietly().run(configuration.configure(source, chosen), progress=False)
        if described := result.summary.get("data"):
            table = import_module("fedhet.results.description").data_table(described["clients"])
            terminal().print(import_module("fedhet.results.terminal").TerminalTable(table, "summary.json"))
        typer.echo(printable(_files(result.folder, "report.html", "summary.json")))


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="A new folder.", parser=arguments.path_of)],
    flower: Annotated[bool, typer.Option("--flower", help="Write a Flower app for `flwr run`.")] = False,
) -> None:
    """Write the files of a new project: a model, data, and a script or Flower app."""
    with _errors():
        from fedhet.cli.new_project import write

        names = write(folder, flower=flower)
        start = 'flwr run . --stream --federation-config "num-supernodes=10"' if flower else "python run.py"
        typer.echo(printable(f"{folder} has {', '.join(names)}; they run as they are:"))
        typer.echo(printable(f"cd {folder} && {start}"))


@app.command()
def report(
    folders: arguments.Folders,
    out: Annotated[Path, arguments.place("The page about several runs.", "FILE")] = Path("comparison.html"),
) -> None:
    """Write report.html and figures for a run, the files of a comparison, or one page about several runs."""
    with _errors(everything_is_input=True):
        from fedhet.results.report import compare_folders, write_report

        if len(folders) == 1 and (folders[0] / "comparison.json").is_file():
            typer.echo(printable(str(_quietly("fedhet.comparing").read_comparison(folders[0]).write())))
        elif len(folders) == 1:
            typer.echo(printable(str(write_report(folders[0]))))
        else:
            typer.echo(printable(f"{compare_folders(folders, out).resolve()} (--out names another place)"))


@app.command()
def results(
    run: Annotated[str, typer.Argument(metavar="FOLDER", help="The run's folder on the server's machine.")],
    engine: Annotated[str, typer.Option(metavar="ENGINE", help="The SuperLink connection of the run.")],
    out: Annotated[Path | None, arguments.place("A new folder; by default one of the same name in runs/.")] = None,
) -> None:
    """Bring summary, history, clients and global model of a run from the machine of a SuperLink."""
    with _errors():
        folder = out or Path("runs") / Path(run).name
        _quietly("fedhet.engines.results").fetch(run, engine, folder)
        terminal().print(import_module("fedhet.results.terminal").closing_table(folder))
        typer.echo(printable(f"the results are in {folder.resolve()}"))


@app.command()
def clean(
    days: Annotated[float, typer.Option(min=0, help="Age in days from which runs are removed.")] = 30,
    state_dir: arguments.StateDir = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all runs, decoded images and Flower's apps.")
    ] = False,
) -> None:
    """Remove clients' states and public datasets of old runs from this node's folder."""
    with _errors(everything_is_input=True):
        from fedhet.client.state import CACHE, remove_old
        from fedhet.data.files import cache_folder
        from fedhet.engines.superlink import flwr_home

        home = state_folder(state_dir or "", "")
        images = [home / CACHE, cache_folder() / "folder", cache_folder() / "chestxray14"]
        others = [*images, flwr_home() / "apps", *home.glob("nodes/*.reply")] if everything else []
        removed = remove_old(home, 0 if everything else days, others)
        for path in removed:
            typer.echo(printable(f"removed {path}"))
        if not removed:
            typer.echo(printable(f"nothing is removed: {home} has nothing that was not written to for {days:g} days"))
        if everything:
            kept = f"{home} keeps its secrets (nodes), privacy account (account.json) and audit.jsonl"
            typer.echo(printable(f"{kept}: remove them by hand, but only with the images"))


@node.command()
def accept_data(
    name: Annotated[str, typer.Argument(help="The client's name: `name` or `partition-id` of the node config.")],
    state_dir: arguments.StateDir = None,
) -> None:
    """Let a node train on other examples or another split from its next run on; secret and privacy account stay."""
    with _errors(everything_is_input=True):
        from fedhet.client.secret import NodeSecret

        home = state_folder(state_dir or "", "")
        _quietly("fedhet.client.node").check_owner(home)
        NodeSecret.accept(home, name)
        typer.echo(printable(f"the next run of {name} stores its examples and split"))
        typer.echo("without dp-noise, differences to runs before it can disclose the examples that changed")


@node.command("check")
def node_check(
    node_config: Annotated[str, typer.Option(metavar="CONFIG", help="The node config, as for flower-supernode.")],
    source: arguments.Checked = None,
    settings: arguments.Settings = None,
    superlink: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink.")] = None,
    root_certificates: Annotated[Path | None, arguments.place("Certificate of the SuperLink's CA.", "FILE")] = None,
) -> None:
    """Check a node before a run of CONFIG (by default the method local); faults end in exit code 1."""
    with _errors():
        node = _quietly("fedhet.flower.insides").node_config(node_config)
        config = configuration.configure(source or {"method": "local"}, _settings_of(settings))
        results = list(_quietly("fedhet.client.node").check_node(node, config, superlink, root_certificates))
        for passed, sentence in results:
            typer.echo(printable(f"{'ok' if passed else 'FAULT':6}{sentence}"))
        if not all(passed for passed, _ in results):
            _stop("correct the faults before the node takes part in a run", FAILED)


@node.command("log")
def node_log(
    since: Annotated[str, typer.Option(metavar="DAY", help="today, yesterday, or a date.")] = "yesterday",
    state_dir: arguments.StateDir = None,
) -> None:
    """Show what left a node: kinds, bytes and epsilon by run."""
    with _errors():
        from fedhet.client import audit

        home = state_folder(state_dir or "", "")
        begin = audit.since(since)
        lines = audit.summary(home, begin) or [f"nothing since {begin:%Y-%m-%d %H:%M} in {home / audit.FILE}"]
        typer.echo(printable("\n".join(lines), keep="\n"))


@app.command("list")
def list_names() -> None:
    """List methods, models, data sets, partitions and presets."""
    sections = {
        "methods": registry.methods(),
        **json.loads(Path(__file__).with_name("names.json").read_text()),  # generated, since PyTorch imports slowly
        "library models": ["torchvision/NAME", "timm/NAME (pip install timm)"],
        "presets": configuration.presets(),
    }
    with _errors():  # of a full disk
        for heading, names in sections.items():
            typer.echo(_filled(f"{heading + ':':20}{', '.join(names)}", 20))


@app.command()
def keys(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="[METHOD|WORD]",
            help="Show only this method's keys, or keys with this word in their name or description.",
            autocompletion=arguments.method_names,
        ),
    ] = None,
) -> None:
    """Show configuration keys, their defaults and their descriptions."""
    with _errors():
        groups = configuration.key_groups(word)
        if not any(groups.values()):
            typer.echo(f"{word} has no keys of its own; `fedhet keys` shows those that all methods have")
        for heading, rows in groups.items():
            typer.echo(f"{heading}\n")
            for key, default, takes, meaning in rows:
                value = "" if default == "" else f" = {toml_value(default)}"
                typer.echo(_filled(f"  {key}{value}  ({takes})", 6))
                typer.echo(_filled(f"      {meaning}", 6) + "\n")


def _filled(text: str, indent: int) -> str:
    width = min(100, get_terminal_size((100, 0)).columns)
    after = " " * indent
    return fill(printable(text), width, subsequent_indent=after, break_on_hyphens=False, break_long_words=False)


def _settings_of(settings: Sequence[str] | None, **options: str | int | Path | None) -> dict[str, Any]:
    chosen: dict[str, Any] = parse_settings(settings or ())
    for key, value in options.items():
        if value is None:
            continue
        if key in chosen:
            raise ConfigError(f"--{key} {value} and --set {key} set the same key: give only one of them")
        chosen[key] = str(value) if isinstance(value, Path) else value
    return chosen


def _again(folder: Path, changes: dict[str, Any]) -> None:
    repeating = _quietly("fedhet.engines.again")
    place = expanded(changes.pop("out", folder.with_name(f"{folder.resolve().name}-again")))
    new = import_module("fedhet.server.run").numbered(place, Path.exists)
    _run(repeating.config_of(folder, changes), folder=new)
    if difference := repeating.difference(folder, new):
        _stop(f"{new} differs from {folder}: {difference}", FAILED)
    typer.echo(printable(f"{new} and {folder} have the same bytes: history without times, models and checkpoints"))


def _run(chosen: Config | dict[str, Any], *, folder: Path, resume: bool = False) -> None:
    from fedhet.results.terminal import ProgressLine, closing_table

    console = terminal()
    started = time.perf_counter()
    line = ProgressLine(console, folder)
    here = not isinstance(chosen, Config) or chosen.engine in ("local", "ray")
    where = "" if here else " on the server's machine"
    typer.echo(printable(f"results go to {folder.resolve()}{where}"))
    line.prepare("start", "reading data, building networks, handshakes")
    place = {"resume" if resume else "out": folder}
    try:
        result = _quietly().run(chosen, **place, observers=[line], progress=False)
    finally:
        line.close()
    if not result.summary:
        typer.echo(f"completed in {time.perf_counter() - started:.1f} s; the results are in {folder.resolve()}{where}")
        if isinstance(chosen, Config):
            words = f"fedhet results {shlex.quote(str(folder.resolve()))} --engine {chosen.engine}"
            typer.echo(printable(f"{words} brings them here"))
        return
    console.print(closing_table(result.folder))
    typer.echo(_files(result.folder, "report.html", "summary.json", "history.jsonl", "clients.csv", "models/"))


def _files(folder: Path, *names: str) -> str:
    return f"{folder}: {', '.join(name for name in names if (folder / name).exists())}"  # models can be at the nodes


def _quietly(name: str = "fedhet.engines.running") -> Any:
    """Import and return the module `name`; limit Flower's logger to warnings after that, since the import resets it."""
    module = import_module(name)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    return module


@contextmanager
def _errors(*, everything_is_input: bool = False) -> Iterator[None]:
    """Context manager that prints errors, and exits with code 2 for invalid input and 1 for a failed run.

    With `everything_is_input`, each `FedhetError` counts as invalid input.
    """
    with ended_by_signals():
        try:
            yield
        except (ConfigError, DataError, ModelError) as error:
            _stop(str(error), BAD_INPUT)
        except FedhetError as error:
            _stop(str(error), BAD_INPUT if everything_is_input else FAILED)
        except BrokenPipeError:  # the output was closed, and typer exits quietly
            raise
        except OSError as error:
            drop_output()
            _stop(in_words(error), FAILED)
        except KeyboardInterrupt as error:
            _stop("\n".join(getattr(error, "__notes__", ["stopped"])), exit_code(error))


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(f"fedhet: {printable(message, keep=chr(10))}", err=True)
    raise typer.Exit(code)
