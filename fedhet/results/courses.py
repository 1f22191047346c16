"""Further figures of a run: what it cost, its losses, each client's course, who has which classes; and several runs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fedhet.results.figures import BLUE, INK, ORANGE, PALETTE, faded, legend_beside, new_figure, whole_numbers
from fedhet.results.history import Which, flat, scored_curve
from fedhet.results.run_files import RunFiles
from fedhet.rows import client_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEGABYTE = 1e6
MOST_NAMED = 10
"""Up to so many clients have a colour and a name in a figure."""


def loss_figure(run: RunFiles) -> "Figure | None":
    """The loss in training, with what the method adds to it, and the loss on test data; None without."""
    which = run.personal or "trained"
    training = [(row["round"], row["train_loss"]) for row in run.rows if row.get("train_loss") is not None]
    tested = []
    for row in run.rows:
        found = flat(row)  # on the common test set, of clients or of the server, where nothing else is
        places = f"{which}/loss/weighted", f"common/{which}/loss/weighted", f"common/{which}/loss"
        mean = next((found[place] for place in places if place in found), None)
        if mean is not None:
            before = which == "received" or row.get("final", False)
            tested.append((row["round"] - before, mean))
    if not training and not tested:
        return None
    figure, (axes,) = new_figure(7.2, 3.0)
    for points, label, colour in ((training, "training", ORANGE), (tested, "test", BLUE)):
        if points:
            marker = "o" if len(points) < 40 else None
            axes.plot(*zip(*points, strict=True), color=colour, label=label, marker=marker, markersize=3)
    axes.set_xlabel("round")
    axes.set_ylabel("loss")
    whole_numbers(axes)
    legend_beside(axes)
    return figure


def cost_figure(runs: Mapping[str, RunFiles]) -> "Figure | None":
    """Accuracy by payload bytes sent so far, of one run or of several; None without both."""

    def by_bytes(run: RunFiles) -> list[tuple[float, float]]:
        sent = dict(zip((row["round"] for row in run.rows), accumulate(map(_bytes, run.rows)), strict=True))
        return [(sent[r] / MEGABYTE, value) for r, value in scored_curve(run.rows, _scored(run)) if sent.get(r)]

    return _courses(runs, by_bytes, "payload so far, all clients, both ways (MB)")


def overlay_figure(runs: Mapping[str, RunFiles]) -> "Figure | None":
    """Accuracy by round of several runs, each by what its method is scored by; None without evaluations."""
    figure = _courses(runs, lambda run: scored_curve(run.rows, _scored(run)), "round")
    if figure is not None:
        whole_numbers(figure.axes[0])
    return figure


def clients_by_round_figure(run: RunFiles) -> "Figure | None":
    """Each client's accuracy by round, by the evaluation that its method is scored by; None with fewer than two."""
    before = _scored(run) == "received"
    courses: dict[str, dict[int, float]] = {}
    for row in run.clients:
        if row.accuracy is not None:
            final = run.rows and run.rows[-1].get("final") and row.round == run.rows[-1]["round"]
            courses.setdefault(row.client, {})[row.round - bool(before or final)] = row.accuracy
    if len({r for course in courses.values() for r in course}) < 2:
        return None
    from matplotlib.collections import LineCollection

    figure, (axes,) = new_figure(7.2, 3.2)
    few = len(courses) <= MOST_NAMED
    lines = {client: sorted(courses[client].items()) for client in sorted(courses, key=client_order)}
    for place, (client, points) in enumerate(lines.items() if few else ()):
        style = "-" if place < len(PALETTE) else "--"
        axes.plot(*zip(*points, strict=True), style, color=PALETTE[place % len(PALETTE)], linewidth=1, label=client)
    if not few:  # at once: thousands of lines of their own take seconds
        axes.add_collection(LineCollection(list(lines.values()), colors=BLUE, linewidths=1, alpha=0.35))
    axes.set_xlabel("round")
    axes.set_ylabel(f"{run.metric} of each client")
    whole_numbers(axes)
    if few:
        legend_beside(axes)
    return figure


def partition_figure(partition: Mapping[str, Any]) -> "Figure":
    """How many training examples of each class each client has.

    Args:
        partition: `clients` (names), `classes` (numbers) and `examples`, clients x classes.
    """
    clients, classes, counts = partition["clients"], partition["classes"], partition["examples"]
    figure, (axes,) = new_figure(1.8 + 0.42 * max(len(classes), 8), 1.1 + 0.26 * min(len(clients), 60))
    image = axes.imshow(counts, cmap=faded(BLUE), vmin=0, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    axes.set_xticks(range(len(classes)), [str(each) for each in classes], fontsize=8)
    if len(clients) <= 60:
        axes.set_yticks(range(len(clients)), clients, fontsize=8)
    if len(clients) <= 24 and len(classes) <= 24:
        for y, row in enumerate(counts):
            for x, count in enumerate(row):
                if count:
                    axes.text(x, y, str(count), ha="center", va="center", fontsize=7, color=INK, in_layout=False)
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02).ax.tick_params(labelcolor=INK, labelsize=8)
    return figure


def _courses(
    runs: Mapping[str, RunFiles], points_of: Callable[[RunFiles], Sequence[tuple[float, float]]], along: str
) -> "Figure | None":
    """A curve of accuracy for each run that has points."""
    figure, (axes,) = new_figure(7.2, 3.4)
    for place, (name, run) in enumerate(runs.items()):
        if points := points_of(run):
            marker = "o" if len(points) < 40 else None
            colour = PALETTE[place % len(PALETTE)]
            axes.plot(*zip(*points, strict=True), color=colour, label=name, marker=marker, markersize=3)
    if not axes.lines:
        return None
    axes.set_xlabel(along)
    axes.set_ylabel(next(iter(runs.values())).metric)
    if len(runs) > 1:
        legend_beside(axes)
    return figure


def _bytes(row: Mapping[str, Any]) -> int:
    return int(row.get("bytes_up", 0) + row.get("bytes_down", 0))


def _scored(run: RunFiles) -> Which:
    return run.personal or "trained"
