"""The figures of one or several runs; a figure is None if there is nothing to draw."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from statistics import fmean
from typing import Any

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from fedhet.method import Drawing
from fedhet.results.history import (
    RunFiles,
    TestSet,
    Which,
    final_clients,
    learning_curve,
    models_round,
    scored_curve,
    unseen_lines,
)
from fedhet.results.plotting import (
    BLUE,
    INK,
    ORANGE,
    PALETTE,
    colour_bar,
    draw_image,
    draw_line,
    faded,
    label_axes,
    look,
    name_ticks,
    new_figure,
    rows_height,
    whole_numbers,
)
from fedhet.results.tables import UNDISCLOSED
from fedhet.rows import client_order, grouped

MEGABYTE = 1e6
MOST_NAMED = 100
"""Up to so many clients have a colour and a name in a figure."""

_TESTS: tuple[tuple[TestSet, str, str], ...] = (("own", "-", ""), ("common", "--", ", common test set"))
_CURVE_LABELS = {
    "trained": {"trained": "personal models", "received": "global model"},
    "received": {"trained": "after local training", "received": "global model"},
    None: {"trained": "after training", "received": "as received"},
}


def run_figures(run: RunFiles, drawings: Mapping[str, Drawing]) -> dict[str, Figure]:
    """Draw the figures of a report, by name in order of appearance; a matrix without a drawing is left out."""
    drawn = {"accuracy": accuracy_figure(run), "clients": clients_figure(run), "unseen_clients": unseen_figure(run)}
    for name, matrices in run.matrices.items():
        if name in drawings:
            module, _, function = drawings[name].figure.partition(":")
            drawn[name] = getattr(import_module(module), function)(matrices)
    drawn |= {
        "partition": partition_figure(run.partition) if run.partition else None,
        "losses": loss_figure(run),
        "courses": clients_by_round_figure(run),
        "cost": runs_figure({"": run}, by_bytes=True) if len(run.curve) > 1 else None,
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def accuracy_figure(run: RunFiles) -> Figure | None:
    """Accuracy by round: weighted over clients, with the range over clients behind it."""
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
    """The clients' last accuracies by architecture, a dot a client and a bar at the mean."""
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


def unseen_figure(run: RunFiles) -> Figure | None:
    """Plot the accuracy of unseen clients by epoch of local training, from received weights and from scratch."""
    lines = unseen_lines(run.rows)
    figure, (axes,) = new_figure(2.7)
    starts = {"received": (BLUE, "with what they received"), "scratch": (ORANGE, "from scratch")}
    for test, style, where in _TESTS:
        for start, (colour, label) in starts.items():
            points = [(epoch, value) for epoch, value in enumerate(lines.get((test, start), [])) if value is not None]
            draw_line(axes, points, linestyle=style, color=colour, label=label + where)
    return figure if label_axes(axes, "epochs of training alone", run.metric) else None


def loss_figure(run: RunFiles) -> Figure | None:
    """The loss in training, with what the method adds to it, and the loss on test data."""
    figure, (axes,) = new_figure(2.7)
    training = [(row["round"], row["train_loss"]) for row in run.rows if row.get("train_loss") is not None]
    draw_line(axes, training, color=ORANGE, label="training")
    draw_line(axes, scored_curve(run.rows, run.scored, "loss"), color=BLUE, label="test")
    return figure if label_axes(axes, "round", "loss") else None


def clients_by_round_figure(run: RunFiles) -> Figure | None:
    """Each client's accuracy by round, by the evaluation that its method is scored by; two rounds at least."""
    after = {row["round"]: models_round(row, run.scored) for row in run.rows}
    curves: dict[str, dict[int, float]] = {}
    for row in run.clients:
        if row.accuracy is not None and row.round in after:
            curves.setdefault(row.client, {})[after[row.round]] = row.accuracy
    if len({r for curve in curves.values() for r in curve}) < 2:
        return None
    figure, (axes,) = new_figure(2.9)
    lines = {client: sorted(curves[client].items()) for client in sorted(curves, key=client_order)}
    if len(curves) <= MOST_NAMED:
        for place, (client, points) in enumerate(lines.items()):
            axes.plot(*zip(*points, strict=True), **look(place), linewidth=1, label=client)
    else:  # at once: thousands of lines of their own take seconds
        axes.add_collection(LineCollection(list(lines.values()), colors=BLUE, linewidths=1, alpha=0.35))
    label_axes(axes, "round", f"{run.metric} of each client")
    return figure


def partition_figure(partition: Mapping[str, Any]) -> Figure:
    """The number of training `examples` (clients x classes) of each of the `classes` at each of the `clients`."""
    clients, classes, counts = partition["clients"], partition["classes"], partition["examples"]
    figure, (axes,) = new_figure(0.9 + (rows_height(clients, 0.2) if len(clients) <= 60 else 6.0))
    image = draw_image(axes, counts, cmap=faded(BLUE), vmin=0, aspect="auto")
    label_axes(axes, "class", "client")
    axes.yaxis.set_major_locator(whole_numbers())
    if len(classes) <= 24:
        name_ticks(axes.xaxis, range(len(classes)), classes)
    if len(clients) <= 60:
        name_ticks(axes.yaxis, range(len(clients)), clients)
    if len(clients) <= 60 and len(classes) * len(str(max(map(max, counts), default=0))) <= 48:
        for y, row in enumerate(counts):
            for x, count in enumerate(row):
                if count:
                    axes.text(x, y, str(count), ha="center", va="center", fontsize=7, color=INK, in_layout=False)
    colour_bar(image, [axes], fraction=0.04, ticks=whole_numbers())
    return figure


def runs_figure(runs: Mapping[str, RunFiles], *, by_bytes: bool = False) -> Figure | None:
    """Accuracy of runs, each by the evaluation that its method is scored by: by round, or by bytes sent so far."""
    figure, (axes,) = new_figure(2.9)
    for place, (name, run) in enumerate(runs.items()):
        points: Sequence[tuple[float, float]] = run.curve
        if by_bytes:
            sent = accumulate(row["bytes_up"] + row["bytes_down"] for row in run.rows)
            by_round = dict(zip((row["round"] for row in run.rows), sent, strict=True))
            points = [(by_round[r] / MEGABYTE, value) for r, value in points if by_round.get(r)]
        draw_line(axes, points, **look(place), label=name)
    along = "payload so far, all clients, both ways (MB)" if by_bytes else "round"
    metric = next(iter(runs.values())).metric
    return figure if label_axes(axes, along, metric, whole=not by_bytes) else None
