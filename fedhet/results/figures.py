"""The figures of a run, each drawn once and saved both as PNG and as SVG for the report.

Matplotlib is imported when a figure is drawn, and without pyplot: nothing here opens a display or leaves state behind.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedhet.files import write_whole
from fedhet.method import Drawing
from fedhet.results.history import TestSet, Which, accuracy_curve, final_clients, scored_curve, unseen_lines
from fedhet.results.run_files import RunFiles
from fedhet.results.tables import UNDISCLOSED
from fedhet.rows import ClientRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# The colours of text and of lines behind the data; in an SVG they become the CSS variables of the page around it, so a
# figure follows the page into dark mode. The others read on light and dark, and to the colour-blind.
INK, GRID = "#23272f", "#d5d9e0"
BLUE, ORANGE, GREEN = "#0f7fc4", "#e08214", "#009e73"
PALETTE = (BLUE, ORANGE, GREEN, "#cc79a7", "#8c6bb1", "#56b4e9", "#b8860b", "#d55e00")

_TESTS: tuple[tuple[TestSet, str], ...] = (("own", "-"), ("common", "--"))
_CURVE_LABELS = {
    "trained": {"trained": "personal models", "received": "global model"},
    "received": {"trained": "after local training", "received": "global model"},
    None: {"trained": "after training", "received": "as received"},
}


def run_figures(run: RunFiles, drawings: Mapping[str, Drawing]) -> "dict[str, Figure]":
    """Draw every figure for which the run holds data: name (also of its file) -> figure, in order of appearance.

    Args:
        run: the run's files.
        drawings: of the method's matrices, by their names; what has none is left out.
    """
    drawn = {
        "accuracy": accuracy_figure(run),
        "clients": clients_figure(run.clients, run.metric),
        "unseen_clients": unseen_figure(run),
        "bytes": bytes_figure(run.rows),
    }
    for name, matrices in run.matrices.items():
        if name in drawings:
            module, _, function = drawings[name].figure.partition(":")
            drawn[name] = getattr(import_module(module), function)(matrices)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def accuracy_figure(run: RunFiles) -> "Figure | None":
    """Accuracy by round: weighted over clients, with the range over clients behind it; None without evaluations."""
    labels = _CURVE_LABELS[run.personal]
    figure, (axes,) = new_figure(7.2, 3.6)
    drawn = False
    curves: tuple[tuple[Which, str], ...] = (("received", ORANGE), ("trained", BLUE))
    for which, colour in curves:
        main = run.personal in (which, None)
        if which == "received" and not (run.has_global or main):
            continue
        for test, style in _TESTS:
            curve = accuracy_curve(run.rows, which, test=test)
            if not curve:
                continue
            drawn = True
            kind = labels[which] if run.has_global or not main else "personal models"
            label = kind + (", common test set" if test == "common" else "")
            rounds, values = zip(*curve, strict=True)
            marker = "o" if len(rounds) < 40 else None
            axes.plot(rounds, values, style, color=colour, label=label, marker=marker, markersize=3.5)
            low, high = (dict(accuracy_curve(run.rows, which, end, test)) for end in ("min", "max"))
            inside = [r for r in rounds if r in low and r in high]
            if main and curve == scored_curve(run.rows, which) and low != high and len(inside) > 1:
                lows, highs = [low[r] for r in inside], [high[r] for r in inside]
                axes.fill_between(inside, lows, highs, color=colour, alpha=0.15, linewidth=0, label="all clients")
    if not drawn:
        return None
    axes.set_xlabel("round")
    axes.set_ylabel(run.metric)
    whole_numbers(axes)
    legend_beside(axes)
    return figure


def clients_figure(clients: Sequence[ClientRow], metric: str = "accuracy") -> "Figure | None":
    """The clients' last accuracies by architecture, a dot a client and a bar at the mean; None without evaluations."""
    final = final_clients(clients)
    if not final:
        return None
    names = sorted({row.architecture for row in final})
    figure, (axes,) = new_figure(7.2, 1.1 + 0.45 * len(names))
    for position, name in enumerate(names):
        values = sorted(row.accuracy for row in final if row.architecture == name and row.accuracy is not None)
        colour = PALETTE[position % len(PALETTE)]
        if len(values) >= 5:
            box = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.8, "alpha": 0.6}
            axes.boxplot(
                [values],
                positions=[position],
                orientation="horizontal",
                widths=0.55,
                showfliers=False,
                patch_artist=True,
                boxprops=box,
                whiskerprops={"color": INK, "linewidth": 0.8, "alpha": 0.6},
                capprops={"linewidth": 0},
                medianprops={"linewidth": 0},
                manage_ticks=False,
            )
        # Neighbours in the sorted list go to different heights, so equal accuracies stay apart.
        heights = [position + (0, -0.14, 0.14)[i % 3] for i in range(len(values))] if len(values) > 1 else [position]
        axes.plot(values, heights, "o", color=colour, markersize=5, alpha=0.75, markeredgewidth=0)
        mean = fmean(values)
        axes.plot([mean, mean], [position - 0.3, position + 0.3], color=INK, linewidth=2)
    counts = {name: sum(row.architecture == name for row in final) for name in names}
    axes.set_yticks(range(len(names)), [f"{name or UNDISCLOSED} ({counts[name]})" for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{metric} of each client (bar: mean)")
    return figure


def unseen_figure(run: RunFiles) -> "Figure | None":
    """Accuracy of those who came after the last round, by epoch alone, with what they received and from scratch.

    None without unseen clients.
    """
    lines = unseen_lines(run.rows)
    if not lines:
        return None
    figure, (axes,) = new_figure(7.2, 3.2)
    colours = {"received": (BLUE, "with what they received"), "scratch": (ORANGE, "from scratch")}
    for (test, start), values in lines.items():
        colour, label = colours[start]
        points = [(epoch, value) for epoch, value in enumerate(values) if value is not None]
        axes.plot(
            *zip(*points, strict=True),
            dict(_TESTS)[test],
            color=colour,
            label=label + (", common test set" if test == "common" else ""),
            marker="o",
            markersize=3.5,
        )
    axes.set_xlabel("epochs of training alone")
    axes.set_ylabel(run.metric)
    whole_numbers(axes)
    legend_beside(axes)
    return figure


def bytes_figure(rows: Sequence[Mapping[str, Any]]) -> "Figure | None":
    """Payload bytes by round, up and down, and their running sums; None for an empty history."""
    if not rows:
        return None
    rounds = [row["round"] for row in rows]
    flows = {"up": [row.get("bytes_up", 0) for row in rows], "down": [row.get("bytes_down", 0) for row in rows]}
    figure, panels = new_figure(7.2, 2.9, panels=2)
    for axes, title, running in zip(panels, ("a round", "in total so far"), (False, True), strict=True):
        series = {name: list(accumulate(flow)) if running else flow for name, flow in flows.items()}
        scale, unit = _byte_unit(max(max(values) for values in series.values()))
        for (name, values), colour, style in zip(series.items(), (BLUE, ORANGE), ("-", "--"), strict=True):
            marker = "o" if len(rounds) < 40 else None
            scaled = [value / scale for value in values]
            axes.plot(rounds, scaled, style, color=colour, label=name, marker=marker, markersize=3.5)
        axes.set_title(title, fontsize=10, color=INK)
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round (0: greeting)")
        whole_numbers(axes)
    panels[0].legend(frameon=False, labelcolor=INK)
    return figure


def new_figure(width: float, height: float, panels: int = 1, rows: int = 1) -> "tuple[Figure, list[Axes]]":
    """An empty figure, its size in inches, and its panels, in the plain look of all figures here.

    Panels stand side by side; of several rows those of the first come first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _figure_class()(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = list(figure.subplots(rows, panels, squeeze=False).flat)
    for axes in all_axes:
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRID)
        axes.tick_params(color=GRID, labelcolor=INK, labelsize=9)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.grid(visible=True, color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, all_axes


def faded(colour: str) -> "Colormap":
    """A colormap from nothing to a colour, so that zeros are the page, light or dark."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    return LinearSegmentedColormap.from_list("faded", [to_rgba(colour, 0.0), to_rgba(colour, 0.7)])


@cache
def _figure_class() -> "type[Figure]":
    """A figure that a notebook shows, whether pyplot is loaded there or not."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        def draw(self, renderer: Any) -> None:
            as_written(self)
            super().draw(renderer)

        def _repr_svg_(self) -> str:
            return to_svg(self, "figure", on_page=False)

    return Shown


def as_written(figure: "Figure") -> None:
    """Have all text of a figure drawn as it is written: `$` in a client's name begins no formula."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)


def lay_out(figure: "Figure") -> None:
    """Settle where everything in a finished figure stands, which is else done for each file, and twice the drawing."""
    if isinstance(figure, _figure_class()):  # others' figures may hold formulas
        as_written(figure)
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)


def save_png(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG on white, making the folder if it is missing."""
    white: dict[str, Any] = {"format": "png", "dpi": 150, "facecolor": "white", "metadata": {"Software": None}}
    write_whole(path, lambda temporary: figure.savefig(temporary, **white))


def to_svg(figure: "Figure", name: str, *, on_page: bool = True) -> str:
    """A figure as an SVG element to put into a page: transparent, text as text, colours of text from the page.

    Args:
        figure: the figure.
        name: goes before every id, so that the figures of one page do not share ids; the same figure and name give the
            same text.
        on_page: whether colours of text and of lines are those of the page around it.
    """
    from matplotlib import rc_context

    name = re.sub(r"[^\w-]", "_", name)
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    return svg.replace(INK, "var(--ink)").replace(GRID, "var(--line)") if on_page else svg


def whole_numbers(axes: "Axes") -> None:
    """Ticks of the x axis at whole rounds only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def legend_beside(axes: "Axes") -> None:
    """A legend to the right of the axes, where it hides no data; each label once."""
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(
        handles.values(), handles.keys(), loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, labelcolor=INK
    )


def _byte_unit(largest: float) -> tuple[float, str]:
    units: Iterator[tuple[float, str]] = iter([(1e9, "GB"), (1e6, "MB"), (1e3, "KB")])
    return next(((scale, unit) for scale, unit in units if largest >= scale), (1.0, "bytes"))
