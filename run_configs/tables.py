"""Comparisons whose tables stand on a page: run, kept as csv files beside the page, and written into it.

A script beside the page lists them (`htfl/tables.py`, `papers/scaled.py`):

    python run_configs/htfl/tables.py mnist --data FOLDER --runs FOLDER   # goes on where it stopped
    python run_configs/htfl/tables.py                                     # the tables anew, from results/

`results/NAME.csv` is the `comparison.csv` of `fedhet compare`, `NAME_tuning.csv` what was tried, `NAME_unseen.csv` the
accuracy of clients that join after the last round, and `COSTS.csv` what a round costs a client (`grid/costs.py`).
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedhet.comparing import Comparison, Tuning, compare
from fedhet.comparing.settings import shared_settings, variants_of
from fedhet.comparing.uncertainty import Difference, holm, paired_difference
from fedhet.config import named, run_configs
from fedhet.files import read_csv, write_csv, write_text
from fedhet.registry import module_of
from fedhet.results.tables import format_bytes

COUNTS = {"labelled": "labelled examples", "unlabelled": "unlabelled examples", "steps": "gradient steps"}
"""Headings of the columns of the csv file that say how much all clients together had and did."""

COSTS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "bytes_up": ("up", format_bytes),
    "bytes_down": ("down", format_bytes),
    "multiplications": ("multiplications", lambda number: f"{number / 1e6:,.0f} M"),
    "memory": ("memory", format_bytes),
}
"""Headings of the columns of the csv files that say what clients sent, received and computed, and how they look."""

NOT_RUN = "Not run so far."
BEGIN, END = "<!-- {} -->\n", "<!-- end of {} -->\n"
MEASURED = (4, 5, 6, 7)
"""Partition ids of clients, one of each kind, whose costs are measured when others have warmed up the process."""

costs = module_of(str(run_configs() / "grid" / "costs.py"))
marks = module_of(str(run_configs() / "marks.py"))


@dataclass(frozen=True)
class Benchmark:
    """A comparison whose results are on a page.

    Attributes:
        preset: settings for all, a file in `run_configs`.
        keys: settings beside it.
        variants: as `fedhet compare` takes them.
        baseline: the variant that differences are to.
        baselines: those of single scores, where it is another one.
        seeds: those that are reported.
        tuning: what is tuned, for all alike.
        rates_of: the benchmark whose chosen settings each variant has, those of its method if none has its name.
        supplied: models and data of one's own, as `fedhet.compare` takes them.
        scores: accuracies of the csv file that the table has, with their headings.
        printed: what a paper prints for a variant.
        costs: name of the csv file with what a round costs a client; "": not measured.
        unseen: whether the table has the clients that come after the last round instead, and nothing else.
    """

    preset: str
    keys: Mapping[str, Any]
    variants: Sequence[str]
    baseline: str
    baselines: Mapping[str, str] = field(default_factory=dict)
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    tuning: Tuning | None = None
    rates_of: str = ""
    supplied: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, str] = field(default_factory=lambda: {"personal_accuracy": "last round"})
    printed: Mapping[str, str] = field(default_factory=dict)
    costs: str = ""
    unseen: bool = False

    def baseline_of(self, score: str) -> str:
        """The variant that differences of a score are to."""
        return self.baselines.get(score, self.baseline)


@dataclass(frozen=True)
class Summary:
    """A table of several benchmarks, with a row for each.

    Attributes:
        rows: headings of the rows, by benchmark.
        methods: variants whose accuracy is a column, with what the paper prints in brackets.
        differences: pairs of variants whose paired difference is a column. It is bold if the second one is the
            benchmark's baseline and p < 0.05.
        turned: whether benchmarks are columns instead of rows.
    """

    rows: Mapping[str, str]
    methods: Sequence[str]
    differences: Sequence[tuple[str, str]]
    turned: bool = False


@dataclass(frozen=True)
class Tables:
    """The benchmarks of a page, README.md in a folder that has their `results`."""

    folder: Path
    benchmarks: Mapping[str, Benchmark]
    summaries: Mapping[str, Summary] = field(default_factory=dict)

    @property
    def page(self) -> Path:
        """The page."""
        return self.folder / "README.md"

    @property
    def results(self) -> Path:
        """The folder of the csv files."""
        return self.folder / "results"

    def rows_of(self, name: str) -> list[dict[str, str]]:
        """The rows of a csv file in `results`; none if there is no file."""
        path = self.results / f"{name}.csv"
        return read_csv(path) if path.is_file() else []

    def variants(self, of: Benchmark) -> list[str]:
        """The variants of a benchmark, with the settings chosen for them elsewhere.

        Raises:
            FileNotFoundError: that benchmark was not run so far.
        """
        if not of.rates_of:
            return list(of.variants)
        rows = [row for row in self.rows_of(f"{of.rates_of}_tuning") if row["result"] == "chosen"]
        if not rows:
            raise FileNotFoundError(f"run {of.rates_of} first: it chooses the settings")
        keys = [*itertools.takewhile(lambda column: not column.startswith("seed "), rows[0])][1:]
        chosen = {row["method"]: [f"{key}={row[key]}" for key in keys if row[key]] for row in rows}
        texts = []
        for text, variant in zip(of.variants, variants_of(of.variants), strict=True):
            text = text.removeprefix(f"{variant.name}=")
            own = chosen[variant.name if variant.name in chosen else variant.method]
            texts.append(",".join([f"{variant.name}={text}", *own]))
        return texts

    def run(self, name: str, data: Path, runs: Path, jobs: int = 1) -> None:
        """Run a comparison, and keep its csv files and what a round costs in `results`."""
        of = self.benchmarks[name]
        place = "public-data" if "public-dataset" in of.keys else "data"
        config = {"preset": "", **named(run_configs() / of.preset), **of.keys, place: str(data)}
        how: dict[str, Any] = {"out": runs, "jobs": jobs, "baseline": of.baseline, "tuning": of.tuning}
        found = compare(self.variants(of), config, seeds=of.seeds, **of.supplied, **how)
        found.check()
        self.results.mkdir(exist_ok=True)
        if of.costs:
            write_csv(self.results / f"{of.costs}.csv", self.a_round(of, config))
        if of.unseen:
            write_csv(self.results / f"{name}_unseen.csv", unseen_clients(found))
        for file, kept in (("tuning.csv", f"{name}_tuning.csv"), ("comparison.csv", f"{name}.csv")):
            if (runs / file).is_file():
                write_text(self.results / kept, (runs / file).read_text(encoding="utf-8"))

    def a_round(self, of: Benchmark, config: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
        """A heading, then what a round costs a client with each variant, by the mean over some; known rows stay."""
        columns = ("method", "bytes_up", "bytes_down", "multiplications", "memory")
        yield columns
        known = {row["method"]: row for row in self.rows_of(of.costs)}
        torch.set_num_threads(1)
        variants = variants_of(self.variants(of))
        shared = shared_settings(variants, seeds=of.seeds, config={**config, "report": False})
        for variant in variants:
            if row := known.get(variant.name):
                yield tuple(row[column] for column in columns)
                continue
            settings = shared.settings(variant.name, of.seeds[0])
            meters = [costs.measured(settings, what, MEASURED) for what in ("multiplications", "memory")]
            sizes = [statistics.fmean(size) for size in zip(*(meters[0].bytes[each] for each in MEASURED), strict=True)]
            yield variant.name, *sizes, *(statistics.fmean(each.values.values()) for each in meters)

    def table(self, name: str) -> str:
        """A table of the page, without the columns that have nothing in any row."""
        of = self.benchmarks[name]
        if of.unseen:
            return unseen_table(of, self.rows_of(f"{name}_unseen"))
        values = {(row["method"], row["seed"]): row for row in self.rows_of(name)}
        if not values:
            return NOT_RUN
        methods = [variant.name for variant in variants_of(of.variants)]
        filled = [column for column in self.columns(name, values, methods) if any(column[1:])]
        return markdown(zip(["method", *(f"`{method}`" for method in methods)], *filled, strict=True))

    def summary(self, of: Summary) -> str:
        """A table of several benchmarks."""
        lines = [["setting", *(f"`{name}`" for name in of.methods)]]
        lines[0] += [f"`{one}` minus `{other}`" for one, other in of.differences]
        for name, heading in of.rows.items():
            benchmark = self.benchmarks[name]
            score = next(iter(benchmark.scores))
            values = {(row["method"], row["seed"]): row for row in self.rows_of(name)}
            ps = p_values(values, benchmark, score)
            printed = {method: f" ({text})" for method, text in benchmark.printed.items()}
            cells = [heading, *(spread_of(values, each, score) + printed.get(each, "") for each in of.methods)]
            for one, other in of.differences:
                known = {(one, "mean"), (other, "mean")} <= values.keys()
                text = difference_of(values, one, other, score) if known else ""
                clear = other == benchmark.baseline_of(score) and ps.get(one, 1) < 0.05
                cells.append(f"**{text}**" if clear else text)
            lines.append(cells)
        return markdown(zip(*lines, strict=True) if of.turned else lines)

    def columns(self, name: str, values: "Values", methods: Sequence[str]) -> Iterator[list[str]]:
        """Yield the columns of a table, each a heading and a cell for each method, "" where there is nothing."""
        of = self.benchmarks[name]
        yield ["in the paper", *(of.printed.get(method, "") for method in methods)]
        for score, heading in of.scores.items():
            baseline, ps = of.baseline_of(score), p_values(values, of, score)
            yield [heading, *(spread_of(values, method, score) for method in methods)]
            yield [f"minus `{baseline}`", *(difference_of(values, method, baseline, score) for method in methods)]
            yield ["p", *(p_text(ps.get(method)) for method in methods)]
        means = [values.get((method, "mean"), {}) for method in methods]
        shares = [mean.get("worse_off") for mean in means]
        yield ["worse off than alone", *(f"{float(share):.0%}" if share else "" for share in shares)]
        for count, heading in COUNTS.items():
            yield [heading, *(f"{float(mean[count] or 0):,.0f}" if mean else "" for mean in means)]
        if of.costs:  # of one client in a round; the comparison's are of all in a run
            known = {row["method"]: row for row in self.rows_of(of.costs)}
            means = [known.get(method, {}) for method in methods]
        for cost, (heading, text) in COSTS.items():
            yield [heading, *(text(float(mean[cost])) if cost in mean else "" for mean in means)]

    def written(self, text: str) -> str:
        """The page with the tables written anew."""
        for name in self.benchmarks:
            begin, end = BEGIN.format(name), END.format(name)
            if begin in text:
                text = marks.between(text, begin, end, self.table(name))
        for name, summary in self.summaries.items():
            text = marks.between(text, BEGIN.format(name), END.format(name), self.summary(summary))
        return text

    def main(self) -> None:
        """Run a benchmark, or only write the tables."""
        parser = argparse.ArgumentParser(description="Make the tables of a page.")
        parser.add_argument("name", nargs="?", choices=self.benchmarks, help="none: only write the tables")
        parser.add_argument("--data", type=Path, help="folder with the data set's files")
        parser.add_argument("--runs", type=Path, help="folder of the comparison")
        parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
        given = parser.parse_args()
        if given.name and not (given.data and given.runs):
            parser.error(f"{given.name} needs --data and --runs")
        if given.name:
            self.run(given.name, given.data, given.runs, given.jobs)
        self.page.write_text(self.written(self.page.read_text(encoding="utf-8")), encoding="utf-8")


SCRATCH = "-scratch"
"""Ends the names of variants whose unseen clients train from scratch as another one's do from what they receive."""

Values = Mapping[tuple[str, str], Mapping[str, str]]
"""The rows of a `comparison.csv` by method and what they are: a seed, or a statistic of all."""


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, whose first row is the heading."""
    head, *body = rows
    lines = (head, ["---", *["---:"] * (len(head) - 1)], *body)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def spread_of(values: Values, method: str, score: str) -> str:
    """A mean and the standard deviation; "" if the method has no such score."""
    mean, deviation = (values.get((method, name), {}).get(score) for name in ("mean", "std"))
    return f"{float(mean):.3f} ± {float(deviation):.3f}" if mean and deviation else ""


def difference_of(values: Values, method: str, other: str, score: str) -> str:
    """A paired difference with its interval; "" of a method to itself, and where one of both has no such score.

    Differences to the comparison's baseline are in the csv file, and their intervals cover test examples, too; the
    others' are by the spread over seeds.
    """
    if method == other:
        return ""
    ends = [values.get((method, f"difference{end}"), {}).get(score, "") for end in ("", "_low", "_high")]
    if all(ends) and (other, "difference") not in values:
        return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*map(float, ends))
    found = between(values, method, other, score)
    return str(found) if found else ""


def between(values: Values, method: str, other: str, score: str) -> Difference | None:
    """The paired difference of two methods, by the spread over seeds; None where one of both has no such score."""
    mine, theirs = (
        {
            int(seed): float(row[score])
            for (name, seed), row in values.items()
            if name == which and seed.isdigit() and row[score]
        }
        for which in (method, other)
    )
    return paired_difference(mine, theirs)


def p_values(values: Values, of: Benchmark, score: str) -> dict[str, float]:
    """The p values of no difference in a score, corrected for the number of variants (Holm).

    Those of personal accuracies to the comparison's baseline are in the csv file, and cover test examples, too.
    """
    baseline = of.baseline_of(score)
    others = [variant.name for variant in variants_of(of.variants) if variant.name != baseline]
    if score == "personal_accuracy" and baseline == of.baseline:
        return {name: float(values[name, "p"][score]) for name in others if (name, "p") in values}
    found = {name: between(values, name, baseline, score) for name in others}
    ps = {name: each.p for name, each in found.items() if each is not None}
    known = {name: p for name, p in ps.items() if p is not None}
    return dict(zip(known, holm([*known.values()]), strict=True))


def p_text(p: float | None) -> str:
    """A p value as the tables show it."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def unseen_clients(found: Comparison) -> Iterator[tuple[object, ...]]:
    """A heading, then for each run the accuracy of unseen clients, as received and from scratch, by epochs alone."""
    yield "method", "seed", "start", "epoch", "accuracy"
    for result in found.results:
        for each in result.outcomes:
            lines = (each.files.summary or {})["unseen_clients"]
            for start in ("received", "scratch"):
                for epoch, accuracy in enumerate(lines[f"{start}_accuracy"]):
                    yield result.variant, each.run.seed, start, epoch, accuracy


def unseen_table(of: Benchmark, rows: Sequence[Mapping[str, str]]) -> str:
    """The table of unseen clients, a line for each variant `X`; from scratch is `X-scratch`, where there is one."""
    if not rows:
        return NOT_RUN
    last = max(int(row["epoch"]) for row in rows)
    columns = ("as received", f"after {last} epochs", f"from scratch, after {last}", "difference", "in the paper")
    lines = [f"| unseen | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    by: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in rows:
        place = row["method"], row["start"], int(row["epoch"])
        by.setdefault(place, {})[int(row["seed"])] = float(row["accuracy"])
    for variant in variants_of(of.variants):
        name = variant.name
        if name.endswith(SCRATCH):
            continue
        alone = name + SCRATCH if (name + SCRATCH, "scratch", last) in by else name
        received, scratch = by[name, "received", last], by[alone, "scratch", last]
        means = [statistics.fmean(each.values()) for each in (by[name, "received", 0], received, scratch)]
        gain = paired_difference(received, scratch)
        texts = [*(f"{mean:.3f}" for mean in means), str(gain) if gain else ""]
        lines.append(f"| `{name}` | {' | '.join([*texts, of.printed.get(name, '')])} |")
    return "\n".join(lines)
