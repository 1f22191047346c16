"""Several runs on one page: their curves over each other, what each came to, and links to their own reports."""

import os
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from fedhet.errors import FedhetError
from fedhet.files import write_text
from fedhet.results.courses import cost_figure, overlay_figure
from fedhet.results.figures import to_svg
from fedhet.results.page import TOGETHER
from fedhet.results.report import rendered
from fedhet.results.run_files import RunFiles, read_run, showing
from fedhet.results.tables import format_bytes, format_seconds, format_value
from fedhet.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTIONS = {
    "comparison": "Personal accuracy by round, and after the last one.",
    "overlay": "Accuracy by round, each run by what its method is scored by.",
    "cost": "Accuracy by what was sent until then; a method that sends nothing is not in it.",
}


def compare_folders(folders: Sequence[Path | str], path: Path) -> Path:
    """Write a page on several runs.

    Args:
        folders: run directories.
        path: of the page.

    Raises:
        FedhetError: a folder is not the directory of a run, or two have one name.
    """
    runs = {printable(_name(Path(folder))): read_run(folder) for folder in folders}
    if len(runs) < len(folders):
        raise FedhetError(f"{' '.join(map(str, folders))}: runs on one page need folders of different names")
    headings = ["run", "method", "personal", "global", "bytes", "time", "seed"]
    with showing(" ".join(map(str, folders))):
        return write_together(path, "Runs together", runs, [[headings, *starmap(_line, runs.items())]])


def write_together(
    path: Path,
    title: str,
    runs: Mapping[str, RunFiles],
    tables: Sequence[Sequence[Sequence[str]]],
    *,
    notes: Sequence[str] = (),
    first: "Figure | None" = None,
    shown: Mapping[str, RunFiles] | None = None,
) -> Path:
    """Write a page on several runs.

    Args:
        path: of the page.
        title: its title.
        runs: all of them, by name.
        tables: each its headings, and then its rows.
        notes: below them.
        first: a figure that stands before the others.
        shown: the runs that the figures are of; all by default.
    """
    shown = shown or runs
    drawn = {"comparison": first, "overlay": None if first else overlay_figure(shown), "cost": cost_figure(shown)}
    of = "" if shown is runs else " Of each method's first seed."
    pictures = [
        {"name": name, "svg": to_svg(figure, name), "caption": _CAPTIONS[name] + of * (name != "comparison")}
        for name, figure in drawn.items()
        if figure is not None
    ]
    links = [(name, _link(run.folder / "report.html", path.parent)) for name, run in runs.items()]
    write_text(path, rendered(TOGETHER, title=title, pictures=pictures, tables=tables, notes=notes, runs=links))
    return path


def _name(folder: Path) -> str:
    return folder.resolve().name


def _link(report: Path, here: Path) -> str:
    return quote(Path(os.path.relpath(report, here)).as_posix()) if report.is_file() else ""


def _line(name: str, run: RunFiles) -> list[str]:
    summary = run.summary or {}

    def accuracy(kind: str) -> str:
        return format_value((summary.get(f"{kind}_accuracy") or {}).get("weighted"))

    return [
        name,
        str(run.settings.get("method", "?")),
        accuracy("personal"),
        accuracy("global"),
        format_bytes(summary.get("bytes_up", 0) + summary.get("bytes_down", 0)),
        format_seconds(summary.get("seconds")),
        str(run.settings.get("seed", "?")),
    ]
