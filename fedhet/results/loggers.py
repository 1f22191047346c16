"""Observers that send a run to TensorBoard, Weights & Biases or MLflow (the key `log`); none of them is needed here.

Each gets the same numbers by round: accuracies and losses over clients, the training loss, the method's own metrics and
bytes. Where a server's own settings say nothing else, everything stays in the run directory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedhet.errors import ConfigError
from fedhet.files import locked
from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.options import Config, listed
from fedhet.results.history import flat


class TensorBoard(Observer):
    """Writes event files into `tensorboard/` of the run directory."""

    def __init__(self, folder: Path, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Add the round's numbers."""
        for name, value in flat(report.row).items():
            self._writer.add_scalar(name, value, report.row["round"])

    def finished(self, run: RunInfo) -> None:
        """Close the files."""
        self._writer.close()

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Close the files."""
        self._writer.close()


class WeightsAndBiases(Observer):
    """Logs offline into `wandb/` of the run directory, unless WANDB_MODE says otherwise; `wandb sync` sends it."""

    def __init__(self, folder: Path, config: Config) -> None:
        import os

        import wandb

        settings = {"project": "fedhet", "name": folder.name, "dir": str(folder), "config": config.flat()}
        self._run: Any = wandb.init(**settings, mode=os.environ.get("WANDB_MODE", "offline"))

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Add the round's numbers."""
        self._run.log(flat(report.row), step=report.row["round"])

    def finished(self, run: RunInfo) -> None:
        """End the run."""
        self._run.finish()

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """End the run as failed."""
        self._run.finish(exit_code=1)


class MLflow(Observer):
    """Logs into `mlflow.db` beside the run directory, where runs are compared, unless MLFLOW_TRACKING_URI is set."""

    def __init__(self, folder: Path, config: Config) -> None:
        import os

        import mlflow

        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{(folder.parent / 'mlflow.db').as_posix()}")
        with locked(folder.parent, wait=True):  # the first of several runs at a time makes the data base
            mlflow.set_experiment("fedhet")
        self._mlflow: Any = mlflow
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params({key: value for key, value in config.flat().items() if value != ""})

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Add the round's numbers."""
        named = {name.replace("/", "."): value for name, value in flat(report.row).items()}
        self._mlflow.log_metrics(named, step=report.row["round"])

    def finished(self, run: RunInfo) -> None:
        """End the run."""
        self._mlflow.end_run()

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """End the run as failed."""
        self._mlflow.end_run("FAILED")


LOGGERS: dict[str, Callable[[Path, Config], Observer]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def loggers(config: Config, folder: Path) -> list[Observer]:
    """The observers that the key `log` names.

    Raises:
        ConfigError: what one needs is not installed, or cannot start.
    """
    found = []
    for name in listed(config.log):
        try:
            found.append(LOGGERS[name](folder, config))
        except ImportError as error:
            raise ConfigError(f"log = {name!r} needs {name}, which is not installed: pip install {name}") from error
        except Exception as error:  # whatever others' packages raise
            raise ConfigError(f"log = {name!r} cannot start: {type(error).__name__}: {error}") from error
    return found
