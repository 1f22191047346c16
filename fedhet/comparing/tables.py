"""The table of a comparison: on the terminal, as Markdown and, with every run, as rows of numbers."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fedhet.comparing.measures import ACCURACIES, MEASURES, ArmResult
from fedhet.results.tables import format_bytes, format_seconds, format_value

if TYPE_CHECKING:
    from rich.table import Table

_WORDS = ("method", "models")
_COSTS = ("labelled", "pool", "own steps", "steps", "forwards", "bytes", "time")


def result_table(results: Sequence[ArmResult], baseline: ArmResult) -> "Table":
    """What the methods achieved, for a terminal."""
    return _terminal(outcomes(results, baseline), ())


def cost_table(results: Sequence[ArmResult], notes: Sequence[str]) -> "Table":
    """What the methods had and took, for a terminal, and the notes."""
    return _terminal(costs(results), notes)


def _terminal(lines: Sequence[Sequence[str]], notes: Sequence[str]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, caption="\n".join(notes), caption_justify="left")
    for heading in lines[0]:
        table.add_column(heading, justify="left" if heading in _WORDS else "right", overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def headings_and_rows(results: Sequence[ArmResult], baseline: ArmResult) -> tuple[list[str], list[list[str]]]:
    """What the methods achieved, and what they had and took, side by side."""
    both = zip(outcomes(results, baseline), costs(results), strict=True)
    headings, *lines = [[*left, *right[1:]] for left, right in both]
    return headings, lines


def markdown(results: Sequence[ArmResult], baseline: ArmResult, notes: Sequence[str]) -> str:
    """Both side by side as Markdown."""
    headings, lines = headings_and_rows(results, baseline)
    lines = [headings, ["---" if heading in _WORDS else "---:" for heading in headings], *lines]
    table = "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)
    return table + "\n\n" + "\n\n".join(note.replace("*", "\\*") for note in notes) + "\n"


def _in_markdown(cell: str) -> str:
    """A cell whose text is no markup: a client's architecture may have any name."""
    return re.sub(r"([|<`\\]|(?<=\])\()", r"\\\1", cell)


def number_rows(results: Sequence[ArmResult], baseline: ArmResult) -> Iterator[Sequence[object]]:
    """A heading and one row a run, then rows over seeds, which say so in the place of the seed.

    For each method `mean` and `std`; for each but the baseline also its mean paired `difference` to the baseline, and
    the ends of its interval, `difference_low` and `difference_high`.
    """
    yield ["method", "seed", "models", "equal_architectures", *MEASURES]
    for result in results:
        for run in result.runs:
            values = [run.values[measure] for measure in MEASURES]
            yield [result.arm, run.case.seed, run.models, result.forced, *values]
    for result in results:
        for name, statistic in (("mean", result.mean), ("std", result.spread)):
            values = [statistic(measure) for measure in MEASURES]
            yield [result.arm, name, result.models, result.forced, *values]
    for result in results:
        if result is baseline:
            continue
        found = [result.difference(baseline, measure) for measure in MEASURES]
        for name, side in (("difference", 0), ("difference_low", -1), ("difference_high", 1)):
            ends = [
                None if each is None or (side and each.margin is None) else each.mean + side * (each.margin or 0.0)
                for each in found
            ]
            yield [result.arm, name, result.models, result.forced, *ends]


def _name(result: ArmResult) -> str:
    return result.arm + (" *" if result.forced else "")


def outcomes(results: Sequence[ArmResult], baseline: ArmResult) -> list[list[str]]:
    """What the methods achieved: headings, and a line an arm.

    Accuracy after local training stands there where it is not the personal one, on the common test set if evaluated.
    """
    beside = {
        "trained_accuracy": any(r.mean("trained_accuracy") not in (None, r.mean("personal_accuracy")) for r in results),
        "common_accuracy": any(r.mean("common_accuracy") for r in results),
    }
    accuracies = [name for name in ACCURACIES if beside.get(name, True)]
    words = [name.removesuffix("_accuracy") for name in accuracies]
    lines = [[*_WORDS, "seeds", *words, f"less {baseline.arm}"]]
    for result in results:
        wanted = f" of {result.seeds_wanted}" if len(result.runs) < result.seeds_wanted else ""
        reached = [_accuracy(result, name) for name in accuracies]
        seeds = f"{len(result.runs)}{wanted}"
        lines.append([_name(result), result.models, seeds, *reached, _difference(result, baseline)])
    return lines


def _accuracy(result: ArmResult, measure: str) -> str:
    mean, spread = result.mean(measure), result.spread(measure)
    return "-" if mean is None else f"{format_value(mean)} ± {format_value(spread)}"


def _difference(result: ArmResult, baseline: ArmResult) -> str:
    """The paired difference of personal accuracy and its interval."""
    found = None if result is baseline else result.difference(baseline, "personal_accuracy")
    if found is None:
        return "-"
    if found.margin is None:
        return f"{found.mean:+.3f}"
    return f"{found.mean:+.3f} [{found.mean - found.margin:+.3f}, {found.mean + found.margin:+.3f}]"


def costs(results: Sequence[ArmResult]) -> list[list[str]]:
    """What the methods had and took: headings, and a line an arm."""
    return [["method", *_COSTS], *([_name(result), *_costs(result)] for result in results)]


def _costs(result: ArmResult) -> list[str]:
    def count(measure: str) -> str:
        mean = result.mean(measure)
        return "-" if mean is None else f"{mean:,.0f}"

    up, down = result.mean("bytes_up"), result.mean("bytes_down")
    return [
        *map(count, ("labelled", "unlabelled", "private_steps", "steps", "forwards")),
        "-" if up is None or down is None else format_bytes(up + down),
        format_seconds(result.mean("seconds")),
    ]
