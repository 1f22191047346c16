"""The figures of runs and of comparisons, and their files: PNG, PDF and SVG, or SVG for HTML pages.

Pyplot is not used, as it keeps state and may open a display. Import this module late, as matplotlib imports slowly.
"""

import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from fedhet.results.history import RunFiles, TestSet, Which, final_clients, learning_curve, scored_curve
from fedhet.results.terminal import UNDISCLOSED
from fedhet.utils.files import write_whole
from fedhet.utils.statistics import grouped

# The colours of text and of lines behind the data; in an SVG they become the CSS variables of the page around it, so a
# figure follows the page into dark mode. The others read on light and dark, and to the colour-blind.
INK, GRID = "#23272f", "#d5d9e0"
BLUE, ORANGE, GREEN = "#0f7fc4", "#e08214", "#009e73"
PALETTE = (
    *(BLUE, ORANGE, GREEN, "#cc79a7", "#8ca000", "#dc003c"),
    *("#8c6bb1", "#7800f0", "#78643c", "#56b4e9", "#00c800", "#f014c8"),
)
DASHES = ("-", "--", ":", "-.")

WIDTH = 4.5
"""The width of a page's figures in inches, at which their text is legible on a phone."""

MOST = 50
"""Largest number of clients and of classes in a figure of examples by class."""

_TESTS: tuple[tuple[TestSet, str, str], ...] = (("own", "-", ""), ("common", "--", ", common test set"))
_CURVE_LABELS = {
    "trained": {"trained": "personal models", "received": "global model"},
    "received": {"trained": "after local training", "received": "global model"},
    None: {"trained": "after training", "received": "as received"},
}


def run_figures(run: RunFiles) -> dict[str, Figure]:
    """Return the figures of a run's report by name (`accuracy`, `clients`, ...), without empty figures."""
    drawn = {"accuracy": accuracy_figure(run), "clients": clients_figure(run), "losses": loss_figure(run)}
    drawn["classes"] = classes_figure(run)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def accuracy_figure(run: RunFiles) -> Figure | None:
    """Draw the weighted mean accuracy by round, with the range over clients as a band; return None without data."""
    figure, axes = new_figure(2.9)
    colours: dict[Which, str] = {"received": ORANGE, "trained": BLUE}
    for which, colour in colours.items():
        main = run.personal in (which, None)
        if which == "received" and not (run.has_global or main):
            continue
        label = _CURVE_LABELS[run.personal][which] if run.has_global or not main else "personal models"
        for test, style, where in _TESTS:
            curve = learning_curve(run.rows, which, test=test)
            draw_line(axes, curve, linestyle=style, color=colour, label=label + where)
            low, high = (dict(learning_curve(run.rows, which, end, test)) for end in ("min", "max"))
            inside = [r for r, _ in curve if r in low and r in high]
            if main and curve == scored_curve(run.rows, which) and low != high and len(inside) > 1:
                lows, highs = [low[r] for r in inside], [high[r] for r in inside]
                axes.fill_between(
                    inside, lows, highs, color=colour, alpha=0.15, linewidth=0, label="worst to best client"
                )
    return figure if label_axes(axes, "round", run.metric) else None


def clients_figure(run: RunFiles) -> Figure | None:
    """Draw each client's last accuracy as a dot, by architecture, with a bar at the mean; return None without data."""
    rows = final_clients(run.clients)
    by_name = grouped((row.architecture, row.accuracy) for row in rows if row.accuracy is not None)
    if not by_name:
        return None
    lines = [fill(f"{name or UNDISCLOSED} ({len(by_name[name])})", 16) for name in sorted(by_name)]
    figure, axes = new_figure(0.8 + len(lines) * max(0.4, 0.14 * max(line.count("\n") + 1 for line in lines)))
    for position, name in enumerate(sorted(by_name)):
        values = sorted(by_name[name])
        # Neighbours in the sorted list go to different heights, so equal accuracies stay apart.
        heights = [position + (0, -0.14, 0.14)[i % 3] for i in range(len(values))]
        colour = PALETTE[position % len(PALETTE)]
        axes.plot(values, heights, "o", color=colour, markersize=5, alpha=0.75, markeredgewidth=0)
        axes.vlines(fmean(values), position - 0.3, position + 0.3, color=INK, linewidth=2)
    axes.set_yticks(range(len(lines)), lines, fontsize=8)
    axes.set_ylim(len(lines) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{run.metric} of each client (bar: mean)")
    return figure


def loss_figure(run: RunFiles) -> Figure | None:
    """Draw training loss (with the method's additional terms) and test loss by round; return None without data."""
    figure, axes = new_figure(2.7)
    training = [(row["round"], row["train_loss"]) for row in run.rows if row.get("train_loss") is not None]
    draw_line(axes, training, color=ORANGE, label="training")
    draw_line(axes, scored_curve(run.rows, run.scored, measure="loss"), color=BLUE, label="test")
    return figure if label_axes(axes, "round", "loss") else None


def classes_figure(run: RunFiles) -> Figure | None:
    """Draw a simulation's training examples by client and class; return None without them, or if there are too many."""
    summary = run.summary
    by_client = summary.get("classes", {})
    named = summary.get("names", {}).get("classes", ())
    # Clients that share nothing may number them differently.
    names = [*dict.fromkeys([*named, *chain(*by_client.values())])]
    if not by_client or max(len(by_client), len(names)) > MOST:
        return None
    values = [[counts.get(name, 0) for name in names] for counts in by_client.values()]
    return matrix_figure(
        [*by_client], [fill(name, 12) for name in names], values, "training examples", axes=("class", "client")
    )


def runs_figure(runs: Mapping[str, RunFiles]) -> Figure | None:
    """Draw the metric of each run (by name) by round; return None without data.

    It is that of personal (else global) models, see `RunFiles.scored`.
    """
    figure, axes = new_figure(2.9)
    curves = {name: scored_curve(run.rows, run.scored) for name, run in runs.items()}
    first = first_round(dict(curve) for curve in curves.values())
    for place, (name, curve) in enumerate(curves.items()):
        draw_line(axes, [point for point in curve if point[0] >= first], **look(place), label=name)
    metrics = dict.fromkeys(run.metric for run in runs.values())
    return figure if label_axes(axes, "round", " or ".join(metrics)) else None


def matrix_figure(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    name: str,
    axes: tuple[str, str] = ("client", "model"),
) -> Figure:
    """Draw a matrix of values called `name`, in which None is left blank; `axes` says what columns and rows are."""
    across, down = axes
    figure, drawing = new_figure(1.2 + 0.22 * len(rows))
    numbers = [[math.nan if value is None else value for value in row] for row in values]
    image = drawing.imshow(numbers, aspect="auto", cmap="viridis")
    drawing.grid(visible=False)
    drawing.set_xticks(range(len(columns)), columns, fontsize=8)
    drawing.set_yticks(range(len(rows)), rows, fontsize=8)
    drawing.set(xlabel=across, ylabel=down)
    bar = figure.colorbar(image)
    bar.ax.tick_params(color=GRID, labelcolor=INK, labelsize=9)
    bar.set_label(name, color=INK)
    return figure


class PlainFigure(Figure):
    """A figure for notebooks and pages, whose text is drawn literally: a `$` in a name does not start a formula."""

    def draw(self, renderer: Any) -> None:
        for text in self.findobj(Text):
            text.set_parse_math(False)
        super().draw(renderer)

    def _repr_svg_(self) -> str:
        return to_svg(self, "figure")


def first_round(curves: Iterable[Collection[int]]) -> int:
    """Return 0 if all curves (rounds) have round 0, which is before training, and otherwise 1."""
    return 0 if all(0 in rounds for rounds in curves if rounds) else 1


def new_figure(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return an empty figure of this height and width in inches, and its axes."""
    figure = PlainFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(color=GRID, labelcolor=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(visible=True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG, PDF or SVG file with a white background; create the folder if it is missing.

    PDF files have TrueType fonts, as journals require, and SVG files paths in place of text. Equal figures have equal
    bytes, so the files contain no time.
    """
    kind = path.suffix[1:]
    unset = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}[kind]
    white: dict[str, Any] = {"format": kind, "dpi": 220, "facecolor": "white", "metadata": {unset: None}}
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "fedhet"}):
        write_whole(path, lambda temporary: figure.savefig(temporary, **white))


def to_svg(figure: Figure, name: str) -> str:
    """Return a figure as a transparent SVG element in the colours of the HTML page around it; ids begin with `name`."""
    name = re.sub(r"[^\w-]", "_", name)
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    return svg.replace(INK, f"var(--ink, {INK})").replace(GRID, f"var(--line, {GRID})")


def look(position: int) -> dict[str, Any]:
    """Return colour and line style (arguments of `plot`) of a line, given its index; the first 48 look different.

    The colours of lines with one style also differ for the colour-blind.
    """
    style = position + position // len(PALETTE)
    return {"color": PALETTE[position % len(PALETTE)], "linestyle": DASHES[style % len(DASHES)]}


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], **options: Any) -> None:
    """Draw points (x, y), if any, as a line with matplotlib's `options`, and with markers if there are few points."""
    if points:
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 40 else None, markersize=3, **options)


def draw_rings(axes: Axes, points: Iterable[tuple[float, float]], rounds: Collection[int], color: str) -> None:
    """Draw rings around the points (x, y) with x in `rounds`, which are over fewer clients than the others."""
    if ringed := [point for point in points if point[0] in rounds]:
        x, y = zip(*ringed, strict=True)
        axes.scatter(x, y, s=40, color="none", edgecolors=color, label="fewer clients")


def label_axes(axes: Axes, x: str, y: str) -> bool:
    """Set the labels `x` and `y` of the axes, and put a legend above them; return whether the axes have any data.

    Ticks of the x axis are at integers. The figure's height grows by the height of the legend.
    """
    axes.set(xlabel=x, ylabel=y)
    figure = axes.get_figure(root=True)
    letters = 54 if figure is None else int(54 * figure.get_figwidth() / WIDTH)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if handles := {
        fill(label, letters - 4): handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }:
        columns = max(1, letters // (7 + max(map(len, handles))))
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": columns, "frameon": False}
        room: dict[str, Any] = {
            "borderaxespad": 0.2,
            "borderpad": 0.0,
            "handlelength": 2.4,
            "columnspacing": 1.2,
            "labelspacing": 0.3,
        }
        axes.legend(handles.values(), handles.keys(), fontsize=8, labelcolor=INK, **place, **room)
        if figure is not None:
            figure.set_figheight(figure.get_figheight() + 0.16 * math.ceil(len(handles) / columns))
    return axes.has_data()
