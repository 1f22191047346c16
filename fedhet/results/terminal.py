"""The output of a run on a terminal (progress and closing table), and functions that format numbers.

Progress is an updated line on a terminal, and a line for each round elsewhere.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import progress
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from fedhet.results.absences import absences
from fedhet.results.history import (
    RunFiles,
    TestSet,
    Which,
    final_clients,
    last_round,
    read_history,
    read_run,
    scored_curve,
)
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.utils.statistics import STATISTICS, metric_in
from fedhet.utils.text import counted, printable

UNDISCLOSED = "undisclosed"
WORDS = ("method", "models", "architecture")
"""Headings of columns of words, which are aligned to the left."""

_LEAST = (
    *("own steps", "public", "labelled", "models", "seeds", "steps", "worst tenth", "p", "global"),
    *("mean loss", "examples", "clients", "max", "min"),
    *("validation", "std", "mean", "shape", "test", "range"),
)
"""Headings of the columns that are left out on a narrow terminal, the least important first."""

_FOLDED = 20
"""Width, in characters, to which a column of numbers by class can shrink."""

_WIDEST = 1000  # width, in characters, of tables that are printed to a file


@dataclass(frozen=True)
class TerminalTable:
    """A table (rows of cells, headings first), which leaves out less important columns on a narrow terminal.

    `file` is the name of the file with all columns.
    """

    lines: Sequence[Sequence[str]]
    file: str = "comparison.md"

    def __str__(self) -> str:
        console = Console(file=StringIO(), color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(zip(*self.lines, strict=True))
        room = options.max_width if console.is_terminal else _WIDEST
        for heading in _LEAST:
            if sum(_width(column) + 3 for column in columns) - 3 > room:
                columns = [column for column in columns if column[0] != heading]
        hidden = [heading for heading in self.lines[0] if heading not in {column[0] for column in columns}]
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for heading, *_ in columns:
            words = heading in WORDS
            table.add_column(heading, justify="left" if words else "right", overflow="fold", no_wrap=words)
        for line in list(zip(*columns, strict=True))[1:]:
            table.add_row(*line)
        yield from console.render(table, options.update(max_width=room))
        if hidden:
            yield Text(f"(no room for {', '.join(hidden)}: see {self.file})")


def _width(column: Sequence[str]) -> int:
    longest = max(map(len, column))
    return min(longest, _FOLDED) if column[0] == "classes" else longest


def format_bytes(number: float) -> str:
    """Format a number of bytes in decimal units, such as `931 B`, `12.3 KB` or `4.56 MB`."""
    size = float(number)
    unit = "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size = size / 1000
        unit = larger
    return f"{size:.0f} B" if unit == "B" else f"{size:#.3g} {unit}".replace(". ", " ")


def format_value(value: float | None) -> str:
    """Format an accuracy or a loss with three decimals; None becomes `-`."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def format_seconds(seconds: float | None) -> str:
    """Format a duration as `5.0 s`, `3 min 20 s` (from two minutes) or `2 h 5 min` (from two hours); None as `-`."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def by_architecture(run: RunFiles) -> list[list[str]]:
    """Return a table of clients' last accuracies, headings first: a row by architecture, and one for all clients."""
    final = final_clients(run.clients)
    if not final:
        return []
    names = sorted({row.architecture for row in final})
    groups = [(name or UNDISCLOSED, [row for row in final if row.architecture == name]) for name in names]
    lines = [["architecture", "clients", "examples", f"mean {run.metric}", "min", "max", "mean loss"]]
    for name, rows in [*groups, ("all", final)]:
        accuracies = [row.accuracy for row in rows if row.accuracy is not None]
        losses = [row.loss for row in rows if row.loss is not None]
        numbers = (fmean(accuracies), min(accuracies), max(accuracies), fmean(losses) if losses else None)
        lines.append([name, str(len(rows)), str(sum(row.examples for row in rows)), *map(format_value, numbers)])
    return lines


def headline(run: RunFiles) -> str:
    """Return a one-line summary of a run: method, accuracies, bytes, time, and failures if there are any."""
    method = run.settings.get("method", "unknown method")
    summary = run.summary
    if not summary:
        return f"{method}: unfinished, {last_round(run.rows)} rounds recorded"
    parts: list[str] = []
    for which in run.scores:
        weighted, mean = (format_value(run.accuracy(which, name)) for name in STATISTICS[:2])
        beside = f" ({words})" if (words := stage(run, which)) else ""
        parts.append(f"{which} {run.metric} {weighted} weighted, {mean} mean{beside}")
    if not run.has_global:
        served = metric_in((summary.get("common") or {}).get("received"))
        on_test = isinstance(served, float)  # a number if the server measured it, and not clients
        parts.append(f"the server's model {served:.3f} on the common test set" if on_test else "no global model")
    if "best" in summary:
        part = f" ({words})" if (words := best_clients(run)) else ""
        parts.append(f"best by validation {format_value(run.accuracy('best'))}{part}")
    parts.append(f"{format_bytes(summary.get('bytes_up', 0))} up, {format_bytes(summary.get('bytes_down', 0))} down")
    parts.append(format_seconds(summary.get("seconds")))
    if unseen := summary.get("unseen_clients"):
        received, scratch = unseen["received_accuracy"], unseen["scratch_accuracy"]
        parts.append(
            f"unseen clients {format_value(received[0])} as received, {format_value(received[-1])} after "
            f"{len(received) - 1} epochs alone (from scratch {format_value(scratch[-1])})"
        )
    parts += [line.partition(":")[0] for line in run.absences]  # without names and reasons
    if summary.get("failures"):
        parts.append(f"failures: {summary['failures']}")
    if summary.get("status") != "completed":
        parts.append(str(summary.get("status")).upper())
    return f"{summary.get('method', method)}: " + "; ".join(parts)


def stage(run: RunFiles, which: str) -> str:
    """Return a note on whether the accuracy `which` was measured before or after the last aggregation.

    `which` is `personal` or `global`. The note includes the accuracy at the other time if it is known and different,
    with the number of clients if that differs.
    """
    received = run.personal == "received"
    at_other_time: Which = "trained" if received else "received"
    other = run.accuracy(at_other_time)
    named = which != run.scores[0] or other in (None, run.accuracy("personal"))
    test: TestSet = "common" if run.settings.get("test-on") == "global" else "own"
    clients, of_other = (len(run.by_client(networks, test)) for networks in (run.scored, at_other_time))
    value = f"{format_value(other)} over {of_other} clients instead of {clients}"
    if clients == of_other or not of_other:
        value = format_value(other)
    if which == "global" or received:
        words = "after the last aggregation"
        return words if named else f"{words}; before it, after local training, {value}"
    if run.has_global:
        return "after local training"
    return "" if named else f"after local training; as received, after the last aggregation, {value}"


def best_clients(run: RunFiles) -> str:
    """Return a note on the number of clients behind the accuracy of the best models, if others were ever evaluated."""
    name = f"common-{run.scored}" if run.settings.get("test-on") == "global" else run.scored
    ever = {client for row in run.rows for client in row.get("scores", {}).get(name, ())}
    best = run.summary["best"]["clients"]
    return f"over {len(best)} of {len(ever)} clients" if 0 < len(best) < len(ever) else ""


def closing_table(folder: Path | str) -> Group | str:
    """Return title, table and summary line for the end of the run in `folder`; only that line without evaluations."""
    run = read_run(folder)
    lines = by_architecture(run)
    if not lines:
        return headline(run)
    return Group(Text(run.title), TerminalTable(lines, "clients.csv"), Text(headline(run)))


class ProgressLine(Observer):
    """Observer that shows progress in a line of a console; earlier rounds of a resumed run are read from `folder`."""

    def __init__(self, console: Console, folder: Path | None = None) -> None:
        self._console, self._folder = console, folder
        text = [progress.TextColumn(column, markup=False) for column in ("{task.description}", "{task.fields[news]}")]
        bar = [progress.BarColumn()] if console.width >= 100 else []
        times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        columns = text[0], *bar, progress.MofNCompleteColumn(), text[1], *times
        self._live = progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._live.add_task("", total=None, news="")
        self._bytes = self._last = 0
        self._started = time.monotonic()
        self._news, self._numbers, self._rows = "", list[str](), list[dict[str, Any]]()
        self._doing: list[str] = []

    def prepare(self, name: str, doing: str) -> None:
        """Show the line with the label `name` before the first round; `doing` describes the current step."""
        self._live.update(self._task, description=printable(name), news=doing)
        self._live.start()

    def started(self, run: RunInfo, first: int, last: int) -> None:
        self._last, self._started = last, time.monotonic()
        earlier = read_history(self._folder) if self._folder and first > 1 else []
        for row in (row for row in earlier if row["round"] < first):
            self._started -= row["timing"]["seconds"]
            self._bytes += row["bytes_up"] + row["bytes_down"]
            self._rows.append(row)
        self._live.update(self._task, total=last, completed=first - 1)
        self.prepare(run.method, "")

    def answered(self, done: int, asked: int) -> None:
        self._live.update(self._task, news=", ".join([f"{done} of {asked} clients", *self._doing, *self._numbers]))

    def doing(self, what: str) -> None:
        self._doing = [what] if what else []
        self._live.update(self._task, news=what)

    def round(self, run: RunInfo, report: RoundReport) -> None:
        row = report.row
        final = bool(report.row.get("final"))
        self._bytes += row["bytes_up"] + row["bytes_down"]
        self._rows.append(row)
        number = len(row["participants"])
        clients = [counted(number, "client")] if number else []
        when = ""
        if run.traits.scored == "received" and (self._live.disable or final):
            when = " after the last aggregation" if final else " as received"
        parts = [f"{run.metric} {accuracy:.3f}{when}" for _, accuracy in scored_curve([row], run.traits.scored)]
        parts += [f"{len(row['failures'])} failures"] if row["failures"] else []
        self._numbers = [*parts, format_bytes(self._bytes)]
        self._news = ", ".join([*clients, *self._numbers])
        self._last = max(self._last, row["round"] - final)  # some methods determine it themselves
        self._live.update(self._task, completed=min(row["round"], self._last), news=self._news)
        if self._live.disable and row["round"] and not final:
            left = (time.monotonic() - self._started) / row["round"] * (self._last - row["round"])
            self._say(f"round {row['round']}/{self._last}: {self._news}, {left:.0f} s left")

    def heard(self, line: str) -> None:
        self._say(line)

    def failed(self, run: RunInfo, error: BaseException) -> None:
        self.close()

    def finished(self, run: RunInfo) -> None:
        self.close()
        done = last_round(self._rows)
        rounds = counted(done, "round") if done >= self._last else f"{done} of {self._last} rounds"
        said = f"{run.method}: {rounds} in {time.monotonic() - self._started:.0f} s, {self._news}"
        self._say("; ".join([said, *absences(self._rows, run.traits.scored, shared=run.traits.whole)]))

    def close(self) -> None:
        if not self._live.disable:
            self._live.stop()

    def _say(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False)
