"""The tables of a comparison for a terminal, Markdown and csv, the notes below them, and its figures."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhet.comparing.measures import (
    ACCURACIES,
    CONFIDENCE,
    EXAMPLES,
    GAINS,
    MEASURES,
    WORK,
    VariantResult,
    corrected_p_values,
    differences,
)
from fedhet.comparing.settings import EQUAL_MODEL
from fedhet.comparing.tuning import Search, Tuning
from fedhet.results.plotting import BLUE, INK, ORANGE, draw_line, label_axes, look, new_figure
from fedhet.results.tables import format_bytes, format_seconds, format_value

if TYPE_CHECKING:
    from rich.table import Table

_WORDS = ("method", "models")
_LEFT = (*_WORDS, "settings")
_COUNTS = dict(zip((*EXAMPLES, *WORK), ("labelled", "public", "own steps", "steps", "examples seen"), strict=True))
"""Measures that are counts, and their headings."""


def terminal_table(lines: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> "Table":
    """Return a table for a terminal with headings (the first line), rows, and notes below."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, caption="\n".join(notes), caption_justify="left")
    for heading in lines[0]:
        left, whole = heading in _LEFT, heading in _WORDS
        table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=whole)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def whole_table(results: Sequence[VariantResult], baseline: VariantResult) -> list[list[str]]:
    """Return `accuracies`, `gains` and `costs` as one table."""
    tables = accuracies(results, baseline), gains(results), costs(results)
    return [[*first, *second[1:], *third[1:]] for first, second, third in zip(*tables, strict=True)]


def markdown(results: Sequence[VariantResult], baseline: VariantResult, notes: Sequence[str], verdict: str = "") -> str:
    """Return the `verdict`, the `whole_table` and the notes as Markdown."""
    headings, *lines = whole_table(results, baseline)
    lines = [headings, ["---" if heading in _WORDS else "---:" for heading in headings], *lines]
    table = "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)
    escaped = (note.replace("*", "\\*") for note in notes)
    return "\n\n".join([*filter(None, [_in_markdown(verdict)]), table, *escaped]) + "\n"


def _in_markdown(cell: str) -> str:
    return re.sub(r"([|<`\\]|(?<=\])\()", r"\\\1", cell)


def number_rows(results: Sequence[VariantResult], baseline: VariantResult) -> Iterator[Sequence[object]]:
    """Yield headings and a row for each run, then rows over seeds: `mean`, `std`, paired `difference`, p-value `p`."""
    yield ["method", "seed", "models", "equal_architectures", *MEASURES]
    for result in results:
        for each in result.outcomes:
            values = [each.values[measure] for measure in MEASURES]
            yield [result.variant, each.run.seed, each.models, result.equalised, *values]
    for result in results:
        for name, of in (("mean", result.mean), ("std", result.spread)):
            yield [result.variant, name, result.models, result.equalised, *map(of, MEASURES)]
    for result in results:
        if result is not baseline:
            of_all = [result.difference(baseline, measure) for measure in MEASURES]
            for name, end in (("", "mean"), ("_low", "low"), ("_high", "high")):
                values = [getattr(each, end, None) for each in of_all]
                yield [result.variant, f"difference{name}", result.models, result.equalised, *values]
    for variant, p in corrected_p_values(results, baseline).items():
        yield [variant, "p", "", "", *(p if measure == "personal_accuracy" else None for measure in MEASURES)]


def accuracies(results: Sequence[VariantResult], baseline: VariantResult) -> list[list[str]]:
    """Return a table with a line for each variant: its accuracies and the difference to the baseline."""

    def seeds(result: VariantResult) -> str:
        completed = len(result.outcomes)
        return str(completed) if completed == result.seeds_wanted else f"{completed} of {result.seeds_wanted}"

    columns = {"models": [result.models for result in results], "seeds": list(map(seeds, results))}
    for name in _shown(results):
        heading = "after training" if name == "trained_accuracy" else name.removesuffix("_accuracy")
        columns[heading] = [_accuracy(result, name) for result in results]
    found = [None if each is baseline else each.difference(baseline, "personal_accuracy") for each in results]
    columns[f"minus {baseline.variant}"] = ["-" if each is None else str(each) for each in found]
    if p_values := corrected_p_values(results, baseline):
        columns["p"] = [
            _cell(p_values.get(each.variant), lambda p: f"{p:.3f}" if p >= 0.001 else "< 0.001") for each in results
        ]
    return _lines(results, columns)


def _lines(results: Sequence[VariantResult], columns: Mapping[str, Sequence[str]]) -> list[list[str]]:
    rows = zip((result.label for result in results), *columns.values(), strict=True)
    return [["method", *columns], *map(list, rows)]


def _cell(value: float | None, written: Callable[[float], str]) -> str:
    return "-" if value is None else written(value)


def _shown(results: Sequence[VariantResult]) -> list[str]:
    """Return the accuracies that have a column: the personal accuracy, and others that are known and differ from it."""
    without = {
        "trained_accuracy": all(each.mean("trained_accuracy") in (None, each.mean(ACCURACIES[0])) for each in results),
        "common_accuracy": all(each.mean("common_accuracy") is None for each in results),
    }
    return [name for name in ACCURACIES if not without.get(name)]


def _accuracy(result: VariantResult, measure: str) -> str:
    mean, spread = result.mean(measure), result.spread(measure)
    return "-" if mean is None else f"{format_value(mean)} ± {format_value(spread)}"


def gains(results: Sequence[VariantResult]) -> list[list[str]]:
    """Return a table with a line for each variant: its clients' gains over training without exchange, if known."""
    formats = {"worse_off": "{:.0%}", "worst_tenth": "{:+.3f}"}
    known = [name for name in GAINS if any(result.mean(name) is not None for result in results)]
    return _lines(
        results,
        {name.replace("_", " "): [_cell(each.mean(name), formats[name].format) for each in results] for name in known},
    )


def costs(results: Sequence[VariantResult]) -> list[list[str]]:
    """Return a table with a line for each variant: its examples, gradient steps, bytes and time."""
    columns = {
        heading: [_cell(result.mean(name), "{:,.0f}".format) for result in results] for name, heading in _COUNTS.items()
    }
    columns["bytes"] = [_bytes(result) for result in results]
    columns["time"] = [format_seconds(result.mean("seconds")) for result in results]
    return _lines(results, columns)


def _bytes(result: VariantResult) -> str:
    up, down = result.mean("bytes_up"), result.mean("bytes_down")
    return "-" if up is None or down is None else format_bytes(up + down)


def notes_below(
    results: Sequence[VariantResult],
    baseline: VariantResult,
    settings: Sequence[str] = (),
    tuning: Tuning | None = None,
    tuned: Sequence[Search] = (),
) -> list[str]:
    """Return the notes below the tables: how they were measured, notes on `settings`, and the results of tuning."""
    outcomes = [each for result in results for each in result.outcomes]
    metrics = sorted({each.files.metric for each in outcomes}) or ["accuracy"]
    common = {each.run.settings.test_on for each in outcomes} == {"global"}
    where = "the common test set" if common else "the clients' own data"
    notes = [
        f"{' and '.join(metrics).capitalize()} after the last round, weighted by examples, on {where}: mean ± sample "
        "standard deviation over seeds. Examples (labelled, and unlabelled public ones), gradient steps (on clients' "
        "own examples, and all), examples seen in training, bytes (up and down) and time: mean of a run, all clients "
        "together."
    ]
    if "trained_accuracy" in _shown(results):
        notes.append("After training: after the last local training, before the last aggregation.")
    if "common_accuracy" in _shown(results):
        notes.append("Common: on the common test set, of the global model or, without one, of the clients' models.")
    notes += _differences(results, baseline, metrics[0])
    if len(gains(results)[0]) > 1:
        notes.append(
            "Worse off: fraction of clients with a lower accuracy than the same client under local with the same seed. "
            "Worst tenth: mean difference to local of the tenth of clients that gain least."
        )
    if any(result.equalised for result in results):
        notes.append(f"* needs equal architectures: every client got {EQUAL_MODEL}.")
    notes += [*_absent(results), *settings]
    if tuning:
        seeds = ", ".join(map(str, tuning.seeds))
        notes.append(
            f"Tuned by validation accuracy with other seeds ({seeds}), then trained on whole training parts. Chosen "
            f"for {'; '.join(each.text for each in tuned)}."
        )
    return [*notes, *_validation(results)]


def _differences(results: Sequence[VariantResult], baseline: VariantResult, metric: str) -> Iterator[str]:
    found = differences(results, baseline)
    if not found:
        return
    covers = f"with its {CONFIDENCE:.0%} interval (Student's t)"
    if few := {each.seeds for each in found.values() if each and each.low is None}:
        covers = f"{max(few)} here: too few seeds for an interval"
    paired = "paired over the seeds that both completed"
    yield f"Minus {baseline.variant}: difference of personal {metric}, {paired}, {covers}."
    if number := len(corrected_p_values(results, baseline)):
        yield f"p: of no difference, corrected for the number of differences in the table ({number}, Holm)."


def _absent(results: Sequence[VariantResult]) -> Iterator[str]:
    for result in results:
        if short := [each for each in result.outcomes if each.missing]:
            seeds = ", ".join(str(each.run.seed) for each in short)
            count = max(len(each.missing) for each in short)
            client, reason = next(iter(short[0].missing.items()))
            yield (
                f"{result.variant} lacks {count} of {short[0].run.settings.clients} clients (seeds {seeds}), so its "
                f"numbers are of fewer clients: client {client}: {reason}."
            )


def _validation(results: Sequence[VariantResult]) -> Iterator[str]:
    settings = [each.run.settings for result in results for each in result.outcomes]
    if shares := sorted({each.validation for each in settings if each.validation}):
        yield f"{', '.join(f'{share:.0%}' for share in shares)} of training examples were for validation only."


# ---- figures


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
    """Draw each method's sorted gains of clients over training without exchange, or return None without gains."""
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
