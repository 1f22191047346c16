"""Style figures, and write them as PNG files or as SVG for HTML pages.

Figures are made without pyplot, which keeps state and may open a display. Import this module only when it is needed,
since matplotlib takes long to import.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from fedhet.utils.files import write_whole

# The colours of text and of lines behind the data; in an SVG they become the CSS variables of the page around it, so a
# figure follows the page into dark mode. The others read on light and dark, and to the colour-blind.
INK, GRID = "#23272f", "#d5d9e0"
BLUE, ORANGE, GREEN = "#0f7fc4", "#e08214", "#009e73"
PALETTE = (BLUE, ORANGE, GREEN, "#cc79a7", "#8c6bb1", "#56b4e9", "#b8860b", "#d55e00")
DASHES = ("-", "--", ":", "-.", (0, (9, 2)), (0, (2, 2)))

LONGEST = 16
"""The most letters of a name in one line along an axis."""
WIDTH = 4.5
"""The width of a page's figures in inches, at which their text is legible on a phone."""


class PlainFigure(Figure):
    """A figure for notebooks and pages, whose text is drawn literally: a `$` in a name does not start a formula."""

    def draw(self, renderer: Any) -> None:
        """Draw the figure, with all text drawn literally."""
        self.write_plainly()
        super().draw(renderer)

    def write_plainly(self) -> None:
        """Turn off mathematical formulas in all existing text of the figure."""
        for text in self.findobj(Text):
            text.set_parse_math(False)

    def _repr_svg_(self) -> str:
        return to_svg(self, "figure", on_page=False)


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure, `height` inches high, and its axes."""
    figure = PlainFigure(figsize=(WIDTH, height), layout="constrained")
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


def _lay_out(figure: Figure) -> None:
    """Compute the layout of a finished figure once for all its files, since this takes as long as drawing."""
    if isinstance(figure, PlainFigure):
        figure.write_plainly()
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)


def save_png(figure: Figure, path: Path) -> None:
    """Write a finished figure as a PNG file on white; create the folder if it is missing."""
    _lay_out(figure)
    white: dict[str, Any] = {"format": "png", "dpi": 220, "facecolor": "white", "metadata": {"Software": None}}
    write_whole(path, lambda temporary: figure.savefig(temporary, **white))


def to_svg(figure: Figure, name: str, *, on_page: bool = True) -> str:
    """Return a finished figure as a transparent SVG element, with text and lines in the page's colours if `on_page`.

    Every id in the SVG begins with `name`, so that ids are unique within a page.
    """
    _lay_out(figure)
    name = re.sub(r"[^\w-]", "_", name)
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    if on_page:  # as wide as the page has room
        svg = re.sub(r' (width|height)="[^"]*"', "", svg, count=2)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    return svg.replace(INK, "var(--ink)").replace(GRID, "var(--line)") if on_page else svg


def look(position: int) -> dict[str, Any]:
    """Return the colour and line style of the line at a position; the first 48 lines all differ."""
    return {"color": PALETTE[position % len(PALETTE)], "linestyle": DASHES[position // len(PALETTE) % len(DASHES)]}


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], **options: Any) -> None:
    """Draw points as a line, with markers if there are few points; do nothing without points."""
    if points:
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 40 else None, markersize=3, **options)


def label_axes(axes: Axes, x: str, y: str, *, whole: bool = True) -> bool:
    """Set the labels of axes and put a legend above them; return whether anything is drawn in the axes.

    With `whole`, ticks of the x axis are at integers only. The figure's height grows by the height of the legend.
    """
    axes.set(xlabel=x, ylabel=y)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if handles := {fill(label, 50): handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}:
        columns = max(1, 54 // (7 + max(map(len, handles))))
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": columns}
        room: dict[str, Any] = {
            "borderaxespad": 0.2,
            "borderpad": 0.0,
            "handlelength": 2.4,
            "columnspacing": 1.2,
            "labelspacing": 0.3,
        }
        axes.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, labelcolor=INK, **place, **room)
        if (figure := axes.get_figure(root=True)) is not None:
            figure.set_figheight(figure.get_figheight() + 0.16 * math.ceil(len(handles) / columns))
    return axes.has_data()


def rows_height(names: Sequence[str], least: float) -> float:
    """Return the total height in inches of rows with these names: at least `least` for each, more for long names."""
    return len(names) * max(least, 0.14 * max((fill(name, LONGEST).count("\n") + 1 for name in names), default=1))


def name_ticks(axis: Axis, places: Sequence[float], names: Iterable[str], **options: Any) -> None:
    """Label an axis with names at `places`; long names are wrapped, and many names on the x axis are vertical."""
    lines = [fill(str(name), LONGEST) for name in names]
    if isinstance(axis, XAxis) and len("".join(lines)) > 40:
        options = {"rotation": 90, **options}
    axis.set_ticks(places, lines, fontsize=8, **options)
