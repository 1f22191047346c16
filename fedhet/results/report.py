"""The report of a run: one HTML file that needs nothing beside it, and its figures as PNG."""

import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedhet.results.figures import MATRIX_FIGURES, run_figures, save_png, to_svg
from fedhet.results.history import STATISTICS, RunFiles, client_order, read_run
from fedhet.results.tables import architecture_cells, by_architecture, format_bytes, format_seconds, format_value

_CAPTIONS = {
    "accuracy": "Accuracy by round, weighted by the clients' examples; the band spans the clients.",
    "clients": "The clients' accuracies at their last evaluation, by architecture.",
    "bytes": "Payload bytes of all clients together, the greeting included.",
    "cka": "Similarity (linear CKA, 0 to 1) of the representations of every two clients.",
    "shared_filters": "Which clients share which units of the global model, layer by layer (widths in brackets).",
    "filters": "First-layer filters that were matched, beside the global ones and plain averages at the same places.",
}

_STYLE = """
:root { --ink: #23272f; --quiet: #626a77; --line: #d5d9e0; --page: #ffffff; --panel: #f5f6f8; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --quiet: #9aa3b2; --line: #3b424d; --page: #16191e; --panel: #1f242b; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--page); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
p { margin: .3rem 0; } .quiet, figcaption { color: var(--quiet); font-size: .9rem; } .bad { color: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
dl > div { background: var(--panel); border-radius: .4rem; padding: .7rem .9rem; }
dt { color: var(--quiet); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: .8rem; color: var(--quiet); }
figure { margin: 0 0 2rem; } figure svg { display: block; max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--quiet); font-weight: 500; } td.number, th.number { text-align: right; }
tr.total td { font-weight: 600; } code { font-size: .95em; }
"""


def write_report(folder: Path | str) -> Path:
    """Write `report.html` and `figures/*.png` into the directory of a run, finished or not, and return the page's path.

    Raises:
        FedhetError: the folder is not the directory of a run, or one of its files is damaged.
    """
    run = read_run(folder)
    figures = run_figures(run)
    for name, figure in figures.items():
        save_png(figure, run.folder / "figures" / f"{name}.png")
    page = _page(run, {name: to_svg(figure, name) for name, figure in figures.items()})
    path = run.folder / "report.html"
    partial = path.with_suffix(".html.partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


def _page(run: RunFiles, figures: dict[str, str]) -> str:
    method, dataset = (str(run.settings.get(key, "?")) for key in ("method", "dataset"))
    pictures = [
        f'<figure id="{name}"><div class="scroll">{svg}</div>'
        f"<figcaption>{escape(_CAPTIONS.get(name, name))}</figcaption></figure>"
        for name, svg in figures.items()
    ]
    undrawn = sorted(run.matrices.keys() - MATRIX_FIGURES.keys())
    if undrawn:
        pictures.append(f'<p class="quiet">matrices.json also holds: {escape(", ".join(undrawn))}.</p>')
    clients = by_architecture(run.clients)
    architecture_headings = ["architecture", "clients", "examples", run.metric, "min", "max", "loss"]
    sections = [
        f"<h1>{escape(method)} on {escape(dataset)}</h1>",
        _state(run),
        _numbers(run),
        *pictures,
        _section(
            "Clients by architecture",
            _table(architecture_headings, map(architecture_cells, clients), numbers_from=1, total=True),
            "Plain means over clients, each at its last evaluation." if clients else "No client was evaluated.",
        ),
        _section("Failures", *_failures(run)),
        _section("Settings", _table(["key", "value"], ((key, _shown(value)) for key, value in run.settings.items()))),
    ]
    if run.versions:
        versions = ((name, str(version)) for name, version in run.versions.items())
        sections.append(_section("Versions", _table(["package", "version"], versions)))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(method)} on {escape(dataset)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _state(run: RunFiles) -> str:
    rounds = sum(row["round"] > 0 and not row.get("final", False) for row in run.rows)
    about = f"{rounds} of {run.settings.get('rounds', '?')} rounds, seed {run.settings.get('seed', '?')}"
    if run.summary is None:
        return f'<p class="bad">Unfinished: {escape(about)}. What follows is what there is so far.</p>'
    about += f", engine {run.summary.get('engine', '?')}"
    if run.summary.get("status") != "completed":
        error = escape(str(run.summary.get("error", "no reason recorded")))
        return f'<p class="bad">This run failed: {error}</p><p class="quiet">What there is: {escape(about)}.</p>'
    return f'<p class="quiet">Completed: {escape(about)}.</p>'


def _numbers(run: RunFiles) -> str:
    summary = run.summary
    if summary is None:
        return ""
    recent = summary.get("last10") or {}

    def fact(kind: str, missing: str) -> tuple[str, str, str]:
        values, over_last = summary.get(f"{kind}_accuracy") or {}, recent.get(f"{kind}_accuracy") or {}
        notes = [f"{name} {format_value(values[name])}" for name in STATISTICS[1:] if name in values] or [missing]
        if over_last:
            notes.append(f"last ten evaluations {format_value(over_last.get('weighted'))}")
        return f"{kind} {run.metric}", format_value(values.get("weighted")), ", ".join(notes)

    facts = [
        fact("personal", "not evaluated"),
        fact("global", "not evaluated" if run.has_global else "this method has no global model"),
        ("bytes up", format_bytes(summary.get("bytes_up", 0)), ""),
        ("bytes down", format_bytes(summary.get("bytes_down", 0)), ""),
        ("time", format_seconds(summary.get("seconds")), ""),
        ("clients", str(summary.get("clients", "?")), ""),
        ("failures", str(summary.get("failures", "?")), ""),
    ]
    boxes = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note in facts
    )
    return f"<dl>{''.join(boxes)}</dl>"


def _failures(run: RunFiles) -> tuple[str, str]:
    """The failures, one line a reason, since one cause often hits many clients in many rounds."""
    by_reason: dict[str, list[tuple[int, str]]] = {}
    for row in run.rows:
        for failure in row.get("failures") or []:
            hits = by_reason.setdefault(str(failure.get("reason", "")), [])
            hits.append((row["round"], str(failure.get("client", "?"))))
    if not by_reason:
        return "", "None."
    lines = [
        (
            str(len(hits)),
            _few(str(number) for number in sorted({number for number, _ in hits})),
            _few(sorted({client for _, client in hits}, key=client_order)),
            reason,
        )
        for reason, hits in by_reason.items()
    ]
    return _table(["times", "rounds", "clients", "reason"], lines), ""


def _few(names: Iterable[str], most: int = 12) -> str:
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _section(heading: str, content: str, note: str = "") -> str:
    quiet = f'<p class="quiet">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(heading)}</h2>{content}{quiet}</section>"


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int | None = None, total: bool = False
) -> str:
    """A table, or nothing without rows; columns from `numbers_from` on hold numbers; the last row may be the total."""
    body = list(rows)
    if not body:
        return ""

    def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
        numbers = len(cells) if numbers_from is None else numbers_from
        marks = ['class="number"' if i >= numbers else "" for i in range(len(cells))]
        inner = "".join(f"<{tag} {mark}>{escape(cell)}</{tag}>" for cell, mark in zip(cells, marks, strict=True))
        return f"<tr{kind}>{inner}</tr>".replace(" >", ">")

    kinds = [' class="total"' if total and i == len(body) - 1 else "" for i in range(len(body))]
    inner = "".join(line(row, "td", kind) for row, kind in zip(body, kinds, strict=True))
    head = line(headings, "th")
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{inner}</tbody></table></div>'
