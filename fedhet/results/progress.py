"""Live progress: one line that renews itself on a terminal, plain log lines elsewhere."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.results.history import scored_curve
from fedhet.results.tables import format_bytes
from fedhet.text import printable

_BARS = "▁▂▃▄▅▆▇█"


class ProgressLine(Observer):
    """Observer that shows round, clients, accuracy, bytes and time left, and at the end the curve."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Progress | None = None
        self._bytes = 0
        self._first, self._last, self._started = 1, 0, time.monotonic()
        self._curve: list[float] = []
        self._news = ""

    def prepare(self, name: str, doing: str) -> None:
        """Open the line before the run has begun, with what is done until then."""
        if self._console.is_terminal:
            self._open(name, None, 0, doing)

    def started(self, run: RunInfo, first: int, last: int) -> None:
        """Open the line."""
        self._first, self._last, self._started = first, last, time.monotonic()
        self._curve.clear()
        if self._console.is_terminal:
            self._open(run.method, last, first - 1, "")

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Renew the line, or print one."""
        row = report.row
        self._bytes += row["bytes_up"] + row["bytes_down"]
        accuracy = next((value for _, value in scored_curve([row], run.traits.scored)), None)
        if accuracy is not None:
            self._curve.append(accuracy)
        parts = [f"{len(row['participants'])} clients"] if row["participants"] else []
        parts += [f"{run.metric} {accuracy:.3f}"] if accuracy is not None else []
        parts += [f"{len(row['failures'])} failures"] if row["failures"] else []
        news = self._news = ", ".join([*parts, format_bytes(self._bytes)])
        self._last = max(self._last, row["round"] - bool(row.get("final")))  # not known of every run beforehand
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=min(row["round"], self._last), news=news)
        elif row["round"] and not row.get("final"):
            done = row["round"] - self._first + 1
            left = (time.monotonic() - self._started) / done * (self._last - row["round"])
            self._say(f"round {row['round']}/{self._last}: {news}, {left:.0f} s left")

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Take the line away."""
        self.close()

    def finished(self, run: RunInfo) -> None:
        """Leave a last line, with the curve of the run."""
        self.close()
        seconds = time.monotonic() - self._started
        last = f"{run.method}: {self._last} rounds in {seconds:.0f} s, {self._news}"
        if len(self._curve) > 1:
            low, high = min(self._curve), max(self._curve)
            last += f"; {run.metric} by round {sparkline(self._curve)} ({low:.3f} to {high:.3f})"
        self._say(last)

    def close(self) -> None:
        """Take the line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open(self, name: str, last: int | None, done: int, news: str) -> None:
        if self._live is None:
            text = [TextColumn(each, markup=False) for each in ("{task.description}", "{task.fields[news]}")]
            columns = [text[0], BarColumn(), MofNCompleteColumn(), text[1], TimeRemainingColumn()]
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.add_task("", news="")
        self._live.update(self._live.task_ids[0], description=printable(name), total=last, completed=done, news=news)
        self._live.start()

    def _say(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text, the least value lowest and the greatest highest; of many values, some."""
    step = max(1.0, len(values) / width)
    shown = [values[int(place * step)] for place in range(round(len(values) / step))]
    shown[-1:] = [values[-1]]
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)
