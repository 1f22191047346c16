"""The tables of a comparison for a terminal, Markdown and csv, the notes below them, and its figures."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedhet.comparing import measures
from fedhet.comparing.measures import VariantResult
from fedhet.comparing.settings import EQUAL_MODEL
from fedhet.comparing.tuning import Search, Tuning
from fedhet.results.plotting import INK, draw_line, label_axes, look, new_figure
from fedhet.results.tables import format_bytes, format_seconds, format_value
from fedhet.utils.statistics import grouped

_WORDS = ("method", "models")
_LEFT = (*_WORDS, "settings")
_LEAST = ("own steps", "public", "labelled", "models", "seeds", "steps", "worst tenth", "p", "global")
"""Headings of the columns that a narrow terminal does not show, the least important first."""
_COUNTED = "labelled", "public", "own steps", "steps", "examples seen"
_COUNTS = dict(zip((*measures.EXAMPLES, *measures.WORK), _COUNTED, strict=True))
"""Measures that are counts, and their headings."""
_GAINS = dict(zip(measures.GAINS, ("{:.0%}", "{:+.3f}"), strict=True))
_Cell = Callable[[VariantResult], str]


@dataclass(frozen=True)
class TerminalTable:
    """A table with headings (the first line) and notes below; a narrow terminal shows its most important columns."""

    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(zip(*self.lines, strict=True))
        for heading in _LEAST:
            if sum(max(map(len, column)) + 3 for column in columns) - 3 > options.max_width:
                columns = [column for column in columns if column[0] != heading]
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for heading, *_ in columns:
            left, whole = heading in _LEFT, heading in _WORDS
            table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=whole)
        for line in list(zip(*columns, strict=True))[1:]:
            table.add_row(*line)
        yield table
        yield from map(Text, self.notes)


def whole_table(results: Sequence[VariantResult], baseline: VariantResult) -> list[list[str]]:
    """Return the tables of `separate_tables`, joined into one."""
    lines = zip(*separate_tables(results, baseline), strict=True)
    return [[*line, *(cell for other in others for cell in other[1:])] for line, *others in lines]


def markdown(results: Sequence[VariantResult], baseline: VariantResult, notes: Sequence[str], verdict: str = "") -> str:
    """Return the sentence `verdict`, the `whole_table` and the notes as Markdown."""
    headings, *lines = whole_table(results, baseline)
    lines = [headings, ["---" if heading in _WORDS else "---:" for heading in headings], *lines]
    table = "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)
    escaped = (note.replace("*", "\\*") for note in notes)
    return "\n\n".join([*filter(None, [_in_markdown(verdict)]), table, *escaped]) + "\n"


def _in_markdown(cell: str) -> str:
    return re.sub(r"([|<`\\]|(?<=\])\()", r"\\\1", cell)


def number_rows(results: Sequence[VariantResult], baseline: VariantResult) -> Iterator[Sequence[object]]:
    """Yield the rows of `comparison.csv`: headings, runs, then `mean`, `std`, paired `difference` and p-value `p`."""
    yield ["method", "seed", "models", "equal_architectures", *measures.MEASURES]
    for result in results:
        for each in result.outcomes:
            values = [each.values[measure] for measure in measures.MEASURES]
            yield [result.variant, each.run.seed, each.models, result.equalised, *values]
    for result in results:
        for name, of in (("mean", result.mean), ("std", result.spread)):
            yield [result.variant, name, result.models, result.equalised, *map(of, measures.MEASURES)]
    for result in results:
        if result is not baseline:
            of_all = [result.difference(baseline, measure) for measure in measures.MEASURES]
            for name, end in (("", "mean"), ("_low", "low"), ("_high", "high")):
                values = [getattr(each, end, None) for each in of_all]
                yield [result.variant, f"difference{name}", result.models, result.equalised, *values]
    for variant, p in measures.corrected_p_values(results, baseline).items():
        yield [variant, "p", "", "", *(p if measure == "personal_accuracy" else None for measure in measures.MEASURES)]


def separate_tables(results: Sequence[VariantResult], baseline: VariantResult) -> list[list[list[str]]]:
    """Return tables of accuracies, of gains over training without exchange (if known), and of costs, with headings."""
    known = {name: text for name, text in _GAINS.items() if any(result.mean(name) is not None for result in results)}
    gains: dict[str, _Cell] = {name.replace("_", " "): partial(_mean, name, text) for name, text in known.items()}
    costs: dict[str, _Cell] = {heading: partial(_mean, name, "{:,.0f}") for name, heading in _COUNTS.items()}
    costs |= {"bytes": _bytes, "time": lambda result: format_seconds(result.mean("seconds"))}
    return [
        [["method", *columns], *([result.label, *(cell(result) for cell in columns.values())] for result in results)]
        for columns in (_accuracies(results, baseline), gains, costs)
        if columns
    ]


def _accuracies(results: Sequence[VariantResult], baseline: VariantResult) -> dict[str, _Cell]:
    columns: dict[str, _Cell] = {"models": lambda result: result.models, "seeds": _seeds}
    for name in _shown(results):
        heading = "after training" if name == "trained_accuracy" else name.removesuffix("_accuracy")
        columns[heading] = partial(_accuracy, name)
    found, p_values = measures.differences(results, baseline), measures.corrected_p_values(results, baseline)
    columns[f"minus {baseline.variant}"] = lambda result: str(found.get(result.variant) or "-")
    if p_values:
        columns["p"] = lambda result: _p_value(p_values.get(result.variant))
    return columns


def _seeds(result: VariantResult) -> str:
    completed = len(result.outcomes)
    return str(completed) if completed == result.seeds_wanted else f"{completed} of {result.seeds_wanted}"


def _p_value(p: float | None) -> str:
    return "-" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _mean(measure: str, text: str, result: VariantResult) -> str:
    mean = result.mean(measure)
    return "-" if mean is None else text.format(mean)


def _shown(results: Sequence[VariantResult]) -> list[str]:
    """Return the accuracies that have a column: the personal accuracy, and others that are known and differ from it."""
    without = {
        "trained_accuracy": all(
            each.mean("trained_accuracy") in (None, each.mean("personal_accuracy")) for each in results
        ),
        "common_accuracy": all(each.mean("common_accuracy") is None for each in results),
    }
    return [name for name in measures.ACCURACIES if not without.get(name)]


def _accuracy(measure: str, result: VariantResult) -> str:
    return _mean(measure, "{:.3f} ± " + format_value(result.spread(measure)), result)


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
    """Return the notes below the tables: how values were measured, the notes `settings`, and the results of tuning."""
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
    if any(result.mean("worse_off") is not None for result in results):
        notes.append(
            "Worse off: fraction of clients with a lower accuracy than the same client under local with the same seed. "
            "Worst tenth: mean difference to local of the tenth of clients that gain least."
        )
    if any(result.equalised for result in results):
        notes.append(f"* needs equal architectures: every client got {EQUAL_MODEL}.")
    notes += [*_absent(results), *_warnings(results), *settings]
    if tuning:
        seeds = ", ".join(map(str, tuning.seeds))
        notes.append(
            f"Tuned by validation accuracy with other seeds ({seeds}), then trained on whole training parts. Chosen "
            f"for {'; '.join(each.text for each in tuned)}."
        )
    return [*notes, *_validation(results)]


def _differences(results: Sequence[VariantResult], baseline: VariantResult, metric: str) -> Iterator[str]:
    found = measures.differences(results, baseline)
    if not found:
        return
    covers = f"with its {measures.CONFIDENCE:.0%} interval (Student's t)"
    if few := {each.seeds for each in found.values() if each and each.low is None}:
        covers = f"{max(few)} here: too few seeds for an interval"
    paired = "paired over the seeds that both completed"
    yield f"Minus {baseline.variant}: difference of personal {metric}, {paired}, {covers}."
    if number := len(measures.corrected_p_values(results, baseline)):
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


def _warnings(results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield each warning of the runs once, after the names of the variants that it concerns."""
    told = (
        (line, each)
        for each in results
        for run in each.outcomes
        for line in (run.files.summary or {}).get("warnings", ())
    )
    for line, variants in grouped(told).items():
        yield f"{', '.join(dict.fromkeys(each.variant for each in variants))}: {line}"


def _validation(results: Sequence[VariantResult]) -> Iterator[str]:
    settings = [each.run.settings for result in results for each in result.outcomes]
    if shares := sorted({each.validation for each in settings if each.validation}):
        yield f"{', '.join(f'{share:.0%}' for share in shares)} of training examples were for validation only."


# ---- figures


def comparison_figure(results: Sequence[VariantResult]) -> Figure:
    """Draw the personal accuracy of each variant by round: the mean over seeds, and the spread as a band."""
    figure, axes = new_figure(3.2)
    results = [result for result in results if result.outcomes]
    for position, result in enumerate(results):
        line = look(position)
        curves = [dict(each.files.curve) for each in result.outcomes]
        rounds = sorted(set.intersection(*map(set, curves)))
        values = np.array([[curve[number] for number in rounds] for curve in curves])
        means, spreads = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0.0
        draw_line(axes, list(zip(rounds, means, strict=True)), **line, label=result.variant)
        axes.fill_between(rounds, means - spreads, means + spreads, color=line["color"], alpha=0.15, linewidth=0)
    label_axes(axes, "round (band: spread over seeds)", f"personal {results[0].outcomes[0].files.metric}")
    return figure


def gains_figure(results: Sequence[VariantResult]) -> Figure | None:
    """Draw each method's sorted gains of clients over training without exchange, or return None without gains."""
    figure, axes = new_figure(2.9)
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
