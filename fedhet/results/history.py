"""The content of a run directory.

Values are means over examples. Bytes are payload bytes, times are in seconds.
"""

import csv
import json
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedhet.config import toml
from fedhet.data.names import Names
from fedhet.errors import FedhetError, damage
from fedhet.messages.protocol import names_in
from fedhet.methods.options import OWN
from fedhet.results.absences import absences, unscored
from fedhet.tasks import direction
from fedhet.utils.files import NAMES, check_links, read_safetensors
from fedhet.utils.statistics import (
    ClientRow,
    Metric,
    as_statistics,
    client_order,
    metric_in,
)
from fedhet.utils.text import all_printable, printable

Row = dict[str, Any]
Which = Literal["received", "trained"]
TestSet = Literal["own", "common", "validation"]

MEASURED = ("seconds", "cpu_seconds", "peak_memory", "ran")
"""Names in `summary.json` of what a repeated run measures anew, and of how it was started."""

_log = logging.getLogger(__name__)


def read_history(folder: Path | str) -> list[Row]:
    """Read the rows of `history.jsonl`, one per round; raises a `FedhetError` if a row is damaged."""
    path = Path(folder) / "history.jsonl"
    rows: list[Row] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            rows.append(parse_object(line))
        except ValueError as error:
            raise FedhetError(f"{path}, line {number}: damaged ({error}); restore it from a copy") from None
    return rows


def _lines(path: Path) -> list[str]:
    """Return the complete lines of a file, or [] without a file; log a warning if the last line is incomplete."""
    if not path.exists():
        return []
    # A shortened number is still a number, so only its end shows that a line is complete.
    whole, end, torn = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    if torn:
        _log.warning("%s: the last line is incomplete, probably after a crash, and is ignored", path)
    return whole.split("\n") if end else []


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, and escape invisible characters in it; raises a `ValueError` for any other text."""
    try:
        value = all_printable(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_clients(folder: Path | str) -> list[ClientRow]:
    """Read the rows of `clients.csv`, one per client and round; raises a `FedhetError` if a row is damaged."""
    path = Path(folder) / "clients.csv"
    # The first line has the name of the task's metric in place of `accuracy`.
    reader = csv.DictReader(_lines(path)[1:], [column.name for column in fields(ClientRow)])
    try:
        return [_client_row(record) for record in reader]
    except (TypeError, ValueError, AttributeError, csv.Error) as error:
        raise FedhetError(
            f"{path}, line {1 + reader.line_num}: damaged ({damage(error)}); restore it from a copy"
        ) from None


def _client_row(record: Mapping[str, str]) -> ClientRow:
    disclosed = record["accuracy"], record["loss"], record.get("epsilon")
    accuracy, loss, epsilon = (float(number) if number else None for number in disclosed)
    round, examples, up, down = (int(record[name]) for name in ("round", "examples", "bytes_up", "bytes_down"))
    client, architecture = printable(record["client"]), printable(record["architecture"])
    return ClientRow(round, client, architecture, examples, accuracy, loss, up, down, epsilon)


def final_clients(rows: Iterable[ClientRow]) -> list[ClientRow]:
    """Return each client's row of the last round in which it was evaluated, in order of client name."""
    last = {row.client: row for row in sorted(rows, key=lambda row: row.round) if row.accuracy is not None}
    return [last[client] for client in sorted(last, key=client_order)]


def learning_curve(
    rows: Iterable[Row],
    which: Which = "trained",
    statistic: str = "weighted",
    test: TestSet = "own",
    measure: Literal["metric", "loss"] = "metric",
    clients: Collection[str] | None = None,
) -> list[tuple[int, float]]:
    """Return pairs (round, value) with the metric or loss (`measure`) after each round, from rows of `history.jsonl`.

    `which` selects the networks as clients `received` them from the server, or as they `trained` them. `test` selects
    the clients' `own` test sets, the `common` one, or `validation` examples. `statistic` is `weighted` (the mean over
    clients, by examples), `mean`, `std`, `min` or `max`.
    With `clients`, the values are weighted means of these clients' metrics, where metrics by client are known.
    """
    curve: dict[int, float] = {}
    for row in rows:
        evaluated = (row if test == "own" else row.get(test) or {}).get(which)
        values = metric_in(evaluated) if measure == "metric" else (evaluated or {}).get("loss")
        value = as_statistics(values).get(statistic)
        if value is not None and clients is not None and (scores := client_scores(row, which, test)):
            value = Metric.total(scores[client] for client in scores.keys() & {*clients}).value
        if value is not None and math.isfinite(value):
            curve[round_behind(row, which)] = float(value)
    return sorted(curve.items())


def round_behind(row: Row, which: Which) -> int:
    """Return the round whose models are evaluated in a row of the history.

    In the evaluation after the last round, and of received models, models are those of the round before.
    """
    return int(row["round"]) - (which == "received" or row.get("final", False))


def client_scores(row: Row, which: Which, test: TestSet) -> dict[str, Metric]:
    """Return the metric of each client in an evaluation, or {} if the server evaluated the global model."""
    evaluated = (row if test == "own" else row.get(test) or {}).get(which) or {}
    by_client = row.get("scores", {}).get(which if test == "own" else f"{test}-{which}", {})
    if "clients" not in evaluated:
        return {}
    return {client: Metric(tuple(values), tuple(weights)) for client, (values, weights) in by_client.items()}


def in_part(rows: Iterable[Row], which: Which, clients: Collection[str]) -> set[int]:
    """Return the rounds of a `learning_curve` whose values lack some of `clients`, which the round did not score."""
    lacking = {}
    for row in rows:
        if scores := client_scores(row, which, "own") or client_scores(row, which, "common"):
            lacking[round_behind(row, which)] = not scores.keys() >= {*clients}
    return {round for round, lacks in lacking.items() if lacks}


def last_round(rows: Iterable[Row]) -> int:
    """Return the number of the last round in `rows`, or 0 without rounds; an evaluation at the end is not a round."""
    return max((row["round"] for row in rows if not row.get("final")), default=0)


def scored_curve(rows: Sequence[Row], which: Which, **options: Any) -> list[tuple[int, float]]:
    """Return the `learning_curve` on clients' own test sets or, if there are none, on the common one.

    `which` selects the networks as clients `received` them from the server, or as they `trained` them; `options` are
    the arguments `measure` and `clients` of `learning_curve`.
    """
    return learning_curve(rows, which, **options) or learning_curve(rows, which, test="common", **options)


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory; files that an unfinished run lacks are empty.

    `settings` has the configuration by key, `versions` the versions of packages, and `ran` the host and the command.
    `rows` are the lines of `history.jsonl`, `clients` those of `clients.csv`, and `summary` is from `summary.json`.
    """

    folder: Path
    settings: dict[str, Any]
    versions: dict[str, Any]
    ran: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    clients: list[ClientRow] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def ended_early(self) -> bool:
        """Whether `patience` or an observer ended training before the last round."""
        return self.summary.get("status") == "completed" and self.summary["rounds"] < self.wanted

    @property
    def wanted(self) -> int:
        """The configured number of rounds, with that of the `closing-epochs`; 0 if the method settles it."""
        rounds = self.settings.get("rounds", 0)
        return rounds + bool(self.settings.get("closing-epochs")) if rounds else 0

    @property
    def personal(self) -> Which | None:
        """Which networks are the personal models: `received` or (after training) `trained`; None without a summary."""
        return self.summary.get("personal")

    @property
    def scored(self) -> Which:
        """Which networks' accuracy is the result: `received` or, after training, `trained` (the default)."""
        return self.personal or "trained"

    @property
    def has_global(self) -> bool:
        """Whether the method has a global model; True without `summary.json`."""
        return not self.summary or self.summary.get("global_accuracy") is not None

    @property
    def scores(self) -> list[str]:
        """The metrics that the run has: `personal`, `global` or both; the first one is the run's main result."""
        personal = self.personal != "received" or not self.has_global  # else the global model scores the method
        return ["personal"] * personal + ["global"] * self.has_global

    def accuracy(self, which: str, statistic: str = "weighted") -> float | None:
        """Return the task's metric at the end of the run, or None if it was not measured.

        `which` is `personal` (personal models), `global` (the global model), `validation` (personal models, validation
        examples), `received` or `trained` (networks as clients received them from the server, or trained them), `best`
        (the models in `models/best`) or `common` (on the common test set, the global or, without one, personal models).
        `statistic` over clients is `weighted` (the mean weighted by examples), `mean`, `std`, `min` or `max`.
        """
        values = self.summary.get(f"{which}_accuracy")
        if which == "best":
            values = self.summary.get("best", {}).get("accuracy")
        elif which == "common":
            common = self.summary.get("common") or {}
            values = metric_in(common.get("received") or common.get("trained"))
        return as_statistics(values).get(statistic)

    @property
    def absences(self) -> list[str]:
        """Lines about clients without a final score, with their names and the reasons."""
        return [*absences(self.rows, self.scored, shared=self.has_global)]

    @property
    def clients_there(self) -> set[str]:
        """The names of the clients that took part and did not fail in the last evaluation, without unseen clients."""
        unseen = (client for row in self.rows for client in row.get("unseen_clients", {}).get("clients", ()))
        return {row.client for row in self.clients} - unscored(self.rows, self.scored).keys() - {*unseen}

    def by_client(self, which: Which, test: TestSet) -> dict[str, Metric]:
        """Return the metric of each client behind the last accuracy of `which` networks on `test`; {} if unknown.

        If the server evaluated the global model, the accuracy counts for every client.
        """
        for row in reversed(self.rows):
            if curve := learning_curve([row], which, test=test):
                if "clients" in (row if test == "own" else row[test])[which]:
                    return client_scores(row, which, test)
                return dict.fromkeys(self.clients_there, Metric((curve[0][1],), (1.0,)))
        return {}

    def best_by_client(self, test: TestSet) -> dict[str, Metric]:
        """Return the metric of each client behind the accuracy `best` on `test`; {} if unknown."""
        best = self.summary.get("best", {}).get("clients", {})
        metrics = dict[str, Metric]()
        for row in self.rows:
            trained = round_behind(row, self.scored)
            of_round = client_scores(row, self.scored, test).items()
            metrics |= {client: metric for client, metric in of_round if best.get(client, {}).get("round") == trained}
        return metrics

    @property
    def metric(self) -> str:
        """The name of the task's metric, such as `accuracy`."""
        return str(self.summary.get("metric", "accuracy"))

    @property
    def direction(self) -> int:
        """1 if higher values of the metric are better, and -1 if lower ones are."""
        return direction(self.metric)

    @property
    def title(self) -> str:
        """A title with the method and the data set, such as `fedavg on digits`."""
        dataset = (self.summary or self.settings).get("dataset", "?")
        return f"{self.settings.get('method', '?')} on {'own data' if dataset == OWN else dataset}"


def run_of(path: Path) -> Path | None:
    """Return the directory of the run to which `path` belongs: it, its `models` or a `models/round-N`; else None."""
    return next((folder for folder in (path, *path.parents[:2]) if (folder / "config.toml").is_file()), None)


def names_of_model(path: Path) -> Names:
    """Return names of classes and columns in the order that the network in a file has them, if known."""
    return names_in(read_safetensors(path, "pt")[1].get(NAMES, "")) if path.is_file() else {}


def read_run(folder: Path | str) -> RunFiles:
    """Read all files of a run directory; raises a `FedhetError` if `folder` is not one or a file is damaged."""
    folder = Path(folder)
    config = folder / "config.toml"
    if not folder.is_dir():
        raise FedhetError(f"{folder}: no such folder; give the directory of a run")
    check_links(folder)
    if not config.is_file():
        raise FedhetError(f"{folder} is not the directory of a run: it has no config.toml; give another directory")
    settings = all_printable(toml.load(config))
    path = folder / "summary.json"
    try:
        summary = parse_object(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise FedhetError(f"{path}: damaged ({error}); restore it from a copy") from None
    return RunFiles(
        folder=folder,
        versions=settings.pop("versions", {}),
        ran=settings.pop("ran", {}),
        settings=toml.flatten(settings),
        rows=read_history(folder),
        clients=read_clients(folder),
        summary=summary,
    )


@contextmanager
def showing(folder: object) -> Iterator[None]:
    """Context manager that reports an unexpected exception as a `FedhetError` about damaged files in `folder`."""
    try:
        yield
    except (FedhetError, OSError):
        raise
    except Exception as error:
        raise FedhetError(f"the files in {folder} are damaged ({damage(error)}): restore them from a copy") from error
