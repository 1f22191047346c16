"""The figures of a comparison."""

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhet.comparing.measures import VariantResult
from fedhet.results.plotting import BLUE, INK, ORANGE, draw_line, label_axes, look, new_figure


def comparison_figure(results: Sequence[VariantResult]) -> Figure:
    """Draw the personal accuracy by round (mean and spread over seeds) and, below, accuracies after the last round."""
    results = [result for result in results if result.outcomes]
    metric = results[0].outcomes[0].files.metric
    height = 0.2 + 0.5 * len(results)  # of the bars
    figure, (curves, bars) = new_figure(3.2 + height, rows=2, ratios=(2.2, height))
    _draw_curves(curves, results)
    label_axes(curves, "round (band: spread over seeds)", f"personal {metric}")
    _draw_bars(bars, results)
    equal = " (* equal models)" * any(result.equalised for result in results)
    label_axes(bars, f"{metric} after the last round{equal}", "", whole=False)
    return figure


def gains_figure(results: Sequence[VariantResult]) -> Figure | None:
    """Plot the clients' sorted gains over training without exchange (`local`), or return None without gains.

    Each method has one line, with the clients of all seeds.
    """
    figure, (axes,) = new_figure(2.9)
    for position, result in enumerate(results):
        gains = sorted(gain for each in result.outcomes for gain in each.gains.values())
        if not gains:
            continue
        places = [100 * (place + 0.5) / len(gains) for place in range(len(gains))]
        label = f"{result.variant}, {result.mean('worse_off'):.0%} worse off"
        axes.plot(places, gains, **look(position), label=label, drawstyle="steps-mid", linewidth=1.4)
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.set_xlim(0, 100)
    metric = next((each.files.metric for result in results for each in result.outcomes), "accuracy")
    drawn = bool(axes.get_legend_handles_labels()[0])
    label_axes(axes, "clients, in order of their gain (%)", f"{metric} minus that of local", whole=False)
    return figure if drawn else None


def _draw_curves(axes: Axes, results: Sequence[VariantResult]) -> None:
    for position, result in enumerate(results):
        line = look(position)
        curves = [dict(each.files.curve) for each in result.outcomes]
        rounds = sorted(set.intersection(*map(set, curves)))
        values = np.array([[curve[number] for number in rounds] for curve in curves])
        means, spreads = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0.0
        draw_line(axes, list(zip(rounds, means, strict=True)), **line, label=result.variant)
        axes.fill_between(rounds, means - spreads, means + spreads, color=line["color"], alpha=0.15, linewidth=0)


def _draw_bars(axes: Axes, results: Sequence[VariantResult]) -> None:
    place = 0.0
    for result in results:
        for which, colour in (("personal", BLUE), ("global", ORANGE)):
            if (mean := result.mean(f"{which}_accuracy")) is not None:
                style: dict[str, Any] = {"color": colour, "alpha": 0.85, "ecolor": INK, "capsize": 2.5, "label": which}
                spread = result.spread(f"{which}_accuracy")
                bar = axes.barh(place, mean, xerr=spread, height=1, align="edge", **style)
                axes.bar_label(bar, fmt="%.3f", padding=5, color=INK, fontsize=8)
                place += 1
        axes.text(0, place + 0.1, fill(result.label, 56), va="top", fontsize=8, color=INK)
        place += 1.6
    axes.set_yticks([])
    axes.set_ylim(place - 0.4, -0.4)
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
