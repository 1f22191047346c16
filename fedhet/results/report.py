"""Reports on one run or several runs: a self-contained HTML page, and the figures of a run as PNG files.

The template of the page is in this file, since Flower's app bundles contain no HTML files.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedhet.config import configuration
from fedhet.errors import FedhetError
from fedhet.results.card import write_card
from fedhet.results.description import data_table
from fedhet.results.history import RunFiles, last_round, read_run, showing
from fedhet.results.terminal import best_clients, by_architecture, format_bytes, format_seconds, format_value, stage
from fedhet.utils.files import write_text
from fedhet.utils.statistics import STATISTICS, as_statistics, client_order, grouped
from fedhet.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = """\
{% macro table(headings, rows, kind="") %}
<div class="scroll" tabindex="0" role="region" aria-label="table: scrolls sideways if it is wide">
<table class="{{ kind }}">
<thead><tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
"""

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --ink: #23272f; --quiet: #626a77; --line: #d5d9e0; --page: #ffffff; --panel: #f5f6f8; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --quiet: #9aa3b2; --line: #3b424d; --page: #16191e; --panel: #1f242b; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0; } .scroll + .scroll { margin-top: 1.5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
p { margin: .3rem 0; max-width: 60rem; } .bad { color: var(--bad); }
.top { background: var(--panel); border-left: .25rem solid var(--quiet); padding: .5rem .9rem; margin: 1rem 0; }
.top p { max-width: none; }
.quiet, figcaption { color: var(--quiet); font-size: .9rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
dl > div { background: var(--panel); border-radius: .4rem; padding: .7rem .9rem; }
dt { color: var(--quiet); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: .8rem; color: var(--quiet); }
.figures { column-gap: 2rem; margin: 1.5rem 0; }
figure { margin: 0 0 2rem; break-inside: avoid; }
figure svg { display: block; width: 100%; max-width: 46rem; height: auto; }
figure svg text { fill: var(--ink); }
.scroll { overflow-x: auto; container-type: scroll-state;
          background: linear-gradient(to left, var(--page) 50%, transparent) right / 3rem 100% no-repeat local,
                      linear-gradient(to left, var(--quiet), transparent) right / .8rem 100% no-repeat; }
.scroll::before { content: "scroll for more columns"; display: none; position: sticky; left: 0; width: max-content;
                  color: var(--quiet); font-size: .85rem; }
@container scroll-state(scrollable: x) { .scroll::before { display: block; } }
details { margin: 1rem 0; } summary { cursor: pointer; color: var(--quiet); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; overflow-wrap: normal; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--quiet); font-weight: 500; } td:last-child { overflow-wrap: anywhere; }
.numbers :is(td, th) { white-space: nowrap; } .numbers :is(td, th):not(:first-child) { text-align: right; }
.total tr:last-child td { font-weight: 600; }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; } .scroll { overflow: visible; }
  .figures { columns: 1 !important; } figure { margin: 0 0 1rem; } figure svg { max-height: 10.5cm; }
  table { font-size: 8pt; width: 100%; } th, td { padding-right: .4rem; } .numbers :is(td, th) { white-space: normal; }
  tr, dl > div, .top { break-inside: avoid; } h2, thead, summary { break-after: avoid; }
  h2 + *, tbody tr:is(:first-child, :nth-child(2)) { break-before: avoid; } summary { list-style: none; }
  .scroll { background: none; } details::details-content { content-visibility: visible; }
}
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if lines %}
<div class="top">
{% for kind, line in lines %}
<p class="{{ kind }}">{{ line }}</p>
{% endfor %}
</div>
{% endif %}
{% if facts %}
<dl>
{% for name, value, note in facts %}
<div><dt>{{ name }}</dt><dd>{{ value }}{% if note %}<small>{{ note }}</small>{% endif %}</dd></div>
{% endfor %}
</dl>
{% endif %}
<div class="figures" style="columns: 22rem {{ pictures | length }}">
{% for picture in pictures %}
<figure id="{{ picture.name }}">{{ picture.svg | safe }}
<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
</div>
{% for section in sections %}
<section><h2>{{ section.heading }}</h2>
{% for lines in section.tables %}
{{ table(lines[0], lines[1:], section.kind) }}
{% endfor %}
{% if section.tables and section.notes | length > 2 %}
<details><summary>Notes ({{ section.notes | length }})</summary>
{% endif %}
{% for note in section.notes %}
<p class="quiet">{{ note }}</p>
{% endfor %}
{% if section.tables and section.notes | length > 2 %}
</details>
{% endif %}
{% if section.links %}
<ul>
{% for name, link in section.links %}
<li>{% if link %}<a href="{{ link }}">{{ name }}</a>{% else %}{{ name }}{% endif %}</li>
{% endfor %}
</ul>
{% endif %}
</section>
{% endfor %}
</body>
</html>
"""
"""Jinja template of a page with `title`, `lines` (CSS class, text), `facts` (name, value, note), `pictures` (`name`,
`svg`, `caption`) and `sections` (`Section` objects), in this order."""

Table = Sequence[Sequence[str]]
"""Rows of text; the first row has the headings."""


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading, tables (with CSS classes `kind`), notes, and links (pairs of text and URL)."""

    heading: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    kind: str = ""
    links: Sequence[tuple[str, str]] = ()


def table(lines: Table) -> str:
    """Return a table, whose first row has the headings, as HTML for a notebook."""
    return _render("{{ table(lines[0], lines[1:]) }}", lines=lines)


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TABLE + template).render(**values)


_CAPTIONS = {
    "accuracy": "The metric by round, weighted by the clients' examples.",
    "clients": "The clients' metrics at their last evaluation, by architecture.",
    "losses": "Loss by round: in training, with what the method adds to it, and on test data.",
    "classes": "Numbers of training examples by client and class.",
    "comparison": "The metric of personal models by round.",
    "evaluation": "Models (rows) by clients (columns), on test examples.",
    "overlay": "The metric by round: of each run the one by which its method is scored.",
}


def write_report(folder: Path | str) -> Path:
    """Write a run's `report.html`, `figures/*.png` and `models.md`; return the page's path.

    A damaged file raises a FedhetError.
    """
    from fedhet.results.figures import run_figures, save_figure

    run = read_run(folder)
    path = run.folder / "report.html"
    with showing(folder):
        figures = run_figures(run)
        for name, figure in figures.items():
            save_figure(figure, run.folder / "figures" / f"{name}.png")
        content = {"lines": _status(run), "facts": _facts(run), "pictures": _pictures(figures)}
        write_text(path, _render(PAGE, title=run.title, sections=_sections(run), **content))
        write_card(run)
    return path


def complete_report(folder: Path | str) -> bool:
    """Write the report of a completed run that was killed before it was written; return whether that was needed."""
    if (Path(folder) / "report.html").is_file() or not read_run(folder).settings.get("report", True):
        return False
    write_report(folder)
    return True


def _status(run: RunFiles) -> list[tuple[str, str]]:
    absent = [("bad", line) for line in run.absences]
    if not run.summary:
        return [("bad", f"Unfinished: {_about(run)}."), *absent]
    if run.summary.get("status") == "completed":
        by = run.summary.get("predicts_by", "not recorded")
        return [("quiet", f"Completed: {_about(run)}."), ("quiet", f"Predicts by: {by}."), *absent]
    reason = run.summary.get("error") or "no reason recorded"
    return [("bad", f"This run failed: {reason}"), ("quiet", f"{_about(run)}."), *absent]


def _sections(run: RunFiles) -> Iterator[Section]:
    if architectures := by_architecture(run):
        when = ", after the last aggregation" if run.personal == "received" else ""
        note = f"Plain means over clients, each at its last evaluation{when}."
        yield Section("Clients by architecture", [architectures], [note], kind="numbers total")
    else:
        yield Section("Clients by architecture", notes=["No client was evaluated."])
    if data := run.summary.get("data"):
        note = (
            "Training examples; missing: examples with NaN; mean, std and range: of all columns together; ?: what a "
            "node's policy does not tell."
        )
        yield Section("Data", [data_table(data["clients"])], [note], kind="numbers total")
    if further := run.summary.get("further"):
        values = [
            [name, *(format_value(as_statistics(numbers).get(s)) for s in STATISTICS)]
            for name, numbers in further.items()
        ]
        yield Section("Further metrics", [[["metric", *STATISTICS], *values]], kind="numbers")
    failures = _failures(run)
    tables = [[["reason", "times", "rounds", "clients"], *failures]] if failures else []
    yield Section("Failures", tables, [] if failures else ["None."])
    if warnings := run.summary.get("warnings"):
        yield Section("Warnings", notes=warnings)
    notes = ["Other keys have their defaults; config.toml has them all."]
    yield Section("Settings", [[["key", "value"], *_settings(run)]], notes)
    yield Section("Made by", [[["", ""], *_made_by(run)]])


def _made_by(run: RunFiles) -> list[tuple[str, str]]:
    summary = run.summary
    rows = [(name, str(value)) for name, value in run.ran.items()]
    rows.append(("versions", ", ".join(f"{name} {number}" for name, number in run.versions.items())))
    if devices := summary.get("devices"):
        rows.append(("devices of clients", ", ".join(devices)))
    rows.append(("time", format_seconds(summary.get("seconds"))))
    if "peak_memory" in summary:
        rows.append(("CPU time, since the last start", format_seconds(summary["cpu_seconds"])))
        rows.append(("peak memory, summed over processes", format_bytes(summary["peak_memory"])))
    return rows


def _pictures(figures: "Mapping[str, Figure]") -> list[dict[str, str]]:
    from fedhet.results.figures import to_svg

    return [{"name": name, "svg": to_svg(figure, name), "caption": _CAPTIONS[name]} for name, figure in figures.items()]


def _settings(run: RunFiles) -> list[tuple[str, str]]:
    defaults = {key: default for key, default, *_ in configuration.keys(outside=False)}
    method = run.settings.get("method")
    return [
        (key, value if isinstance(value, str) else json.dumps(value, default=str))
        for key, value in run.settings.items()
        if key == "method" or defaults.get(key) != value
        if "." not in key or key.split(".")[0] in (method, "own")
    ]


def _about(run: RunFiles) -> str:
    done = last_round(run.rows)
    summary = run.summary
    seed = run.settings.get("seed", "?")
    rounds = f"{done} of {run.wanted} rounds" if run.wanted else f"{done} rounds"
    engine = f", engine {summary.get('engine', '?')}" if summary else ""
    where = f", on {', '.join(summary['devices'])}" if summary.get("devices") else ""
    return f"{rounds}, seed {seed}{engine}{where}"


def _facts(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return name, value and note of each number at the top of a run's report; [] if the run has no `summary.json`."""
    summary = run.summary
    if not summary:
        return []
    facts = []
    for which in run.scores:
        values = {name: run.accuracy(which, name) for name in STATISTICS[1:]}
        known = [
            f"{name.replace('_', ' ')} {format_value(value)}" for name, value in values.items() if value is not None
        ]
        notes = filter(None, [stage(run, which), ", ".join(known) or "not evaluated"])
        facts.append((f"{which} {run.metric}, weighted", format_value(run.accuracy(which)), "; ".join(notes)))
    if "best" in summary:
        note = f"{run.metric} on test examples; each model of the round with its best validation {run.metric}"
        note = "; ".join(filter(None, [best_clients(run), note]))
        facts.append(("best by validation", format_value(run.accuracy("best")), note))
    up, down = (summary.get(f"bytes_{way}", 0) for way in ("up", "down"))
    if up or down:
        facts.append(("bytes", format_bytes(up + down), f"{format_bytes(up)} up, {format_bytes(down)} down"))
    if privacy := summary.get("privacy"):
        value = "no epsilon is known"
        note = privacy["note"]
        if privacy["epsilon"] is not None:
            value = f"epsilon {privacy['epsilon']:.4g}"
            note = f"delta {privacy['delta']:g}; {note}"
        facts.append(("privacy", value, note))
    return [
        *facts,
        ("time", format_seconds(summary.get("seconds")), ""),
        ("clients", str(summary.get("clients", "?")), "; ".join(line.partition(":")[0] for line in run.absences)),
    ]


def _failures(run: RunFiles) -> list[tuple[str, str, str, str]]:
    failures = ((row["round"], failure) for row in run.rows for failure in row["failures"])
    hit = grouped((str(each.get("reason")), (round, str(each.get("client")))) for round, each in failures)
    lines = []
    for reason, hits in hit.items():
        rounds = sorted({round for round, _ in hits})
        clients = sorted({client for _, client in hits}, key=client_order)
        lines.append((reason, str(len(hits)), _few(map(str, rounds)), _few(clients)))
    return lines


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:12])
    return f"{shown} and {len(listed) - 12} more" if len(listed) > 12 else shown


def compare_folders(folders: Sequence[Path | str], path: Path) -> Path:
    """Write a page on several runs to `path`; raises a `FedhetError` if folders have equal names or no run."""
    from fedhet.results.figures import runs_figure

    runs = {printable(Path(folder).resolve().name): read_run(folder) for folder in folders}
    if len(runs) < len(folders):
        raise FedhetError(f"some of {', '.join(map(str, folders))} have the same name: rename or omit all but one")
    headings = ["run", "method", "metric", "personal", "global", "bytes", "time", "seed"]
    with showing(" ".join(map(str, folders))):
        overlay = runs_figure(runs)
        drawn = {} if overlay is None else {"overlay": overlay}
        absent = [f"{name}: {line}" for name, run in runs.items() for line in run.absences]
        table = [headings, *starmap(_line, runs.items())]
        sections = [Section("Results", [table], kind="numbers")]
        return write_together(path, "Runs together", runs, sections, drawn, absent)


def write_together(
    path: Path,
    title: str,
    runs: Mapping[str, RunFiles],
    sections: Sequence[Section],
    figures: "Mapping[str, Figure]",
    absent: Sequence[str] = (),
    verdict: str = "",
) -> Path:
    """Write a page on several runs (by name) to `path`, and return the path.

    Below its `title`, the page has the sentence `verdict`, lines about `absent` clients, the figures (with names in
    `_CAPTIONS`), the sections, and links to the reports of the runs.
    """
    pages = {name: run.folder / "report.html" for name, run in runs.items()}
    links = [
        (name, quote(Path(os.path.relpath(page, path.parent)).as_posix()) if page.is_file() else "")
        for name, page in pages.items()
    ]
    lines = [("", verdict)] if verdict else []
    lines += [("bad", line) for line in absent]
    return write_page(path, title, [*sections, Section("Runs", links=links)], figures, lines)


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    figures: "Mapping[str, Figure]",
    lines: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write a page with `title`, `lines` (pairs of CSS class and text), figures and sections to `path`."""
    write_text(path, _render(PAGE, title=title, sections=sections, lines=lines, pictures=_pictures(figures)))
    return path


def _line(name: str, run: RunFiles) -> list[str]:
    summary = run.summary
    return [
        name,
        str(run.settings.get("method", "?")),
        run.metric,
        format_value(run.accuracy("personal")),
        format_value(run.accuracy("global")),
        format_bytes(summary.get("bytes_up", 0) + summary.get("bytes_down", 0)),
        format_seconds(summary.get("seconds")),
        str(run.settings.get("seed", "?")),
    ]
