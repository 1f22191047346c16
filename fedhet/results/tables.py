"""Tables for a terminal, and functions that format numbers in tables, reports and figures."""

import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedhet.methods.method import ABSENT
from fedhet.results.history import RunFiles, final_clients, last_round, read_run
from fedhet.utils.statistics import STATISTICS

if TYPE_CHECKING:
    from rich.table import Table

UNDISCLOSED = "undisclosed"


def format_bytes(number: float) -> str:
    """Format a number of bytes in decimal units, such as `931 B`, `12.3 KB` or `4.56 MB`."""
    size, unit = float(number), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:#.3g} {unit}".replace(". ", " ")


def format_value(value: float | None) -> str:
    """Format an accuracy or a loss with three decimals; None becomes `-`."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def format_seconds(seconds: float | None) -> str:
    """Format a duration in seconds, minutes and seconds (from two minutes), or hours and minutes (from two hours)."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def by_architecture(run: RunFiles) -> list[list[str]]:
    """Return a table of mean accuracies over clients, with a row for each architecture and one for all clients."""
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
    """Return a line with the method, accuracies, bytes and time of a run."""
    method = run.settings.get("method", "unknown method")
    summary = run.summary
    if summary is None:
        return f"{method}: unfinished, {last_round(run.rows)} rounds recorded"
    parts: list[str] = []
    for which in run.scores:
        weighted, mean = (format_value(run.accuracy(which, name)) for name in STATISTICS[:2])
        beside = f" ({words})" if (words := stage(run, which)) else ""
        parts.append(f"{which} {run.metric} {weighted} weighted, {mean} mean{beside}")
    if not run.has_global:
        received = (summary.get("common") or {}).get("received") or {}
        served = received.get("accuracy")  # a number if the server measured it, and not clients
        on_test = isinstance(served, float)
        parts.append(f"the server's model {served:.3f} on the common test set" if on_test else "no global model")
    parts.append(f"{format_bytes(summary.get('bytes_up', 0))} up, {format_bytes(summary.get('bytes_down', 0))} down")
    parts.append(format_seconds(summary.get("seconds")))
    if unseen := summary.get("unseen_clients"):
        received, scratch = unseen["received_accuracy"], unseen["scratch_accuracy"]
        parts.append(
            f"unseen clients {format_value(received[0])} as received, {format_value(received[-1])} after "
            f"{len(received) - 1} epochs alone (from scratch {format_value(scratch[-1])})"
        )
    if absent := absence(run):
        parts.append(absent)
    if summary.get("failures"):
        parts.append(f"failures: {summary['failures']}")
    if summary.get("status") != "completed":
        parts.append(str(summary.get("status")).upper())
    return f"{summary.get('method', method)}: " + "; ".join(parts)


def absence(run: RunFiles) -> str:
    """Return a note with the number of clients that never took part in a run, or an empty string if all did."""
    absent = len((run.summary or {}).get("never_took_part") or ())
    there = {client for row in run.rows for client in row["participants"]}
    return f"{absent} of {absent + len(there)} {ABSENT}" if absent else ""


def stage(run: RunFiles, which: str) -> str:
    """Return a note on whether a score was measured before or after the last aggregation.

    The accuracy at the other time is appended if known; if it is not and clients train last, the note is empty.
    """
    received = run.personal == "received"
    other = run.accuracy("trained" if received else "received")
    named = which != run.scores[0] or other in (None, run.accuracy("personal"))
    if which == "global" or received:
        words = "after the last aggregation"
        return words if named else f"{words}; before it, after local training, {format_value(other)}"
    if run.has_global:
        return "after local training"
    return "" if named else f"after local training; as received, after the last aggregation, {format_value(other)}"


def closing_table(folder: Path | str) -> "Table | str":
    """Return the table that `fedhet run` prints at the end, or only its `headline` if no client was evaluated."""
    from rich.table import Column, Table

    run = read_run(folder)
    lines = by_architecture(run)
    if not lines:
        return headline(run)
    (first, *numbers), *rows, total = lines
    columns = Column(first, no_wrap=True), *(Column(heading, justify="right") for heading in numbers)
    table = Table(*columns, title=run.title, caption=headline(run), title_justify="left", caption_justify="left")
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*total, style="bold")
    return table
