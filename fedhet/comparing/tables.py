"""The tables of a comparison for a terminal, Markdown, LaTeX and csv, the notes below them, and its figure."""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedhet.comparing import measures
from fedhet.comparing.measures import Difference, VariantResult
from fedhet.comparing.settings import EQUAL_MODEL
from fedhet.errors import FedhetError
from fedhet.results.figures import WIDTH, draw_line, draw_rings, first_round, label_axes, look, new_figure
from fedhet.results.history import in_part, scored_curve
from fedhet.results.terminal import WORDS, format_bytes, format_seconds, format_value
from fedhet.utils.statistics import grouped

_COUNTED = "labelled", "public", "own steps", "steps", "examples seen"
_COUNTS = dict(zip((*measures.EXAMPLES, *measures.WORK), _COUNTED, strict=True))
_GAINS = dict(zip(measures.GAINS, ("{:.0%}", "{:+.3f}"), strict=True))
_HEADINGS = {"trained_accuracy": "after training"}
_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    '"': "{\\char34}",
    "±": "$\\pm$",
}


def whole_table(results: Sequence[VariantResult], baseline: VariantResult) -> list[list[str]]:
    """Return one table, headings first, of variants' accuracies, gains over local training, and costs, as text."""
    lines = zip(*separate_tables(results, baseline), strict=True)
    return [[*line, *(cell for other in others for cell in other[1:])] for line, *others in lines]


def markdown(results: Sequence[VariantResult], baseline: VariantResult, notes: Sequence[str], verdict: str = "") -> str:
    """Return a Markdown text: the sentence `verdict`, absent clients, a table of differences to `baseline`, `notes`."""
    headings, *lines = whole_table(results, baseline)
    lines = [headings, ["---" if heading in WORDS else "---:" for heading in headings], *lines]
    table = "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)
    escaped = (note.replace("*", "\\*") for note in notes)
    above = [_in_markdown(line) for line in (verdict, *measures.absent(results)) if line]
    return "\n\n".join([*above, table, *escaped]) + "\n"


def _in_markdown(cell: str) -> str:
    return re.sub(r"([|<`\\]|(?<=\])\()", r"\\\1", cell)


def latex(tables: Sequence[Sequence[Sequence[str]]], title: str, notes: Sequence[str]) -> str:
    """Return a LaTeX table for each of `tables` (see `separate_tables`), with `title` and the first note as caption.

    The other notes are comments. The document needs the package booktabs. Columns without any value are left out.
    """
    names = ("comparison", "costs") if len(tables) == 2 else ("comparison", "gains", "costs")
    text = "% In the preamble: \\usepackage{booktabs}. To show the tables: \\input{comparison}.\n"
    text += "".join(f"% {' '.join(note.split())}\n" for note in notes[1:])
    captions = (". ".join([title, *notes[:1]]), *(f"{title}: {name}." for name in names[1:]))
    for lines, name, caption in zip(tables, names, captions, strict=True):
        columns = [column for column in zip(*lines, strict=True) if {*column[1:]} != {"-"}]
        kinds = "".join("l" if heading in WORDS else "r" for heading, *_ in columns)
        headings, *rows = (f"{' & '.join(map(in_latex, line))} \\\\" for line in zip(*columns, strict=True))
        text += "\n".join(
            [
                f"\n\\begin{{table*}}\n\\centering\n\\caption{{{in_latex(caption)}}}\n\\label{{tab:{name}}}\n\\footnotesize",
                f"\\setlength{{\\tabcolsep}}{{4pt}}\n\\begin{{tabular}}{{@{{}}{kinds}@{{}}}}\n\\toprule\n{headings}\n\\midrule",
                *rows,
                "\\bottomrule\n\\end{tabular}\n\\end{table*}\n",
            ]
        )
    return text


def in_latex(text: str) -> str:
    """Return a text for LaTeX: special characters are escaped, and signs of numbers are set as such."""
    if text == "-":
        return "--"
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return re.sub(r"(?<![^\s\[])-(?=\d)", "$-$", escaped)


def number_rows(results: Sequence[VariantResult], baseline: VariantResult) -> Iterator[Sequence[object]]:
    """Yield the rows of `comparison.csv`: headings, runs, means, standard deviations, differences and p-values."""
    metric = "/".join(metrics_of(results))
    names = [measure.replace("accuracy", metric) for measure in measures.MEASURES]
    yield ["method", "seed", "models", "equal_architectures", "clients", *names]
    for result in results:
        for outcome in result.outcomes:
            values = [outcome.values[measure] for measure in measures.MEASURES]
            yield [result.variant, outcome.run.seed, outcome.models, result.equalised, len(outcome.clients()), *values]
    for result in results:
        for name, of in (("mean", result.mean), ("std", result.spread)):
            yield [result.variant, name, result.models, result.equalised, "", *map(of, measures.MEASURES)]
    for result in results:
        if result is not baseline:
            of_all = [result.difference(baseline, measure) for measure in measures.MEASURES]
            for name, end in (("", "mean"), ("_low", "low"), ("_high", "high")):
                values = [getattr(mean, end, None) for mean in of_all]
                over = _over(dict(zip(names, of_all, strict=True)))
                yield [result.variant, f"difference{name}", result.models, result.equalised, over, *values]
    for variant, difference in measures.differences(results, baseline).items():
        if difference.p is not None:
            yield [variant, "p", "", "", difference.over, difference.p, *[None] * (len(measures.MEASURES) - 1)]


def _over(differences: Mapping[str, Difference | None]) -> str:
    """Return over how many clients the first difference is and, with its name, each that is over other numbers."""
    over = {name: difference.over for name, difference in differences.items() if difference is not None}
    first = next(iter(over.values()), "")
    others = (f"{name}: {each or 'all'}" for name, each in over.items() if each != first)
    return "; ".join(filter(None, [first, *others]))


def metrics_of(results: Sequence[VariantResult]) -> list[str]:
    """Return the names of the metrics of the runs, in alphabetical order; usually one."""
    return sorted({outcome.files.metric for result in results for outcome in result.outcomes}) or ["accuracy"]


def separate_tables(results: Sequence[VariantResult], baseline: VariantResult) -> list[list[list[str]]]:
    """Return tables as rows of text: accuracies and differences to `baseline`, gains over local training, costs."""
    differences = measures.differences(results, baseline)
    p_values = {variant: difference.p for variant, difference in differences.items() if difference.p is not None}
    shown = {name: _HEADINGS.get(name, name.removesuffix("_accuracy")) for name in _shown(results)}
    gains = {name: text for name, text in _GAINS.items() if any(result.mean(name) is not None for result in results)}
    fewer = any(each.over for each in differences.values())
    further = [*["over clients"] * fewer, *["p"] * bool(p_values)]
    accuracies = [["method", "models", "seeds", *shown.values(), f"minus {baseline.variant}", *further]]
    changes = [["method", *(name.replace("_", " ") for name in gains)]]
    costs = [["method", *_COUNTS.values(), "bytes", "time"]]
    for result in results:
        completed = len(result.outcomes)
        wanted = result.seeds_wanted
        seeds = str(completed) if completed == wanted else f"{completed} of {wanted}"
        scores = [_mean(name, "{:.3f} ± " + format_value(result.spread(name)), result) for name in shown]
        difference = differences.get(result.variant)
        over = "-" if difference is None else difference.over or "all"
        p = p_values.get(result.variant)
        p_value = "-" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"
        further = [*[over] * fewer, *[p_value] * bool(p_values)]
        accuracies.append([result.label, result.models, seeds, *scores, str(difference or "-"), *further])
        changes.append([result.label, *(_mean(name, text, result) for name, text in gains.items())])
        up, down = result.mean("bytes_up"), result.mean("bytes_down")
        sent = "-" if up is None or down is None else format_bytes(up + down)
        counts = [_mean(name, "{:,.0f}", result) for name in _COUNTS]
        costs.append([result.label, *counts, sent, format_seconds(result.mean("seconds"))])
    return [accuracies, *([changes] if gains else []), costs]


def _mean(measure: str, text: str, result: VariantResult) -> str:
    mean = result.mean(measure)
    return "-" if mean is None else text.format(mean)


def _shown(results: Sequence[VariantResult]) -> list[str]:
    personal, trained, overall, *others = measures.ACCURACIES
    after = any(result.mean(trained) not in (None, result.mean(personal)) for result in results)
    measured = [name for name in others if any(result.mean(name) is not None for result in results)]
    return [personal, *[trained] * after, overall, *measured]


def notes_below(
    results: Sequence[VariantResult], baseline: VariantResult, settings: Sequence[str] = (), tuned: Sequence[str] = ()
) -> list[str]:
    """Return the notes below a comparison's tables: how values were measured, warnings of runs, and given remarks.

    `settings` has remarks on settings, and `tuned` a description of each tuned method's chosen settings.
    """
    outcomes = [outcome for result in results for outcome in result.outcomes]
    metrics = metrics_of(results)
    common = {outcome.files.settings.get("test-on") for outcome in outcomes} == {"global"}
    where = "the common test set" if common else "the clients' own data"
    notes = [
        f"Values of {' and '.join(metrics)} after the last round, weighted by examples, on {where}: mean ± sample "
        "standard deviation over seeds. Examples (with labels, and without or used without), gradient steps (on "
        "clients' own examples, and all), examples seen in training, bytes (up and down) and time: mean of a run, all "
        "clients together."
    ]
    if "trained_accuracy" in _shown(results):
        notes.append("After training: after the last local training, before the last aggregation.")
    if "common_accuracy" in _shown(results):
        notes.append("Common: on the common test set, of the global model or, without one, of the clients' models.")
    if "best_accuracy" in _shown(results):
        notes.append("Best: models of the round with the best validation metric, on test examples.")
        for outcome in outcomes:
            best = outcome.clients("best_accuracy")
            if best != outcome.clients():
                run = f"{outcome.run.variant}, seed {outcome.run.seed}"
                notes.append(f"{run}: best is over {len(best)} clients, personal over {len(outcome.clients())}.")
    if differences := measures.differences(results, baseline):
        covers = "with its 95% interval (Student's t), if there are three seeds and not all give the same values"
        paired = "paired over the seeds that both completed and, in each, over the clients that both scored"
        notes.append(f"Minus {baseline.variant}: difference of personal {metrics[0]}, {paired}, {covers}.")
    if number := sum(difference.p is not None for difference in differences.values()):
        notes.append(f"p: of no difference, corrected for the number of differences in the table ({number}, Holm).")
    if any(result.mean("worse_off") is not None for result in results):
        local = measures.local_variant({outcome.run.variant: outcome.files for outcome in outcomes})
        notes.append(
            f"Worse off: fraction of clients that score worse than the same client under {local} with the same seed, "
            f"among clients that both scored. Worst tenth: mean difference to {local} of the tenth of clients that "
            "gain least."
        )
    notes += filter(None, (unequal_steps(result, baseline) for result in results))
    if any(result.equalised for result in results):
        notes.append(f"* needs equal architectures: every client got {EQUAL_MODEL}.")
    told = ((line, outcome.run.variant) for outcome in outcomes for line in outcome.files.summary.get("warnings", ()))
    warnings = [f"{', '.join(dict.fromkeys(names))}: {line}" for line, names in grouped(told).items()]
    notes += [*warnings, *settings]
    if tuned:
        how = f"Tuned by validation {metrics[0]} with other seeds"
        whole = not any(outcome.files.settings.get("validation") for outcome in outcomes)
        how += ", then trained on whole training parts." if whole else "; validation parts stay held out."
        notes.append(f"{how} Chosen for {'; '.join(tuned)}.")
    return notes


def unequal_steps(result: VariantResult, baseline: VariantResult) -> str:
    """Return a sentence if a method's gradient steps on clients' own examples are far from the baseline's.

    The result is empty if they are between 0.8 and 1.25 times as many, or if one of the two methods takes none.
    """
    steps = result.mean("private_steps")
    usual = baseline.mean("private_steps")
    if not steps or not usual or 0.8 <= steps / usual <= 1.25:
        return ""
    return f"{result.variant} takes {steps / usual:.1f} times {baseline.variant}'s gradient steps on own examples."


def comparison_figure(results: Sequence[VariantResult], width: float = WIDTH, height: float = 3.2) -> Figure:
    """Draw each method's personal accuracy by round: the mean over seeds, with a band of one standard deviation.

    Accuracies are over the clients that all runs scored or, if there are none, over each run's own clients; rounds that
    scored only some of them have a ring. `width` and `height`, without the legend, are in inches. Raises a
    `FedhetError` if no run was completed.
    """
    figure, axes = new_figure(height, width)
    results = [result for result in results if result.outcomes]
    if not results:
        raise FedhetError("no run of these methods was completed: repeat the comparison, which tries them again")
    scored = [{*outcome.clients()} for result in results for outcome in result.outcomes]
    shared = set.intersection(*scored)
    curves = {
        result.variant: [
            dict(scored_curve(outcome.files.rows, outcome.files.scored, clients=shared or None))
            for outcome in result.outcomes
        ]
        for result in results
    }
    first = first_round(curve for by_seed in curves.values() for curve in by_seed)
    for position, (variant, by_seed) in enumerate(curves.items()):
        line = look(position)
        rounds = [number for number in sorted(set.intersection(*map(set, by_seed))) if number >= first]
        values = np.array([[curve[number] for number in rounds] for curve in by_seed])
        means = values.mean(0)
        spreads = values.std(0, ddof=1) if len(values) > 1 else 0.0
        draw_line(axes, list(zip(rounds, means, strict=True)), **line, label=variant)
        axes.fill_between(rounds, means - spreads, means + spreads, color=line["color"], alpha=0.15, linewidth=0)
        outcomes = results[position].outcomes
        fewer = (in_part(each.files.rows, each.files.scored, shared or each.clients()) for each in outcomes)
        draw_rings(axes, zip(rounds, means, strict=True), set.union(*fewer), line["color"])
    words = f"personal {results[0].outcomes[0].files.metric}"
    if shared and any(clients != shared for clients in scored):
        words += " of the clients that all scored"
    label_axes(axes, "round (band: spread over seeds)", words)
    return figure
