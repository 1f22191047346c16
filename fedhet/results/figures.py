"""The figures of runs, and of the matrices that methods record for reports (`Method.drawings`)."""

from collections.abc import Mapping
from importlib import import_module
from itertools import accumulate, groupby, pairwise
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from fedhet.methods.method import Drawing
from fedhet.results.history import RunFiles, TestSet, Which, final_clients, learning_curve, scored_curve
from fedhet.results.plotting import (
    BLUE,
    GRID,
    INK,
    ORANGE,
    PALETTE,
    draw_image,
    draw_line,
    label_axes,
    look,
    name_ticks,
    new_figure,
    rows_height,
)
from fedhet.results.tables import UNDISCLOSED
from fedhet.utils.statistics import client_order, grouped

_TESTS: tuple[tuple[TestSet, str, str], ...] = (("own", "-", ""), ("common", "--", ", common test set"))
_CURVE_LABELS = {
    "trained": {"trained": "personal models", "received": "global model"},
    "received": {"trained": "after local training", "received": "global model"},
    None: {"trained": "after training", "received": "as received"},
}


def run_figures(run: RunFiles, drawings: Mapping[str, Drawing]) -> dict[str, Figure]:
    """Return a run's figures by name, in the order of its report; `drawings` maps names of matrices to drawings."""
    drawn = {"accuracy": accuracy_figure(run), "clients": clients_figure(run), "losses": loss_figure(run)}
    for name, matrices in run.matrices.items():
        if name in drawings:
            module, _, function = drawings[name].figure.partition(":")
            drawn[name] = getattr(import_module(module), function)(matrices)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def accuracy_figure(run: RunFiles) -> Figure | None:
    """Draw the weighted mean accuracy by round, with the range over clients as a band."""
    figure, (axes,) = new_figure(2.9)
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
    """Draw the clients' last accuracies by architecture, with a dot for each client and a bar at the mean."""
    rows = final_clients(run.clients)
    by_name = grouped((row.architecture, row.accuracy) for row in rows if row.accuracy is not None)
    if not by_name:
        return None
    labels = [f"{name or UNDISCLOSED} ({len(by_name[name])})" for name in sorted(by_name)]
    figure, (axes,) = new_figure(0.8 + rows_height(labels, 0.4))
    for position, name in enumerate(sorted(by_name)):
        values = sorted(by_name[name])
        # Neighbours in the sorted list go to different heights, so equal accuracies stay apart.
        heights = [position + (0, -0.14, 0.14)[i % 3] for i in range(len(values))]
        colour = PALETTE[position % len(PALETTE)]
        axes.plot(values, heights, "o", color=colour, markersize=5, alpha=0.75, markeredgewidth=0)
        axes.vlines(fmean(values), position - 0.3, position + 0.3, color=INK, linewidth=2)
    name_ticks(axes.yaxis, range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{run.metric} of each client (bar: mean)")
    return figure


def loss_figure(run: RunFiles) -> Figure | None:
    """Draw the training loss, including the terms that the method adds, and the test loss by round."""
    figure, (axes,) = new_figure(2.7)
    training = [(row["round"], row["train_loss"]) for row in run.rows if row.get("train_loss") is not None]
    draw_line(axes, training, color=ORANGE, label="training")
    draw_line(axes, scored_curve(run.rows, run.scored, "loss"), color=BLUE, label="test")
    return figure if label_axes(axes, "round", "loss") else None


def runs_figure(runs: Mapping[str, RunFiles]) -> Figure | None:
    """Draw the accuracy of several runs by round, each by the evaluation that scores its method."""
    figure, (axes,) = new_figure(2.9)
    for place, (name, run) in enumerate(runs.items()):
        draw_line(axes, run.curve, **look(place), label=name)
    return figure if label_axes(axes, "round", next(iter(runs.values())).metric) else None


MOST_LABELLED = 24
"""The most clients with names along an axis."""


def cka_figure(matrices: Mapping[str, Any]) -> Figure:
    """Draw the similarity (centred kernel alignment, CKA) between clients before and after training, by architecture.

    `matrices` has `clients` (names), `architectures` (may be empty), and `before`, `after` or both (clients x clients).
    """
    clients = [str(client) for client in matrices["clients"]]
    architectures = [str(name or "") for name in matrices.get("architectures") or [""] * len(clients)]
    order = sorted(range(len(clients)), key=lambda i: (architectures[i], client_order(clients[i])))
    groups = [(name, len(list(members))) for name, members in groupby(architectures[i] for i in order)]
    ends = list(accumulate((size for _, size in groups), initial=0))
    sides = [side for side in ("before", "after") if matrices.get(side) is not None]
    figure, panels = new_figure(3.9 * len(sides), rows=len(sides))
    figure.set_layout_engine("compressed")  # for squares; otherwise long names are cut
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
            name_ticks(axes.xaxis, range(len(order)), (clients[i] for i in order))
        name_ticks(axes.yaxis, _middles(ends), (name or UNDISCLOSED for name, _ in groups))
    bar = figure.colorbar(image, ax=panels, pad=0.02, fraction=0.025)
    bar.set_label("CKA", color=INK)
    bar.ax.tick_params(color=GRID, labelcolor=INK, labelsize=8)
    bar.outline.set_visible(False)
    return figure


def shared_filters_figure(matrices: Mapping[str, Any]) -> Figure:
    """Draw which units of the global model each client has, by layer; units that most clients have come first.

    `matrices` has `clients` (names) and `layers`, each with its `name` and `units` (clients x global units, 0 or 1).
    """
    clients = [str(client) for client in matrices["clients"]]
    layers = {layer["name"]: np.asarray(layer["units"]) for layer in matrices["layers"]}
    ordered = [units[:, np.argsort(-units.sum(0), kind="stable")] for units in layers.values()]
    figure, (axes,) = new_figure(max(1.8, 1.2 + rows_height(clients[:MOST_LABELLED], 0.17)))
    present = np.ma.masked_equal(np.concatenate(ordered, axis=1), 0)
    draw_image(axes, present, cmap=ListedColormap([BLUE]), alpha=0.5, aspect="auto")
    ends = list(accumulate((units.shape[1] for units in ordered), initial=0))
    for edge in ends[1:-1]:
        axes.axvline(edge - 0.5, color=ORANGE, linewidth=1)
    labels = [f"{name} ({units.shape[1]})" for name, units in layers.items()]
    name_ticks(axes.xaxis, _middles(ends), labels)
    axes.set_ylabel("client")
    if len(clients) <= MOST_LABELLED:
        name_ticks(axes.yaxis, range(len(clients)), clients)
    return figure


def _middles(ends: list[int]) -> list[float]:
    return [(start + end - 1) / 2 for start, end in pairwise(ends)]
