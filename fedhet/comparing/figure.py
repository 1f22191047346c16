"""The picture of a comparison."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedhet.comparing.measures import ArmResult
from fedhet.results.figures import BLUE, INK, ORANGE, PALETTE, legend_beside, new_figure, whole_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def comparison_figure(results: Sequence[ArmResult]) -> "Figure":
    """Personal accuracy by round, mean and spread over seeds, beside the last round's personal and global accuracy."""
    results = [result for result in results if result.runs]
    metric = results[0].runs[0].metric
    figure, (curves, bars) = new_figure(10.5, 3.9, panels=2)
    for position, result in enumerate(results):
        colour = PALETTE[position % len(PALETTE)]
        rounds = sorted(set.intersection(*(set(run.curve) for run in result.runs)))
        columns = [[run.curve[number] for run in result.runs] for number in rounds]
        means = [statistics.fmean(column) for column in columns]
        spreads = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
        marker = "o" if len(rounds) < 25 else None
        curves.plot(rounds, means, color=colour, label=result.arm, marker=marker, markersize=3)
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        curves.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    curves.set_xlabel("round")
    curves.set_ylabel(f"personal {metric}")
    curves.set_title("by round (band: spread over seeds)", fontsize=10, color=INK)
    whole_numbers(curves)
    legend_beside(curves)

    for offset, measure, colour in ((-0.19, "personal_accuracy", BLUE), (0.19, "global_accuracy", ORANGE)):
        there = [(i, mean, r.spread(measure)) for i, r in enumerate(results) if (mean := r.mean(measure)) is not None]
        heights = [i + offset for i, _, _ in there]
        label = measure.removesuffix("_accuracy")
        bars.barh(heights, [mean for _, mean, _ in there], height=0.36, color=colour, label=label, alpha=0.85)
        for height, (_, mean, spread) in zip(heights, there, strict=True):
            bars.errorbar(mean, height, xerr=spread, color=INK, linewidth=1, capsize=2.5)
            bars.annotate(
                f"{mean:.3f}",
                (mean + (spread or 0), height),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                color=INK,
                fontsize=8,
            )
    bars.set_yticks(range(len(results)), [result.arm + (" *" if result.forced else "") for result in results])
    bars.set_ylim(len(results) - 0.5, -0.5)
    bars.set_xlim(0, 1.2 * bars.dataLim.x1)
    bars.grid(visible=False, axis="y")
    bars.set_xlabel(metric)
    bars.set_title(
        "after the last round" + (" (* equal models)" * any(r.forced for r in results)), fontsize=10, color=INK
    )
    legend_beside(bars)
    return figure
