"""Drawings of the matrices that methods keep for their reports; which method has which, the registry says."""

from collections.abc import Mapping
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedhet.results.plotting import BLUE, INK, ORANGE, colour_bar, draw_image, faded, new_figure
from fedhet.results.tables import UNDISCLOSED
from fedhet.rows import client_order

MOST_LABELLED = 24
"""Up to so many clients are named along an axis."""


def cka_figure(matrices: Mapping[str, Any]) -> Figure:
    """Pairwise CKA between clients before and after training, side by side, clients in order of architecture.

    `matrices` has `clients` (names), `architectures` (may be empty), and `before` and `after` (clients x clients, 0 to
    1), or one of them.
    """
    clients = [str(client) for client in matrices["clients"]]
    architectures = [str(name or "") for name in matrices.get("architectures") or [""] * len(clients)]
    order = sorted(range(len(clients)), key=lambda i: (architectures[i], client_order(clients[i])))
    groups = [(name, len(list(members))) for name, members in groupby(architectures[i] for i in order)]
    ends = list(accumulate((size for _, size in groups), initial=0))
    sides = [side for side in ("before", "after") if matrices.get(side) is not None]
    figure, panels = new_figure(1.9 + 3.4 * len(sides), 4.0, panels=len(sides))
    for axes, side in zip(panels, sides, strict=True):
        values = np.asarray(matrices[side], dtype=float)[np.ix_(order, order)]
        image = draw_image(axes, values, vmin=0, vmax=1, cmap="viridis")
        pairs = values[~np.eye(len(values), dtype=bool) & np.isfinite(values)]
        mean = f" (mean of pairs {pairs.mean():.2f})" if pairs.size else ""
        axes.set_title(f"{side} training{mean}", fontsize=10, color=INK)
        for edge in ends[1:-1]:
            axes.axhline(edge - 0.5, color="white", linewidth=1)
            axes.axvline(edge - 0.5, color="white", linewidth=1)
        axes.set(xlabel="client", xticks=[], yticks=[])
        if len(clients) <= MOST_LABELLED:
            turned = 90 if max(map(len, clients)) > 2 else 0
            axes.set_xticks(range(len(order)), [clients[i] for i in order], fontsize=8, rotation=turned)
    panels[0].set_yticks(_middles(ends), [name or UNDISCLOSED for name, _ in groups], fontsize=8)
    colour_bar(image, panels, "CKA", fraction=0.025)
    return figure


def shared_filters_figure(matrices: Mapping[str, Any]) -> Figure:
    """Which clients share which global units, layer by layer; the units of a layer that most clients share come first.

    `matrices` has `clients` and `layers`, each with its `name` and `units`, clients by global units, 1 or 0.
    """
    clients = [str(client) for client in matrices["clients"]]
    layers = {layer["name"]: np.asarray(layer["units"]) for layer in matrices["layers"]}
    ordered = [units[:, np.argsort(-units.sum(0), kind="stable")] for units in layers.values()]
    figure, (axes,) = new_figure(8.4, max(1.8, 0.9 + 0.17 * len(clients)))
    draw_image(axes, np.concatenate(ordered, axis=1), vmin=0, vmax=1.4, cmap=faded(BLUE), aspect="auto")
    ends = list(accumulate((units.shape[1] for units in ordered), initial=0))
    for edge in ends[1:-1]:
        axes.axvline(edge - 0.5, color=ORANGE, linewidth=1)
    labels = [f"{name} ({units.shape[1]})" for name, units in layers.items()]
    axes.set_xticks(_middles(ends), labels, fontsize=8, rotation=30, ha="right")
    axes.set_ylabel("client")
    if len(clients) <= MOST_LABELLED:
        axes.set_yticks(range(len(clients)), clients, fontsize=8)
    return figure


def _middles(ends: list[int]) -> list[float]:
    """Where the names of groups stand that lie side by side along an axis."""
    return [(start + end - 1) / 2 for start, end in pairwise(ends)]


def filters_figure(matrices: Mapping[str, Any]) -> Figure:
    """First-layer filters that were matched: a row a client, then the global one, then the plain mean at that place.

    `matrices` has `clients`, `units`, `local` (a client's filters, None where it has none), `matched` and `plain`; a
    filter is (channels, height, width), shown in its own range, other channels than three by their mean.
    """
    rows = [*matrices["local"], matrices["matched"], matrices["plain"]]
    labels = [*(f"client {client}" for client in matrices["clients"]), "matched", "plain mean"]
    _, height, width = np.shape(matrices["matched"][0])
    tops, lefts = (height + 1) * np.arange(len(rows)), (width + 1) * np.arange(len(matrices["units"]))
    canvas = np.zeros((len(rows) * (height + 1), len(lefts) * (width + 1), 4))
    for top, filters in zip(tops, rows, strict=True):
        for left, values in zip(lefts, filters, strict=True):
            if values is not None:
                canvas[top : top + height, left : left + width, :3] = _pixels(values)
                canvas[top : top + height, left : left + width, 3] = 1
    figure, (axes,) = new_figure(1.4 + 0.55 * len(lefts), 0.7 + 0.5 * len(rows))
    draw_image(axes, canvas)
    axes.set_yticks(tops + (height - 1) / 2, labels, fontsize=8)
    axes.set_xticks(lefts + (width - 1) / 2, [str(unit) for unit in matrices["units"]], fontsize=8)
    axes.set_xlabel("global filter")
    return figure


def _pixels(values: Any) -> Any:
    """An image (channels, height, width) of any range in colours: its own if there are three, else grey."""
    image = np.moveaxis(np.asarray(values, dtype=float), 0, -1)
    image = image if image.shape[-1] == 3 else image.mean(-1, keepdims=True).repeat(3, -1)
    return (image - image.min()) / max(float(np.ptp(image)), 1e-9)


def cosines_figure(matrices: Mapping[str, Any]) -> Figure:
    """Cosines of clients' descriptors by round, a panel a block, the whole vector last.

    `matrices` has `rounds`, each with its `round`, and by block the cosine for the `same` image and for `other` ones.
    """
    rounds = matrices["rounds"]
    count = len(rounds[0]["same"])
    figure, panels = new_figure(1.0 + 1.9 * count, 2.6, panels=count)
    cosines = np.asarray([[row["same"], row["other"]] for row in rounds])
    for place, axes in enumerate(panels):
        for which, (label, colour) in enumerate((("same image", BLUE), ("different images", ORANGE))):
            points = [row["round"] for row in rounds], cosines[:, which, place]
            axes.plot(*points, color=colour, marker="o", markersize=3, label=label)
        axes.set_title("whole" if place == count - 1 else f"block {place + 1}", fontsize=10, color=INK)
        axes.set_ylim(min(0.0, cosines.min()) - 0.02, cosines.max() + 0.02)
        axes.set_xlabel("round")
    panels[0].set_ylabel("cosine to the others' mean")
    panels[-1].legend(fontsize=7, frameon=False, labelcolor=INK)
    return figure


def heat_maps_figure(matrices: Mapping[str, Any]) -> Figure:
    """The regions that networks attend to in an image, a row a client: the image, then each block's heat map over it.

    `matrices` has `image` (channels, height, width) of any range, or None; `clients`; `architectures` (may be empty);
    and `maps`, for each client those of its blocks, (height, width).
    """
    clients, maps = matrices["clients"], matrices["maps"]
    columns = 1 + max(map(len, maps))
    figure, panels = new_figure(1.2 + 1.3 * columns, 0.6 + 1.35 * len(clients), panels=columns, rows=len(clients))
    image = None if matrices["image"] is None else _pixels(matrices["image"])
    for place, axes in enumerate(panels):
        row, block = divmod(place, columns)
        axes.set(xticks=[], yticks=[])
        if image is not None:
            draw_image(axes, image, extent=(0, 1, 0, 1))
        if 0 < block <= len(maps[row]):
            alpha = 0.6 if image is not None else 1
            draw_image(axes, maps[row][block - 1], cmap="inferno", alpha=alpha, extent=(0, 1, 0, 1))
        if row == 0:
            axes.set_title(f"block {block}" if block else "image", fontsize=9, color=INK)
        if block == 0:
            axes.set_ylabel(matrices["architectures"][row] or f"client {clients[row]}", fontsize=8)
    return figure
