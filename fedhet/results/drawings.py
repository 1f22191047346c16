"""Drawings of the matrices that methods keep for their reports; which method has which, the registry says."""

import math
from collections.abc import Mapping
from itertools import accumulate, groupby, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedhet.results.plotting import BLUE, GRID, INK, ORANGE, colour_bar, draw_image, faded, new_figure
from fedhet.results.tables import UNDISCLOSED
from fedhet.rows import client_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        values = [[math.nan if (value := matrices[side][i][j]) is None else float(value) for j in order] for i in order]
        image = draw_image(axes, values, vmin=0, vmax=1, cmap="viridis")
        others = [v for i, row in enumerate(values) for j, v in enumerate(row) if i != j and math.isfinite(v)]
        mean = f" (mean of pairs {fmean(others):.2f})" if others else ""
        axes.set_title(f"{side} training{mean}", fontsize=10, color=INK)
        for edge in list(accumulate(size for _, size in groups))[:-1]:
            axes.axhline(edge - 0.5, color="white", linewidth=1)
            axes.axvline(edge - 0.5, color="white", linewidth=1)
        axes.set_xlabel("client")
        axes.set_yticks([])
        shown = [clients[i] for i in order] if len(clients) <= 24 else []
        turned = 90 if max(map(len, clients)) > 2 else 0
        axes.set_xticks(range(len(shown)), shown, fontsize=8, rotation=turned)
    if len(clients) <= 24:
        labels = [f"{architectures[i]} · {clients[i]}".removeprefix(" · ") for i in order]
        panels[0].set_yticks(range(len(clients)), labels, fontsize=8)
    else:
        ends = list(accumulate((size for _, size in groups), initial=0))
        middles = [start + (size - 1) / 2 for start, (_, size) in zip(ends, groups, strict=False)]
        panels[0].set_yticks(middles, [name or UNDISCLOSED for name, _ in groups], fontsize=8)
    if image is not None:
        colour_bar(image, panels, "CKA", fraction=0.025)
    return figure


def shared_filters_figure(matrices: Mapping[str, Any]) -> "Figure":
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
    draw_image(axes, rows, vmin=0, vmax=1.4, cmap=faded(BLUE), aspect="auto")
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


def filters_figure(matrices: Mapping[str, Any]) -> "Figure":
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
    draw_image(axes, canvas)
    axes.set_yticks([row * (height + 1) + (height - 1) / 2 for row in range(len(rows))], labels, fontsize=8)
    places = [column * (width + 1) + (width - 1) / 2 for column in range(len(matrices["units"]))]
    axes.set_xticks(places, [str(unit) for unit in matrices["units"]], fontsize=8)
    axes.set_xlabel("global filter")
    return figure


def cosines_figure(matrices: Mapping[str, Any]) -> "Figure":
    """Cosines of clients' descriptors by round, a panel a block, the whole vector last.

    Args:
        matrices: `rounds`, each with its `round`, and by block and for the whole `same` and `other`: the cosine for the
            same image and for different ones.
    """
    rounds = matrices["rounds"]
    count = len(rounds[0]["same"])
    figure, panels = new_figure(1.0 + 1.9 * count, 2.6, panels=count)
    low = min(0.0, *(value for row in rounds for value in (*row["same"], *row["other"])))
    high = max(value for row in rounds for value in (*row["same"], *row["other"]))
    for place, axes in enumerate(panels):
        for which, label, colour in (("same", "same image", BLUE), ("other", "different images", ORANGE)):
            points = [row["round"] for row in rounds], [row[which][place] for row in rounds]
            axes.plot(*points, color=colour, marker="o", markersize=3, label=label)
        axes.set_title("whole" if place == count - 1 else f"block {place + 1}", fontsize=10, color=INK)
        axes.set_ylim(low - 0.02, high + 0.02)
        axes.set_xlabel("round")
    panels[0].set_ylabel("cosine to the others' mean")
    panels[-1].legend(fontsize=7, frameon=False, labelcolor=INK)
    return figure


def heat_maps_figure(matrices: Mapping[str, Any]) -> "Figure":
    """The regions that networks attend to in an image, a row a client: the image, then each block's heat map over it.

    Args:
        matrices: `image` (channels, height, width) of any range, or None where the server does not have it; `clients`;
            `architectures` (of each, may be empty); `maps`, for each client those of its blocks, (height, width).
    """
    import numpy as np

    clients, maps = matrices["clients"], matrices["maps"]
    columns = 1 + max(map(len, maps))
    figure, panels = new_figure(1.2 + 1.3 * columns, 0.6 + 1.35 * len(clients), panels=columns, rows=len(clients))
    image = None if matrices["image"] is None else np.asarray(matrices["image"], dtype=float)
    if image is not None:
        image = image.mean(0) if len(image) != 3 else np.moveaxis(image, 0, -1)
        image = (image - image.min()) / max(float(np.ptp(image)), 1e-9)
    for row, client in enumerate(clients):
        own = panels[row * columns : (row + 1) * columns]
        for place, axes in enumerate(own):
            axes.set(xticks=[], yticks=[])
            if image is not None:
                draw_image(axes, image, cmap="gray", extent=(0, 1, 0, 1))
            if 0 < place <= len(maps[row]):
                alpha = 0.6 if image is not None else 1
                draw_image(axes, maps[row][place - 1], cmap="inferno", alpha=alpha, extent=(0, 1, 0, 1))
            if row == 0:
                axes.set_title("image" if place == 0 else f"block {place}", fontsize=9, color=INK)
        name = matrices["architectures"][row] or f"client {client}"
        own[0].set_ylabel(name, fontsize=8)
    return figure


def layer_graphs_figure(matrices: Mapping[str, Any]) -> "Figure":
    """Graphs of layers side by side, from the input down, a colour a layer type.

    Args:
        matrices: `graphs`, each with its `architecture`, how many `clients` have it, the `types` of its nodes in the
            order of the data flow, and `edges`, pairs of places in it.
    """
    import matplotlib
    from matplotlib.lines import Line2D

    graphs = matrices["graphs"]
    types = sorted({type for graph in graphs for type in graph["types"]})
    palette = matplotlib.colormaps["tab20"]
    colours = {type: palette(place % 20) for place, type in enumerate(types)}
    deepest = max(len(graph["types"]) for graph in graphs)
    figure, panels = new_figure(1.6 + 1.7 * len(graphs), max(3.0, 0.9 + 0.28 * deepest), panels=len(graphs))
    for axes, graph in zip(panels, graphs, strict=True):
        for source, to in graph["edges"]:
            skipped = abs(to - source) > 1
            bend = {"connectionstyle": f"arc3,rad={0.35 if skipped else 0}", "shrinkA": 5, "shrinkB": 5}
            arrow = {"arrowstyle": "-|>", "color": ORANGE if skipped else GRID, **bend}
            axes.annotate("", xy=(0, -to), xytext=(0, -source), arrowprops=arrow)
        places = range(len(graph["types"]))
        nodes = [colours[type] for type in graph["types"]]
        axes.scatter([0] * len(places), [-place for place in places], c=nodes, s=70, zorder=3)
        axes.set_title(f"{graph['architecture']}\n{graph['clients']} clients", fontsize=9, color=INK)
        axes.set_xlim(-1, 1)
        axes.set_ylim(0.6 - deepest, 0.6)
        axes.axis("off")
    marks = [Line2D([], [], marker="o", linestyle="", color=colours[type], label=type) for type in types]
    figure.legend(handles=marks, loc="outside right upper", fontsize=8, frameon=False, labelcolor=INK)
    return figure
