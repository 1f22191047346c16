"""Observers of a run, and loggers for TensorBoard, Weights & Biases and MLflow (the key `log`)."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedhet.errors import ConfigError
from fedhet.methods.method import Traits
from fedhet.methods.options import Value
from fedhet.results.state import State
from fedhet.utils.files import locked
from fedhet.utils.statistics import ClientRow


@dataclass
class RoundReport:
    """The results of a round: its line of `history.jsonl` (`row`) and its rows of `clients.csv` (`clients`)."""

    row: dict[str, Any]
    clients: list[ClientRow]


@dataclass(frozen=True)
class RunInfo:
    """The description of a run that observers receive.

    Attributes:
        method: the method's name.
        traits: the method's properties, such as which arrays clients share.
        state: the strategy's state after the last round.
        metric: the name of the task's metric.
        own_data: whether clients have the user's data, not the configured data set.
        devices: the different devices on which clients compute.
        test_on: the test sets in use (`Config.test_on`); empty before the handshake.
        privacy: epsilon and delta of Flower's differential privacy; empty without it.
        warnings: warnings about clients and settings so far.
        classes: in a simulation, each client's numbers of training examples by name of the class.
        task: the name of the task; empty before the handshake.
        replaced: what all clients have in place of configuration keys, such as `model`.
    """

    method: str
    traits: Traits
    state: State
    metric: str = "accuracy"
    own_data: bool = False
    devices: tuple[str, ...] = ()
    test_on: str = ""
    privacy: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    classes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    task: str = ""
    replaced: Collection[str] = ()


class Observer:
    """Base class of observers of a run, which are called during the run. Subclasses override the methods they need."""

    def started(self, run: RunInfo, first: int, last: int) -> None:
        """Called before the first round; the rounds to run have the numbers `first` to `last`."""

    def answered(self, done: int, asked: int) -> None:
        """Called after each reply of a client; `done` of `asked` clients have replied."""

    def doing(self, what: str) -> None:
        """Called as something slow begins, such as `starting 2 worker processes`, and with "" at its end."""

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Called after each round with its results (`report`), when `run.state` has been updated."""

    def heard(self, line: str) -> None:
        """Called with the server's line of progress about a round, if its files are on another machine."""

    def finished(self, run: RunInfo) -> None:
        """Called when the run is complete, after the evaluation at the end."""

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Called if the run fails with the exception `error`."""


def flat(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a row of `history.jsonl` by name, such as `common/trained/accuracy/weighted`."""
    numbers = {"train/loss": row.get("train_loss"), "bytes/up": row["bytes_up"], "bytes/down": row["bytes_down"]}
    numbers |= {f"metrics/{name}": value for name, value in (row.get("metrics") or {}).items()}
    tested = {"": row, "common/": row.get("common") or {}, "validation/": row.get("validation") or {}}
    for test, which in product(tested, ("received", "trained")):
        for measure, values in (tested[test].get(which) or {}).items():
            by_name = values if isinstance(values, dict) else {"": values}
            place = f"{test}{which}/{measure}"
            if measure != "clients":
                numbers |= {f"{place}/{name}".removesuffix("/"): value for name, value in by_name.items()}
    return {name: float(value) for name, value in numbers.items() if value is not None}


class Logger(Observer):
    """Observer that calls the function `log(numbers by name, round)` after each round, and `end(completed)` last."""

    def __init__(self, log: Callable[[dict[str, float], int], object], end: Callable[[bool], object]) -> None:
        self._log, self._end = log, end

    def round(self, run: RunInfo, report: RoundReport) -> None:
        self._log(flat(report.row), report.row["round"])

    def finished(self, run: RunInfo) -> None:
        self._end(True)

    def failed(self, run: RunInfo, error: BaseException) -> None:
        self._end(False)


def _tensorboard(folder: Path, settings: Mapping[str, Value]) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(numbers: dict[str, float], round: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, round)

    return Logger(log, lambda completed: writer.close())


def _wandb(folder: Path, settings: Mapping[str, Value]) -> Logger:
    import wandb

    place = {"project": "fedhet", "name": folder.name, "dir": str(folder)}
    run = wandb.init(**place, config=dict(settings), mode=os.environ.get("WANDB_MODE", "offline"))
    return Logger(
        lambda numbers, round: run.log(numbers, step=round), lambda completed: run.finish(exit_code=int(not completed))
    )


def _mlflow(folder: Path, settings: Mapping[str, Value]) -> Logger:
    import mlflow

    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{(folder.parent / 'mlflow.db').as_posix()}")
    with locked(folder.parent, wait=True):  # so that only one of several runs creates the data base
        mlflow.set_experiment("fedhet")
    mlflow.start_run(run_name=folder.name)
    mlflow.log_params({key: value for key, value in settings.items() if value != ""})

    def log(numbers: dict[str, float], round: int) -> None:
        mlflow.log_metrics({name.replace("/", "."): value for name, value in numbers.items()}, step=round)

    return Logger(log, lambda completed: mlflow.end_run("FINISHED" if completed else "FAILED"))


LOGGERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def loggers(names: Sequence[str], folder: Path, settings: Mapping[str, Value]) -> list[Observer]:
    """Return the named loggers for the run in `folder` with configuration `settings`; failures raise a ConfigError."""
    observers: list[Observer] = []
    for name in names:
        try:
            observers.append(LOGGERS[name](folder, settings))
        except ImportError as error:
            raise ConfigError(f"log = {name!r} needs {name}, which is not installed: pip install {name}") from error
        except Exception as error:  # whatever others' packages raise
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"log = {name!r} cannot start: {reason}; correct this, or remove it from log") from error
    return observers
