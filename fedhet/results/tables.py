"""Tables for a terminal, and how numbers are written in every table, report and figure."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedhet.results.history import final_clients
from fedhet.results.run_files import RunFiles, read_run
from fedhet.rows import STATISTICS

if TYPE_CHECKING:
    from rich.table import Table

UNDISCLOSED = "undisclosed"


def format_bytes(number: float) -> str:
    """Bytes in decimal units, as `931 B`, `12.3 KB`, `4.56 MB`."""
    size, unit = float(number), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:#.3g} {unit}".replace(". ", " ")


def format_value(value: float | None) -> str:
    """An accuracy or a loss with three decimals; `-` where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def format_seconds(seconds: float | None) -> str:
    """Seconds, from two minutes on minutes and seconds, from two hours on hours and minutes."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def by_architecture(run: RunFiles) -> list[list[str]]:
    """The clients' last evaluation by architecture, as headings, a row for each in order of its name, and the total.

    Numbers are plain means over clients, the least and the greatest. Empty where no client was evaluated.
    """
    final = final_clients(run.clients)
    names = sorted({row.architecture for row in final})
    groups = [(name or UNDISCLOSED, [row for row in final if row.architecture == name]) for name in names]
    lines = [["architecture", "clients", "examples", f"mean {run.metric}", "min", "max", "mean loss"]]
    for name, rows in [*groups, ("all", final)] if final else []:
        accuracies = [row.accuracy for row in rows if row.accuracy is not None]
        losses = [row.loss for row in rows if row.loss is not None]
        numbers = (fmean(accuracies), min(accuracies), max(accuracies), fmean(losses) if losses else None)
        lines.append([name, str(len(rows)), str(sum(row.examples for row in rows)), *map(format_value, numbers)])
    return lines if final else []


def headline(run: RunFiles) -> str:
    """One line: method, accuracies, bytes and time of a run, or its recorded rounds without a summary."""
    method = run.settings.get("method", "unknown method")
    summary = run.summary
    if summary is None:
        return f"{method}: unfinished, {run.rounds} rounds recorded"
    other = other_score(summary)

    def score(which: str) -> str:
        values = summary.get(f"{which}_accuracy") or {}
        weighted, mean = (format_value(values.get(name)) for name in STATISTICS[:2])
        return f"{which} {run.metric} {weighted} weighted, {mean} mean"

    parts = [
        *([score("personal") + (f" ({other})" if other else "")] if run.has_personal else []),
        (score("global") + (f" ({other})" if other and not run.has_personal else ""))
        if run.has_global
        else "no global model",
        f"{format_bytes(summary.get('bytes_up', 0))} up, {format_bytes(summary.get('bytes_down', 0))} down",
        format_seconds(summary.get("seconds")),
    ]
    if unseen := summary.get("unseen_clients"):
        parts.append(unseen_words(unseen))
    if summary.get("failures"):
        parts.append(f"failures: {summary['failures']}")
    if summary.get("status") != "completed":
        parts.append(str(summary.get("status")).upper())
    return f"{summary.get('method', method)}: " + "; ".join(parts)


def unseen_words(summary: Mapping[str, Any]) -> str:
    """The results of unseen clients in words, from `unseen_clients` of a summary."""
    received, scratch = summary["received_accuracy"], summary["scratch_accuracy"]
    return (
        f"unseen clients {format_value(received[0])} as received, {format_value(received[-1])} after "
        f"{len(received) - 1} epochs alone (from scratch {format_value(scratch[-1])})"
    )


def other_score(summary: Mapping[str, Any]) -> str:
    """The accuracy beside the method's score: of what clients received last, or after they trained it.

    The one is the state of the federation, the other what a client's own training makes of it. Empty where it is the
    same, was not evaluated, or is the global model's, which is named anyway.
    """
    other, words = (
        ("received", "as received") if summary.get("personal") == "trained" else ("trained", "after training")
    )
    value, score = ((summary.get(f"{which}_accuracy") or {}).get("weighted") for which in (other, "personal"))
    named = other == "received" and summary.get("global_accuracy") is not None
    return f"{words} {format_value(value)}" if value is not None and value != score and not named else ""


def closing_table(folder: Path | str) -> "Table | str":
    """The table at the end of a run on the terminal: clients by architecture, their total, and the run's `headline`.

    The headline alone where no client was evaluated.

    Raises:
        FedhetError: the folder is not the directory of a run.
    """
    from rich.table import Table

    run = read_run(folder)
    lines = by_architecture(run)
    if not lines:
        return headline(run)
    where = f"{run.settings.get('method', 'run')} on {run.settings.get('dataset', 'data')}"
    table = Table(title=where, caption=headline(run), title_justify="left", caption_justify="left")
    (first, *numbers), *rows, total = lines
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*total, style="bold")
    return table
