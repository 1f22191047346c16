"""The look of all figures, and their files: PNG, and SVG for pages.

Without pyplot: nothing here opens a display or leaves state behind. Who may draw nothing imports this late.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from fedhet.files import write_whole

# The colours of text and of lines behind the data; in an SVG they become the CSS variables of the page around it, so a
# figure follows the page into dark mode. The others read on light and dark, and to the colour-blind.
INK, GRID = "#23272f", "#d5d9e0"
BLUE, ORANGE, GREEN = "#0f7fc4", "#e08214", "#009e73"
PALETTE = (BLUE, ORANGE, GREEN, "#cc79a7", "#8c6bb1", "#56b4e9", "#b8860b", "#d55e00")


class PlainFigure(Figure):
    """A figure that a notebook shows, and whose text is drawn as it is written: `$` in a name begins no formula."""

    def draw(self, renderer: Any) -> None:
        """Draw it."""
        self.write_plainly()
        super().draw(renderer)

    def write_plainly(self) -> None:
        """Have no text that there is now taken for a formula."""
        for text in self.findobj(Text):
            text.set_parse_math(False)

    def _repr_svg_(self) -> str:
        return to_svg(self, "figure", on_page=False)


def new_figure(width: float, height: float, panels: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure, its size in inches, and its panels, row by row, in the plain look of all figures here."""
    figure = PlainFigure(figsize=(width, height), layout="constrained")
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


def faded(colour: str) -> Colormap:
    """A colormap from nothing to a colour, so that zeros are the page, light or dark."""
    return LinearSegmentedColormap.from_list("faded", [to_rgba(colour, 0.0), to_rgba(colour, 0.7)])


def _lay_out(figure: Figure) -> None:
    """Settle where everything in a finished figure stands, once for all its files: it takes as long as drawing."""
    if isinstance(figure, PlainFigure):
        figure.write_plainly()
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)


def save_png(figure: Figure, path: Path) -> None:
    """Write a finished figure as PNG on white, making the folder if it is missing."""
    _lay_out(figure)
    white: dict[str, Any] = {"format": "png", "dpi": 150, "facecolor": "white", "metadata": {"Software": None}}
    write_whole(path, lambda temporary: figure.savefig(temporary, **white))


def to_svg(figure: Figure, name: str, *, on_page: bool = True) -> str:
    """A finished figure as a transparent SVG element; `on_page`, text and lines have the colours of the page around it.

    The name goes before every id, so that the figures of one page do not share ids.
    """
    _lay_out(figure)
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


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], style: str = "-", **options: Any) -> None:
    """Draw points, if there are any, as a line, with a marker at each where they are few."""
    if points:
        axes.plot(*zip(*points, strict=True), style, marker="o" if len(points) < 40 else None, markersize=3, **options)


def draw_image(axes: Axes, values: Any, **options: Any) -> Any:
    """Draw a matrix as an image without a grid, and return the image."""
    axes.grid(visible=False)
    return axes.imshow(values, **{"interpolation": "nearest", **options})


def label_axes(axes: Axes, x: str, y: str, *, whole: bool = True) -> bool:
    """Name the axes, and put a legend of all that has a label to their right; False if nothing is drawn in them.

    Ticks of the x axis are at `whole` numbers only, such as rounds.
    """
    axes.set(xlabel=x, ylabel=y)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if handles := {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
        axes.legend(handles.values(), handles.keys(), **place, frameon=False, labelcolor=INK)
    return axes.has_data()


def colour_bar(image: Any, panels: Sequence[Axes], label: str = "", **place: float) -> None:
    """Draw the scale of an image's colours beside the panels."""
    bar = image.figure.colorbar(image, ax=panels, **{"pad": 0.02, **place})
    bar.set_label(label, color=INK)
    bar.ax.tick_params(color=GRID, labelcolor=INK, labelsize=8)
    bar.outline.set_visible(False)
