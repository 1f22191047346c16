"""The progress of a run: an updated line on a terminal, a line for each round elsewhere."""

import time
from pathlib import Path

from rich import progress
from rich.console import Console

from fedhet.results.history import read_history, scored_curve
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.results.tables import format_bytes
from fedhet.utils.text import printable

SECONDS = 30.0
"""Time between lines about the clients that have answered the handshake."""


class ProgressLine(Observer):
    """Observer that shows a run's round, clients, accuracy, bytes and times; `folder` has earlier rounds, if any."""

    def __init__(self, console: Console, folder: Path | None = None) -> None:
        self._console, self._folder = console, folder
        self._live: progress.Progress | None = None
        self._bytes = 0
        self._last, self._started = 0, time.monotonic()
        self._told, self._news, self._numbers = time.monotonic(), "", list[str]()

    def prepare(self, name: str, doing: str) -> None:
        """Show the line before the run starts, with a description of the current step."""
        self._open(name, None, 0, doing)

    def started(self, run: RunInfo, first: int, last: int) -> None:
        """Show the line with the progress of rounds."""
        self._last, self._started = last, time.monotonic()
        earlier = read_history(self._folder) if self._folder and first > 1 else []
        for row in (row for row in earlier if row["round"] < first):
            self._started -= row["timing"]["seconds"]
            self._bytes += row["bytes_up"] + row["bytes_down"]
        self._open(run.method, last, first - 1, "")

    def answered(self, done: int, asked: int) -> None:
        """Show how many clients have replied in the current round; without a terminal, only in the handshake."""
        if self._live is not None:
            news = ", ".join([f"{done} of {asked} clients", *self._numbers])
            self._live.update(self._live.task_ids[0], news=news)
        elif not self._last and time.monotonic() - self._told > SECONDS:
            self._told = time.monotonic()
            self._say(f"{done} of {asked} clients have answered the handshake")

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Update the line on a terminal, or print a new line without a terminal."""
        row = report.row
        self._bytes += row["bytes_up"] + row["bytes_down"]
        number = len(row["participants"])
        clients = [f"{number} client{'s' * (number > 1)}"] if number else []
        when = " after the last aggregation" if row.get("final") else " before aggregation"
        when *= run.traits.scored == "received" and (self._live is None or bool(row.get("final")))
        parts = [f"{run.metric} {accuracy:.3f}{when}" for _, accuracy in scored_curve([row], run.traits.scored)]
        parts += [f"{len(row['failures'])} failures"] if row["failures"] else []
        self._numbers = [*parts, format_bytes(self._bytes)]
        news = self._news = ", ".join([*clients, *self._numbers])
        self._last = max(self._last, row["round"] - bool(row.get("final")))  # some methods determine it themselves
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=min(row["round"], self._last), news=news)
        elif row["round"] and not row.get("final"):
            left = (time.monotonic() - self._started) / row["round"] * (self._last - row["round"])
            self._say(f"round {row['round']}/{self._last}: {news}, {left:.0f} s left")

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Remove the progress line."""
        self.close()

    def finished(self, run: RunInfo) -> None:
        """Replace the line by a summary."""
        self.close()
        rounds = "1 round" if self._last == 1 else f"{self._last} rounds"
        self._say(f"{run.method}: {rounds} in {time.monotonic() - self._started:.0f} s, {self._news}")

    def close(self) -> None:
        """Remove the progress line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open(self, name: str, last: int | None, done: int, news: str) -> None:
        if not self._console.is_terminal:
            return
        if self._live is None:
            text = [progress.TextColumn(each, markup=False) for each in ("{task.description}", "{task.fields[news]}")]
            bar = [progress.BarColumn()] if self._console.width >= 100 else []
            times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
            columns = text[0], *bar, progress.MofNCompleteColumn(), text[1], *times
            self._live = progress.Progress(*columns, console=self._console, transient=True)
            self._live.add_task("", total=None, news="")
        self._live.update(self._live.task_ids[0], description=printable(name), total=last, completed=done, news=news)
        self._live.start()

    def _say(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False)
