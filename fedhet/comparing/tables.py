"""The table of a comparison: on the terminal, as Markdown with notes below and, with every run, as rows of numbers."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fedhet.comparing.measures import ACCURACIES, CONFIDENCE, MEASURES, VariantResult
from fedhet.comparing.search import Search
from fedhet.comparing.settings import EQUAL_MODEL
from fedhet.comparing.tuning import Tuning
from fedhet.results.tables import format_bytes, format_seconds, format_value

if TYPE_CHECKING:
    from rich.table import Table

_WORDS = ("method", "models")
_COSTS = ("labelled", "public", "own steps", "steps", "forwards", "bytes", "time")


def terminal_table(lines: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> "Table":
    """Return headings and rows as a table for a terminal, and the notes below it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, caption="\n".join(notes), caption_justify="left")
    for heading in lines[0]:
        table.add_column(heading, justify="left" if heading in _WORDS else "right", overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def whole_table(results: Sequence[VariantResult], baseline: VariantResult) -> list[list[str]]:
    """Return `accuracies` and `costs` side by side."""
    both = zip(accuracies(results, baseline), costs(results), strict=True)
    return [[*left, *right[1:]] for left, right in both]


def markdown(results: Sequence[VariantResult], baseline: VariantResult, notes: Sequence[str]) -> str:
    """Return the whole table as Markdown, and the notes."""
    headings, *lines = whole_table(results, baseline)
    lines = [headings, ["---" if heading in _WORDS else "---:" for heading in headings], *lines]
    table = "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)
    return table + "\n\n" + "\n\n".join(note.replace("*", "\\*") for note in notes) + "\n"


def _in_markdown(cell: str) -> str:
    """A cell whose text is no markup: a client's architecture may have any name."""
    return re.sub(r"([|<`\\]|(?<=\])\()", r"\\\1", cell)


def number_rows(results: Sequence[VariantResult], baseline: VariantResult) -> Iterator[Sequence[object]]:
    """Yield a heading and one row a run, then rows over seeds, which say so in the place of the seed.

    For each method `mean` and `std`; for each but the baseline also its mean paired `difference` to the baseline, and
    the ends of its interval, `difference_low` and `difference_high`.
    """
    yield ["method", "seed", "models", "equal_architectures", *MEASURES]
    for result in results:
        for each in result.outcomes:
            values = [each.values[measure] for measure in MEASURES]
            yield [result.variant, each.run.seed, each.models, result.equalised, *values]

    def row(result: VariantResult, name: str, values: Sequence[float | None]) -> list[object]:
        return [result.variant, name, result.models, result.equalised, *values]

    for result in results:
        yield row(result, "mean", [result.mean(measure) for measure in MEASURES])
        yield row(result, "std", [result.spread(measure) for measure in MEASURES])
    for result in results:
        if result is baseline:
            continue
        differences = [result.difference(baseline, measure) for measure in MEASURES]
        yield row(result, "difference", [each.mean if each else None for each in differences])
        for name, side in (("difference_low", -1), ("difference_high", 1)):
            ends = [
                each.mean + side * each.margin if each and each.margin is not None else None for each in differences
            ]
            yield row(result, name, ends)


def accuracies(results: Sequence[VariantResult], baseline: VariantResult) -> list[list[str]]:
    """Return headings and a line for each variant: its accuracies, and their difference to the baseline.

    Accuracy after local training has a column where it is not the personal one, on the common test set if evaluated.
    """
    optional = {"trained_accuracy": _trained_differs(results), "common_accuracy": _on_common(results)}
    shown = [name for name in ACCURACIES if optional.get(name, True)]
    words = ["after training" if name == "trained_accuracy" else name.removesuffix("_accuracy") for name in shown]
    lines = [[*_WORDS, "seeds", *words, f"minus {baseline.variant}"]]
    for result in results:
        wanted = f" of {result.seeds_wanted}" if len(result.outcomes) < result.seeds_wanted else ""
        values = [_accuracy(result, name) for name in shown]
        seeds = f"{len(result.outcomes)}{wanted}"
        lines.append([result.label, result.models, seeds, *values, _difference(result, baseline)])
    return lines


def _trained_differs(results: Sequence[VariantResult]) -> bool:
    return any(each.mean("trained_accuracy") not in (None, each.mean("personal_accuracy")) for each in results)


def _on_common(results: Sequence[VariantResult]) -> bool:
    return any(each.mean("common_accuracy") is not None for each in results)


def _accuracy(result: VariantResult, measure: str) -> str:
    mean, spread = result.mean(measure), result.spread(measure)
    return "-" if mean is None else f"{format_value(mean)} ± {format_value(spread)}"


def _difference(result: VariantResult, baseline: VariantResult) -> str:
    """The paired difference of personal accuracy and its interval."""
    difference = None if result is baseline else result.difference(baseline, "personal_accuracy")
    if difference is None:
        return "-"
    mean, margin = difference.mean, difference.margin
    return f"{mean:+.3f}" + ("" if margin is None else f" [{mean - margin:+.3f}, {mean + margin:+.3f}]")


def costs(results: Sequence[VariantResult]) -> list[list[str]]:
    """Return headings and a line for each variant: its examples, steps, bytes and time."""
    return [["method", *_COSTS], *([result.label, *_costs(result)] for result in results)]


def _costs(result: VariantResult) -> list[str]:
    def count(measure: str) -> str:
        mean = result.mean(measure)
        return "-" if mean is None else f"{mean:,.0f}"

    up, down = result.mean("bytes_up"), result.mean("bytes_down")
    return [
        *map(count, ("labelled", "unlabelled", "private_steps", "steps", "forwards")),
        "-" if up is None or down is None else format_bytes(up + down),
        format_seconds(result.mean("seconds")),
    ]


def notes_below(
    results: Sequence[VariantResult],
    baseline: VariantResult,
    settings: Sequence[str] = (),
    tuning: Tuning | None = None,
    tuned: Sequence[Search] = (),
) -> list[str]:
    """Return what a reader of the table must know, in order.

    Args:
        results: in the table.
        baseline: the variant that differences are to.
        settings: notes on the settings.
        tuning: what was tried, if anything was,
        tuned: and its outcome.
    """
    outcomes = [each for result in results for each in result.outcomes]
    metrics = sorted({each.metric for each in outcomes}) or ["accuracy"]
    where = (
        "the common test set" if {e.run.settings.test_on for e in outcomes} == {"global"} else "the clients' own data"
    )
    notes = [
        f"{' and '.join(metrics).capitalize()} after the last round, weighted by examples, on {where}: "
        "mean ± sample standard deviation over seeds (- with one seed). Examples (labelled, and unlabelled public "
        "ones), gradient steps (on clients' own examples, and all), examples that went forward in training, bytes (up "
        "and down) and time: mean of a run, all clients together."
    ]
    if _trained_differs(results):
        notes.append("After training: after the last local training, where that is not the headline score.")
    if _on_common(results):
        notes.append("Common: on the common test set, of the global model where there is one, else of clients' models.")
    if len(results) > 1:
        notes.append(
            f"Minus {baseline.variant}: difference of personal {metrics[0]}, paired over the seeds that both completed,"
            f" with its {CONFIDENCE:.0%} interval (Student's t)."
        )
    if any(result.equalised for result in results):
        notes.append(f"* needs equal architectures: every client got {EQUAL_MODEL}.")
    notes += _absent(results)
    notes += settings
    if tuning:
        seeds = ", ".join(map(str, tuning.seeds))
        notes.append(
            f"Tuned by validation accuracy with seeds {seeds}, of which nothing is in the table; then trained on whole "
            f"training parts. Chosen for {'; '.join(each.text for each in tuned)}."
        )
    return notes + _validation(results)


def _absent(results: Sequence[VariantResult]) -> Iterator[str]:
    """Variants without some of the clients, which are compared with others that had them."""
    for result in results:
        if short := [each for each in result.outcomes if each.refused]:
            seeds = ", ".join(str(each.run.seed) for each in short)
            count = max(len(each.refused) for each in short)
            client, reason = next(iter(short[0].refused.items()))
            yield (
                f"{result.variant} went without {count} of {short[0].run.settings.clients} clients (seeds {seeds}), so "
                f"its numbers are of fewer clients than the others': client {client}: {reason}."
            )


def _validation(results: Sequence[VariantResult]) -> list[str]:
    """How many examples were set apart for validation in the reported runs, and where it ended them."""
    notes = []
    settings = [each.run.settings for result in results for each in result.outcomes]
    if shares := sorted({each.validation for each in settings if each.validation}):
        notes.append(f"{', '.join(f'{share:.0%}' for share in shares)} of training examples were for validation only.")
    if patience := sorted({each.early_stopping for each in settings if each.early_stopping}):
        stopped = [
            f"{result.variant} {', '.join(f'seed {each.run.seed} after round {each.stopped}' for each in ended)}"
            for result in results
            if (ended := [each for each in result.outcomes if each.stopped])
        ]
        notes.append(
            f"Early stopping after {', '.join(map(str, patience))} evaluations without a better validation accuracy "
            f"ended training; the state then, not the best one, is reported: {'; '.join(stopped) or 'no run'}."
        )
    return notes
