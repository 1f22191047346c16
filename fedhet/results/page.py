"""The HTML page of reports on one run or several runs, as a Jinja2 template.

The template is in a Python file, since Flower's app bundles contain no HTML files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TABLE = """\
{% macro table(headings, rows, kind="") %}
<div class="scroll"><table class="{{ kind }}">
<thead><tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
"""
"""A macro for a table."""

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
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 90rem; background: var(--page); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0; } .scroll + .scroll { margin-top: 1.5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
p { margin: .3rem 0; max-width: 60rem; } .bad { color: var(--bad); }
.quiet, figcaption { color: var(--quiet); font-size: .9rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
dl > div { background: var(--panel); border-radius: .4rem; padding: .7rem .9rem; }
dt { color: var(--quiet); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: .8rem; color: var(--quiet); }
.figures { column-gap: 2rem; margin: 1.5rem 0; }
figure { margin: 0 0 2rem; break-inside: avoid; } figure svg { display: block; width: 100%; height: auto; }
figure svg text { fill: var(--ink); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; overflow-wrap: normal; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--quiet); font-weight: 500; } td:last-child { overflow-wrap: anywhere; }
.numbers :is(td, th) { white-space: nowrap; } .numbers :is(td, th):not(:first-child) { text-align: right; }
.total tr:last-child td { font-weight: 600; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for kind, line in lines %}
<p class="{{ kind }}">{{ line }}</p>
{% endfor %}
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
{% for note in section.notes %}
<p class="quiet">{{ note }}</p>
{% endfor %}
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

Table = Sequence[Sequence[str]]
"""Headings, then rows."""


@dataclass(frozen=True)
class Section:
    """A section of a page: tables (`kind` are their CSS classes), notes, and links by name."""

    heading: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    kind: str = ""
    links: Sequence[tuple[str, str]] = ()


def page(
    title: str,
    sections: Iterable[Section],
    *,
    lines: Iterable[tuple[str, str]] = (),
    facts: Iterable[tuple[str, str, str]] = (),
    pictures: Sequence[Mapping[str, str]] = (),
) -> str:
    """Return an HTML page with `sections` below the figures.

    At the top are `lines`, pairs of style (`bad` or `quiet`) and text, and numbers (`facts`) as name, value and note. A
    picture has `name`, `svg` and `caption`.
    """
    return _render(
        PAGE, title=title, sections=list(sections), lines=list(lines), facts=list(facts), pictures=list(pictures)
    )


def table(lines: Table) -> str:
    """Return a table as HTML, for a notebook."""
    return _render("{{ table(lines[0], lines[1:]) }}", lines=lines)


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TABLE + template).render(**values)
