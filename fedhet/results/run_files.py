"""A run directory read as a whole; `README.md` describes its files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhet import toml
from fedhet.errors import FedhetError
from fedhet.results.history import Row, Which, parse_object, read_clients, read_history, scored_curve
from fedhet.rows import ClientRow
from fedhet.text import all_printable


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory; parts that a failed or unfinished run has not written are empty or None."""

    folder: Path
    settings: dict[str, Any]
    versions: dict[str, Any]
    ran: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    clients: list[ClientRow] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    matrices: dict[str, dict[str, Any]] = field(default_factory=dict)
    partition: dict[str, Any] | None = None

    @property
    def personal(self) -> Which | None:
        """Which evaluation is that of the method's personal model; None as long as there is no summary."""
        return self.summary.get("personal") if self.summary else None

    @property
    def scored(self) -> Which:
        """Which evaluation scores the run."""
        return self.personal or "trained"

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The accuracy by round that scores the run."""
        return scored_curve(self.rows, self.scored)

    @property
    def has_global(self) -> bool:
        """Whether the method has a global model, as far as the files tell."""
        return self.summary is None or self.summary.get("global_accuracy") is not None

    @property
    def has_personal(self) -> bool:
        """Whether the method's score is that of models which clients have for themselves, not of the global one."""
        return self.personal != "received" or not self.has_global

    def accuracy(self, which: str, statistic: str = "weighted") -> float | None:
        """A statistic of the accuracies `personal`, `global`, `received` or `trained` of the summary."""
        return ((self.summary or {}).get(f"{which}_accuracy") or {}).get(statistic)

    @property
    def metric(self) -> str:
        """The name of the task's metric, `accuracy` or `auc`."""
        return str((self.summary or {}).get("metric", "accuracy"))

    @property
    def rounds(self) -> int:
        """The number of rounds of training in the history."""
        return sum(row["round"] > 0 and not row.get("final", False) for row in self.rows)


def read_run(folder: Path | str) -> RunFiles:
    """Read all that a run directory holds, of finished, failed and unfinished runs alike.

    Raises:
        FedhetError: the folder is not a run directory, or one of its files is damaged.
    """
    folder = Path(folder)
    config = folder / "config.toml"
    if not folder.is_dir():
        raise FedhetError(f"{folder}: no such folder; give the directory of a run")
    if not config.is_file():
        raise FedhetError(f"{folder} is not the directory of a run: it holds no config.toml")
    settings = all_printable(toml.load(config))
    return RunFiles(
        folder=folder,
        versions=settings.pop("versions", {}),
        ran=settings.pop("ran", {}),
        settings=toml.flatten(settings),
        rows=read_history(folder),
        clients=read_clients(folder),
        summary=_read_json(folder / "summary.json"),
        matrices=_read_json(folder / "matrices.json") or {},
        partition=_read_json(folder / "partition.json"),
    )


@contextmanager
def showing(folder: object) -> Iterator[None]:
    """Turn whatever a run directory's values raise while they are used into a FedhetError: they are damaged."""
    try:
        yield
    except (FedhetError, OSError):
        raise
    except Exception as error:
        raise FedhetError(
            f"{folder} cannot be read, since its files hold values that no run writes ({type(error).__name__}: {error})"
        ) from error


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return parse_object(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise FedhetError(f"{path}: damaged ({error})") from None
