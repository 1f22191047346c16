"""The figures of runs."""

from collections.abc import Mapping
from statistics import fmean

from matplotlib.figure import Figure

from fedhet.results.history import RunFiles, TestSet, Which, final_clients, learning_curve, scored_curve
from fedhet.results.plotting import (
    BLUE,
    INK,
    ORANGE,
    PALETTE,
    draw_line,
    label_axes,
    look,
    name_ticks,
    new_figure,
    rows_height,
)
from fedhet.results.tables import UNDISCLOSED
from fedhet.utils.statistics import grouped

_TESTS: tuple[tuple[TestSet, str, str], ...] = (("own", "-", ""), ("common", "--", ", common test set"))
_CURVE_LABELS = {
    "trained": {"trained": "personal models", "received": "global model"},
    "received": {"trained": "after local training", "received": "global model"},
    None: {"trained": "after training", "received": "as received"},
}


def run_figures(run: RunFiles) -> dict[str, Figure]:
    """Return a run's figures by name, in the order of its report."""
    drawn = {"accuracy": accuracy_figure(run), "clients": clients_figure(run), "losses": loss_figure(run)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def accuracy_figure(run: RunFiles) -> Figure | None:
    """Draw the weighted mean accuracy by round, with the range over clients as a band."""
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
    """Draw the clients' last accuracies by architecture, with a dot for each client and a bar at the mean."""
    rows = final_clients(run.clients)
    by_name = grouped((row.architecture, row.accuracy) for row in rows if row.accuracy is not None)
    if not by_name:
        return None
    labels = [f"{name or UNDISCLOSED} ({len(by_name[name])})" for name in sorted(by_name)]
    figure, axes = new_figure(0.8 + rows_height(labels, 0.4))
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
    figure, axes = new_figure(2.7)
    training = [(row["round"], row["train_loss"]) for row in run.rows if row.get("train_loss") is not None]
    draw_line(axes, training, color=ORANGE, label="training")
    draw_line(axes, scored_curve(run.rows, run.scored, "loss"), color=BLUE, label="test")
    return figure if label_axes(axes, "round", "loss") else None


def runs_figure(runs: Mapping[str, RunFiles]) -> Figure | None:
    """Draw the accuracy of several runs by round, each by the evaluation that scores its method."""
    figure, axes = new_figure(2.9)
    for place, (name, run) in enumerate(runs.items()):
        draw_line(axes, run.curve, **look(place), label=name)
    return figure if label_axes(axes, "round", next(iter(runs.values())).metric) else None
