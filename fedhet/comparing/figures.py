"""The figure of a comparison."""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhet.comparing.measures import VariantResult
from fedhet.results.plotting import BLUE, INK, ORANGE, PALETTE, draw_line, label_axes, new_figure


def comparison_figure(results: Sequence[VariantResult]) -> Figure:
    """Personal accuracy by round, mean and spread over seeds, beside the last round's personal and global accuracy."""
    results = [result for result in results if result.outcomes]
    metric = results[0].outcomes[0].files.metric
    figure, (curves, bars) = new_figure(10.5, 3.9, panels=2)
    _draw_curves(curves, results, metric)
    _draw_bars(bars, results, metric)
    return figure


def _draw_curves(axes: Axes, results: Sequence[VariantResult], metric: str) -> None:
    for position, result in enumerate(results):
        colour = PALETTE[position % len(PALETTE)]
        learning = [dict(each.files.curve) for each in result.outcomes]
        rounds = sorted(set.intersection(*map(set, learning)))
        columns = [[curve[number] for curve in learning] for number in rounds]
        means = [statistics.fmean(column) for column in columns]
        spreads = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
        draw_line(axes, list(zip(rounds, means, strict=True)), color=colour, label=result.variant)
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    label_axes(axes, "round", f"personal {metric}")
    axes.set_title("by round (band: spread over seeds)", fontsize=10, color=INK)


def _draw_bars(axes: Axes, results: Sequence[VariantResult], metric: str) -> None:
    for offset, measure, colour in ((-0.19, "personal_accuracy", BLUE), (0.19, "global_accuracy", ORANGE)):
        bars = [
            (place + offset, mean, result.spread(measure))
            for place, result in enumerate(results)
            if (mean := result.mean(measure)) is not None
        ]
        label = measure.removesuffix("_accuracy")
        heights, means = [height for height, *_ in bars], [mean for _, mean, _ in bars]
        axes.barh(heights, means, height=0.36, color=colour, label=label, alpha=0.85)
        for height, mean, spread in bars:
            axes.errorbar(mean, height, xerr=spread, color=INK, linewidth=1, capsize=2.5)
            place: Any = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{mean:.3f}", (mean + (spread or 0), height), color=INK, fontsize=8, **place)
    axes.set_yticks(range(len(results)), [result.label for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * axes.dataLim.x1)
    axes.grid(visible=False, axis="y")
    label_axes(axes, metric, "", whole=False)
    title = "after the last round" + (" (* equal models)" * any(result.equalised for result in results))
    axes.set_title(title, fontsize=10, color=INK)
