"""The figures of a run, each drawn once and saved both as PNG and as SVG for the report.

Matplotlib is imported when a figure is drawn, and without pyplot: nothing here opens a display or leaves state behind.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.results.history import ClientRow, RunFiles, TestSet, Which, accuracy_curve, client_order, final_clients
from fedhet.results.tables import UNDISCLOSED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def run_figures(run: RunFiles) -> "dict[str, Figure]":
    """Draw every figure for which the run holds data: name (also of its file) -> figure, in order of appearance."""
    drawn = {
        "accuracy": accuracy_figure(run),
        "clients": clients_figure(run.clients, run.metric),
        "bytes": bytes_figure(run.rows),
    }
    for name, matrices in run.matrices.items():
        if name in MATRIX_FIGURES:
            drawn[name] = MATRIX_FIGURES[name](matrices)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def accuracy_figure(run: RunFiles) -> "Figure | None":
    """Accuracy by round: weighted over clients, with the range over clients behind it; None without evaluations."""
    labels = _CURVE_LABELS[run.personal]
    figure, (axes,) = new_figure(7.2, 3.6)
    drawn = False
    curves: tuple[tuple[Which, str], ...] = (("received", ORANGE), ("trained", BLUE))
    for which, colour in curves:
        if which == "received" and not run.has_global:
            continue
        main = run.personal in (which, None)
        for test, style in _TESTS:
            curve = accuracy_curve(run.rows, which, test=test)
            if not curve:
                continue
            drawn = True
            label = labels[which] + (", common test set" if test == "common" else "")
            rounds, values = zip(*curve, strict=True)
            marker = "o" if len(rounds) < 40 else None
            axes.plot(rounds, values, style, color=colour, label=label, marker=marker, markersize=3.5)
            if main and test == "own":
                low, high = (dict(accuracy_curve(run.rows, which, end)) for end in ("min", "max"))
                inside = [r for r in rounds if r in low and r in high]
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
        mean = math.fsum(values) / len(values)
        axes.plot([mean, mean], [position - 0.3, position + 0.3], color=INK, linewidth=2)
    counts = {name: sum(row.architecture == name for row in final) for name in names}
    axes.set_yticks(range(len(names)), [f"{name or UNDISCLOSED} ({counts[name]})" for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{metric} of each client (bar: mean)")
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


def cka_figure(matrices: Mapping[str, Any]) -> "Figure":
    """Pairwise CKA between clients before and after training, side by side, clients in order of architecture.

    Args:
        matrices: `clients` (names), `architectures` (of each client, may be empty), and `before` and `after`, each a
            matrix clients x clients with values from 0 to 1, or absent.
    """
    clients = [str(client) for client in matrices["clients"]]
    architectures = [str(name or "") for name in matrices.get("architectures") or [""] * len(clients)]
    order = sorted(range(len(clients)), key=lambda i: (architectures[i], client_order(clients[i])))
    sides = [side for side in ("before", "after") if matrices.get(side) is not None]
    figure, panels = new_figure(1.9 + 3.4 * len(sides), 4.0, panels=len(sides))
    groups = [(name, len(list(members))) for name, members in groupby(architectures[i] for i in order)]
    image = None
    for axes, side in zip(panels, sides, strict=True):
        values = [[_number(matrices[side][i][j]) for j in order] for i in order]
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        others = [v for i, row in enumerate(values) for j, v in enumerate(row) if i != j and math.isfinite(v)]
        mean = f" (mean of pairs {math.fsum(others) / len(others):.2f})" if others else ""
        axes.set_title(f"{side} training{mean}", fontsize=10, color=INK)
        axes.grid(visible=False)
        for edge in list(accumulate(size for _, size in groups))[:-1]:
            axes.axhline(edge - 0.5, color="white", linewidth=1)
            axes.axvline(edge - 0.5, color="white", linewidth=1)
        axes.set_xlabel("client")
        axes.set_yticks([])
        if len(clients) <= 24:
            turned = 90 if max(map(len, clients)) > 2 else 0
            axes.set_xticks(range(len(clients)), [clients[i] for i in order], fontsize=8, rotation=turned)
        else:
            axes.set_xticks([])
    if len(clients) <= 24:
        labels = [f"{architectures[i]} · {clients[i]}".removeprefix(" · ") for i in order]
        panels[0].set_yticks(range(len(clients)), labels, fontsize=8)
    else:
        ends = list(accumulate((size for _, size in groups), initial=0))
        middles = [start + (size - 1) / 2 for start, (_, size) in zip(ends, groups, strict=False)]
        panels[0].set_yticks(middles, [name or UNDISCLOSED for name, _ in groups], fontsize=8)
    if image is not None:
        bar = figure.colorbar(image, ax=panels, fraction=0.025, pad=0.02)
        bar.set_label("CKA", color=INK)
        bar.ax.tick_params(color=GRID, labelcolor=INK)
        bar.outline.set_visible(False)
    return figure


def shared_filters_figure(matrices: "Mapping[str, Any]") -> "Figure":
    """Which clients share which global units, layer by layer; the units of a layer that most clients share come first.

    Args:
        matrices: `clients` and `layers`, each with its `name` and `units`, clients by global units, 1 or 0.
    """
    clients = [str(client) for client in matrices["clients"]]
    layers = matrices["layers"]
    ordered = []
    for layer in layers:
        columns = sorted(zip(*layer["units"], strict=True), key=sum, reverse=True)
        ordered.append([list(row) for row in zip(*columns, strict=True)])
    figure, (axes,) = new_figure(8.4, max(1.8, 0.9 + 0.17 * len(clients)))
    rows = [[value for layer in ordered for value in layer[client]] for client in range(len(clients))]
    axes.imshow(rows, vmin=0, vmax=1.4, cmap="Blues", aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    ends = list(accumulate((len(layer[0]) for layer in ordered), initial=0))
    for edge in ends[1:-1]:
        axes.axvline(edge - 0.5, color=ORANGE, linewidth=1)
    middles = [(start + end - 1) / 2 for start, end in pairwise(ends)]
    labels = [f"{layer['name']} ({len(matrix[0])})" for layer, matrix in zip(layers, ordered, strict=True)]
    axes.set_xticks(middles, labels, fontsize=8, rotation=30, ha="right")
    axes.set_ylabel("client")
    if len(clients) <= 24:
        axes.set_yticks(range(len(clients)), clients, fontsize=8)
    return figure


def filters_figure(matrices: "Mapping[str, Any]") -> "Figure":
    """First-layer filters that were matched: a row a client, then the global one, then the plain mean at that place.

    Three channels are shown as colours, others by their mean, each filter in its own range.

    Args:
        matrices: `clients`, `units`, `local` (a client's filters, None where it has none), `matched` and `plain`;
            a filter is (channels, height, width).
    """
    import numpy as np

    rows = [*matrices["local"], matrices["matched"], matrices["plain"]]
    labels = [*(f"client {client}" for client in matrices["clients"]), "matched", "plain mean"]
    _, height, width = np.shape(matrices["matched"][0])
    canvas = np.zeros((len(rows) * (height + 1), len(matrices["units"]) * (width + 1), 4))
    for row, filters in enumerate(rows):
        for column, values in enumerate(filters):
            if values is None:
                continue
            tile = np.moveaxis(np.asarray(values, dtype=float), 0, -1)
            tile = tile if tile.shape[-1] == 3 else tile.mean(-1, keepdims=True).repeat(3, -1)
            low, high = tile.min(), tile.max()
            top, left = row * (height + 1), column * (width + 1)
            canvas[top : top + height, left : left + width, :3] = (tile - low) / (high - low) if high > low else 0.5
            canvas[top : top + height, left : left + width, 3] = 1
    figure, (axes,) = new_figure(1.4 + 0.55 * len(matrices["units"]), 0.7 + 0.5 * len(rows))
    axes.imshow(canvas, interpolation="nearest")
    axes.grid(visible=False)
    axes.set_yticks([row * (height + 1) + (height - 1) / 2 for row in range(len(rows))], labels, fontsize=8)
    places = [column * (width + 1) + (width - 1) / 2 for column in range(len(matrices["units"]))]
    axes.set_xticks(places, [str(unit) for unit in matrices["units"]], fontsize=8)
    axes.set_xlabel("global filter")
    return figure


# What is drawn of each matrix in `matrices.json`, by its name; a method that writes another adds its drawing here.
MATRIX_FIGURES: "dict[str, Callable[[Mapping[str, Any]], Figure]]" = {
    "cka": cka_figure,
    "shared_filters": shared_filters_figure,
    "filters": filters_figure,
}


def new_figure(width: float, height: float, panels: int = 1) -> "tuple[Figure, list[Axes]]":
    """An empty figure, its size in inches, and its panels side by side, in the plain look of all figures here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = list(figure.subplots(1, panels, squeeze=False)[0])
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


def save_png(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG on white, making the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white", metadata={"Software": None})


def to_svg(figure: "Figure", name: str) -> str:
    """A figure as an SVG element to put into a page: transparent, text as text, colours of text from the page.

    Args:
        figure: the figure.
        name: goes before every id, so that the figures of one page do not share ids; the same figure and name give the
            same text.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    return svg.replace(INK, "var(--ink)").replace(GRID, "var(--line)")


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


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
