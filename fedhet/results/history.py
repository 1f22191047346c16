"""The rows of a run as they are read again: the history by round, and the clients by round.

Accuracies and losses are means over examples (the key `accuracy` holds whatever the task's metric is, see `metric` in
`summary.json`), bytes are payload bytes, times are seconds.
"""

import csv
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

from fedhet.errors import FedhetError
from fedhet.results import shapes
from fedhet.rows import STATISTICS, ClientRow, Statistics, client_order
from fedhet.text import printable

Row = dict[str, Any]
Which = Literal["received", "trained"]
TestSet = Literal["own", "common", "validation"]

_log = logging.getLogger(__name__)


def read_history(folder: Path | str) -> list[Row]:
    """Read `history.jsonl` of a run, one dictionary a round, in the order of the file.

    A last line that a crash left torn is ignored with a warning in the log. Without the file there are no rows.

    Raises:
        FedhetError: a line before the last one cannot be read.
    """
    path = Path(folder) / "history.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = shapes.parsed(line, shapes.ROW)
        except ValueError as error:
            if number < len(lines):
                raise FedhetError(f"{path}, line {number}: damaged ({error}); every line must be one round") from None
            _log.warning("%s, line %d: torn, probably by a crash in mid-write; ignored", path, number)
        else:
            rows.append(row)
    return rows


def read_clients(folder: Path | str) -> list[ClientRow]:
    """Read `clients.csv` of a run; a torn last line is ignored with a warning, a missing file gives [].

    Raises:
        FedhetError: a line before the last one cannot be read.
    """
    path = Path(folder) / "clients.csv"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole, _, torn = text.rpartition("\n")
    if torn:
        # A number cut short is still a number, so only the end of the line tells that the line is whole.
        _log.warning("%s: the last line is torn, probably by a crash in mid-write; ignored", path)
    reader = csv.DictReader(whole.split("\n"))
    try:
        return [ClientRow(**{name: read(record[name]) for name, read in _CELLS.items()}) for record in reader]
    except (KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
        raise FedhetError(f"{path}, line {reader.line_num}: damaged ({error!r})") from None


def _count(text: str) -> int:
    shapes.check(number := int(text), shapes.WHOLE)
    return number


def _score(text: str) -> float | None:
    return float(text) if text else None


_CELLS: dict[str, Callable[[str], Any]] = {
    **{"round": _count, "client": printable, "architecture": printable, "examples": _count},
    **{"accuracy": _score, "loss": _score, "bytes_up": _count, "bytes_down": _count},
}
"""The columns of `clients.csv`, and how each is read."""


def final_clients(rows: Iterable[ClientRow]) -> list[ClientRow]:
    """The last evaluated row of every client, in order of client name."""
    last = {row.client: row for row in sorted(rows, key=lambda row: row.round) if row.accuracy is not None}
    return [last[client] for client in sorted(last, key=client_order)]


def accuracy_curve(
    rows: Iterable[Row], which: Which = "trained", statistic: str = "weighted", test: TestSet = "own"
) -> list[tuple[int, float]]:
    """The accuracy by round: pairs (r, accuracy after round r), with rounds ascending.

    What a round received is the model as it was after the round before; the final row, which only evaluates, stands for
    the last training round. Where a round was evaluated twice the later evaluation counts.

    Args:
        rows: the history, see `read_history`.
        which: the models as clients `received` them, or the personal models after they were `trained`.
        statistic: over clients, one of `STATISTICS`; a single model on the common test set has just one value.
        test: on the clients' `own` test parts, on the `common` test set or on the clients' `validation` parts.
    """
    curve: dict[int, float] = {}
    for row in rows:
        block = (row if test == "own" else row.get(test) or {}).get(which)
        accuracy = (block or {}).get("accuracy")
        value = accuracy.get(statistic) if isinstance(accuracy, Mapping) else accuracy
        if value is not None and math.isfinite(value):
            before = which == "received" or row.get("final", False)
            curve[row["round"] - 1 if before else row["round"]] = float(value)
    return sorted(curve.items())


def scored_curve(rows: Sequence[Row], which: Which) -> list[tuple[int, float]]:
    """The accuracy that a run is scored by, by round: on the clients' own test parts, else on the common test set.

    Args:
        rows: the history, see `read_history`.
        which: see `accuracy_curve`.
    """
    return accuracy_curve(rows, which) or accuracy_curve(rows, which, test="common")


def flat(row: Row) -> dict[str, float]:
    """The numbers of a round that were measured, under names such as `trained/accuracy/weighted` and `bytes/up`.

    Those on the common test set and on validation parts have it in front, as `common/trained/accuracy/weighted`.
    """
    numbers: dict[str, Any] = {}
    for test in ("", "common", "validation"):
        tested = (row.get(test) or {}) if test else row
        for which, kind in product(("received", "trained"), ("accuracy", "loss")):
            values, place = (tested.get(which) or {}).get(kind), f"{test}/{which}/{kind}".removeprefix("/")
            of_each = (
                {f"/{name}": value for name, value in values.items()} if isinstance(values, dict) else {"": values}
            )
            numbers |= {place + name: value for name, value in of_each.items()}
    numbers |= {"train/loss": row.get("train_loss"), "bytes/up": row["bytes_up"], "bytes/down": row["bytes_down"]}
    numbers |= {f"metrics/{name}": value for name, value in (row.get("metrics") or {}).items()}
    return {name: float(value) for name, value in numbers.items() if value is not None}


def unseen_lines(rows: Sequence[Row]) -> dict[tuple[TestSet, str], list[float | None]]:
    """The accuracy of those who came after the last round, weighted by their examples, by epoch of training alone.

    Args:
        rows: the history, see `read_history`.

    Returns:
        By test set and start (`received`, `scratch`), before the first epoch and after each; empty without unseen
        clients.
    """
    record: Row = next((row["unseen_clients"] for row in reversed(rows) if row.get("unseen_clients")), {})
    tests: tuple[TestSet, ...] = ("own", "common")
    return {
        (test, start): [((each or {}).get("accuracy") or {}).get("weighted") for each in by_epoch]
        for test in tests
        for start, by_epoch in record.get(test, {}).items()
    }


def last10(
    rows: Sequence[Row], personal: Which, *, has_global: bool = True, test: TestSet = "own"
) -> dict[str, Statistics | None] | None:
    """Means over the last ten rounds, one after the other, of the statistics over clients; nothing is picked.

    Args:
        rows: the history, see `read_history`.
        personal: which evaluation is that of the method's personal model (`personal` of `summary.json`).
        has_global: whether the method has a global model; without one its part is None.
        test: see `accuracy_curve`.

    Returns:
        `personal_accuracy` with all `STATISTICS` and `global_accuracy` with `weighted` and `mean`, each None where one
        of the last ten rounds was not evaluated; None where both are, or there are fewer rounds.
    """
    last = max((row["round"] for row in rows if not row.get("final", False)), default=0)
    if last < 10:
        return None

    def means(which: Which, statistics: Sequence[str]) -> Statistics | None:
        curves = {name: dict(accuracy_curve(rows, which, name, test)) for name in statistics}
        ten = {name: [curve.get(round) for round in range(last - 9, last + 1)] for name, curve in curves.items()}
        if any(value is None for values in ten.values() for value in values):
            return None
        return {name: math.fsum(value or 0.0 for value in values) / 10 for name, values in ten.items()}

    means_of = {
        "personal_accuracy": means(personal, STATISTICS),
        "global_accuracy": means("received", STATISTICS[:2]) if has_global else None,
    }
    return means_of if any(means_of.values()) else None
