"""Running: what `fedhet run`, `flwr run` and `fedhet.run` have in common."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from torch import Tensor

from fedhet import config as configuration
from fedhet import population, registry
from fedhet.config import Config
from fedhet.errors import ConfigError
from fedhet.evaluation import evaluate
from fedhet.results.history import Row, read_history
from fedhet.results.progress import ProgressLine
from fedhet.results.recorder import RunDirectory
from fedhet.server import EvaluateFunction, FederatedStrategy, ModelFunction, Observer

log = logging.getLogger("flwr").getChild("fedhet")


RESUMABLE = (
    "rounds",
    "engine",
    "data",
    "device",
    "num-gpus",
    "timeout",
    "min-clients",
    "wait-for-clients",
    "state-dir",
)
"""Keys that may change when a run is resumed: how long and where it runs, not what it computes."""


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        folder: the run directory.
        summary: what `summary.json` holds; empty where the server wrote it to a disk that is not seen from here.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def history(self) -> list[Row]:
        """The rows of `history.jsonl`."""
        return read_history(self.folder)


def run(
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    engine: str | None = None,
    resume: str | Path | None = None,
    observers: Sequence[Observer] = (),
) -> RunResult:
    """Run a federation from beginning to end.

    Args:
        config: settings (kebab-case keys) or a TOML file; the preset `fedhenn/digits` without either.
        out: the run directory; a new one under `runs/` if left out.
        engine: `local`, `ray`, or a SuperLink connection of Flower's config; `local` unless `config` says otherwise.
        resume: go on with the run in this directory; its own configuration counts, `config` may change single keys.
        observers: told of every round, if its history can be read here.

    Raises:
        FedhetError: the configuration is wrong, the directory holds another run, or the run failed.
    """
    chosen = dict(configuration.read(Path(config)) if isinstance(config, str | Path) else config or {})
    if resume is not None:
        out, chosen = Path(resume), _resumed(Path(resume), chosen)
    elif not config:
        chosen = {"preset": configuration.DEFAULT_PRESET}
    if engine is not None:
        chosen["engine"] = engine
    complete = configuration.resolve(chosen)
    folder = Path(out or complete.out or new_folder(Path("runs"), complete)).resolve()
    if complete.engine in ("local", "ray"):  # elsewhere only the nodes have the data
        population.check(complete)
    if complete.engine == "local":
        from fedhet.engines.local import run_locally

        run_locally(complete, folder, resume=resume is not None, observers=observers)
    else:
        from fedhet.engines.flower import run_on_flower

        run_on_flower(complete, folder, resume=resume is not None, observers=observers)
    summary = folder / "summary.json"
    return RunResult(folder, json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {})


def serve(
    config: Config,
    grid: Grid,
    folder: Path,
    *,
    engine: str,
    resume: bool = False,
    shared: Tensor | None = None,
    model: ModelFunction | None = None,
    evaluate_fn: EvaluateFunction | None = None,
    observers: Sequence[Observer] = (),
) -> None:
    """The server's part of a run, on any grid, recorded in a run directory.

    Args:
        config: the complete configuration.
        grid: the clients.
        folder: the run directory.
        engine: its name, for the summary.
        resume: go on with the run in the folder.
        shared: raw inputs of the shared pool.
        model: the clients' models, where they are not the configured ones and the server needs them.
        evaluate_fn: evaluates the global model; by default on the common test set, where `test-on` asks for it.
        observers: told of every round, after it is recorded.

    Raises:
        FedhetError: as the strategy's `start`.
    """
    directory = RunDirectory(folder, config, engine, resume=resume)
    strategy = registry.strategy(config.method)(config, shared=shared, model=model, observers=[directory, *observers])
    strategy.state = directory.state or strategy.state
    if evaluate_fn is None and config.test_on != "local":
        evaluate_fn = _on_common_test(strategy)
    strategy.start(grid, evaluate_fn=evaluate_fn)


def make_server_app(
    *,
    model: ModelFunction | None = None,
    shared: Callable[[Config], Tensor] | None = None,
    evaluate_fn: EvaluateFunction | None = None,
) -> ServerApp:
    """A Flower ServerApp that runs the configured method.

    Args:
        model: the clients' models, as for `make_client_app`; only for what the server does with networks itself.
        shared: gives the raw inputs of the pool that all clients share, (n, ...); by default the configured data
            set's held-out pool, if `shared-samples` asks for one. Clients whose data bring the pool need none here.
        evaluate_fn: evaluates the global model at the server; by default on the configured data set's common test
            set, where `test-on` asks for it.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = configuration.resolve(context.run_config)
        engine = config.engine if "engine" in config.chosen else "flwr"
        home = Path.home() / ".fedhet" / "runs"
        folder = Path(config.out or new_folder(home, config)).resolve()
        pool = shared(config) if shared else population.shared_pool(config)
        log.info("results go to %s", folder)
        serve(
            config,
            grid,
            folder,
            engine=engine,
            resume=config.resume,
            shared=pool,
            model=model,
            evaluate_fn=evaluate_fn,
            observers=[ProgressLine(Console(force_terminal=False, highlight=False))],
        )

    return app


def _on_common_test(strategy: FederatedStrategy) -> EvaluateFunction:
    dataset = population.dataset_of(strategy.config)

    def evaluate_globally(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        network = strategy.global_network()
        score = evaluate(network, dataset.test, dataset.task, dataset.transform) if network is not None else None
        return MetricRecord({"accuracy": score.value, "loss": score.loss}) if score is not None else None

    return evaluate_globally


def _resumed(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} holds no run to resume")
    settings = configuration.read(folder / "config.toml")
    different = [key for key, value in changes.items() if key not in RESUMABLE and settings.get(key) != value]
    if different:
        raise ConfigError(
            f"{folder} was run with another {', '.join(different)}: a resumed run may change {', '.join(RESUMABLE)}"
        )
    return {**settings, **changes}


def new_folder(parent: Path, config: Config) -> Path:
    """A folder for a new run that is not there yet, named by method, data set and time."""
    stem = f"{config.method}-{config.dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())
