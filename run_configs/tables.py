"""Comparisons whose tables stand on a page: run, kept as csv files beside the page, and written into it.

A script beside the page lists them (`htfl/tables.py`, `papers/scaled.py`):

    python run_configs/htfl/tables.py mnist --data FOLDER --runs FOLDER   # goes on where it stopped
    python run_configs/htfl/tables.py                                     # the tables anew, from results/

`results/NAME.csv` is the `comparison.csv` of `fedhet compare`, `NAME_tuning.csv` what was tried, `NAME_rounds.csv` the
round with the highest test accuracy of each run, `NAME_unseen.csv` the accuracy of clients that come after the last
round, and `COSTS.csv` what a round costs a client (`grid/costs.py`).
"""

import argparse
import csv
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedhet.comparing import Comparison, Tuning, compare
from fedhet.comparing.settings import shared_settings, variants_of
from fedhet.comparing.uncertainty import Difference, holm, paired_difference
from fedhet.config import named, run_configs
from fedhet.files import write_csv, write_text
from fedhet.registry import module_of
from fedhet.results.tables import format_bytes

COUNTS = {"labelled": "labelled examples", "unlabelled": "unlabelled examples", "steps": "gradient steps"}
"""Headings of the columns of the csv file that say how much all clients together had and did."""

NOT_RUN = "Not run so far."
BEGIN, END = "<!-- {} -->\n", "<!-- end of {} -->\n"
MEASURED = (4, 5, 6, 7)
"""Partition ids of clients, one of each kind, whose costs are measured when others have warmed up the process."""

costs = module_of(str(run_configs() / "grid" / "costs.py"))


@dataclass(frozen=True)
class Benchmark:
    """A comparison whose results are on a page.

    Attributes:
        preset: settings for all, a file in `run_configs`.
        keys: settings beside it.
        variants: as `fedhet compare` takes them.
        baseline: the variant that differences are to.
        baselines: those of single scores, where it is another one.
        subject: a variant whose differences to all others the table has, too.
        seeds: those that are reported.
        tuning: what is tuned, for all alike.
        rates_of: the benchmark whose chosen settings each variant has, those of its method if none has its name.
        supplied: models and data of one's own, as `fedhet.compare` takes them.
        scores: accuracies of the csv file that the table has, with their headings.
        printed: what a paper prints for a variant.
        costs: name of the csv file with what a round costs a client; "": not measured.
        best: whether the table has the round with the highest test accuracy, too, of rounds that are all evaluated.
        unseen: whether the table has the clients that come after the last round instead, and nothing else.
    """

    preset: str
    keys: Mapping[str, Any]
    variants: Sequence[str]
    baseline: str
    baselines: Mapping[str, str] = field(default_factory=dict)
    subject: str = ""
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    tuning: Tuning | None = None
    rates_of: str = ""
    supplied: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, str] = field(default_factory=lambda: {"personal_accuracy": "last round"})
    printed: Mapping[str, str] = field(default_factory=dict)
    costs: str = ""
    best: bool = False
    unseen: bool = False

    def baseline_of(self, score: str) -> str:
        """The variant that differences of a score are to."""
        return self.baselines.get(score, self.baseline)


@dataclass(frozen=True)
class Tables:
    """The benchmarks of a page, README.md in a folder that has their `results`."""

    folder: Path
    benchmarks: Mapping[str, Benchmark]

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
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

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
            named = text if is_named(text) else f"{variant.name}={text}"
            texts.append(",".join([named, *chosen[variant.name if variant.name in chosen else variant.method]]))
        return texts

    def run(self, name: str, data: Path, runs: Path, jobs: int = 1) -> None:
        """Run a comparison, and keep its csv files, its best rounds and what a round costs in `results`."""
        of = self.benchmarks[name]
        place = "public-data" if "public-dataset" in of.keys else "data"
        config = {"preset": "", **named(run_configs() / of.preset), **of.keys, place: str(data)}
        how: dict[str, Any] = {"out": runs, "jobs": jobs, "baseline": of.baseline, "tuning": of.tuning}
        found = compare(self.variants(of), config, seeds=of.seeds, **of.supplied, **how)
        found.check()
        self.results.mkdir(exist_ok=True)
        if of.costs:
            write_csv(self.results / f"{of.costs}.csv", self.a_round(of, config))
        if of.best:
            write_csv(self.results / f"{name}_rounds.csv", best_rounds(found))
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
        best = self.rows_of(f"{name}_rounds") if of.best else []
        costs = {row["method"]: row for row in self.rows_of(of.costs)} if of.costs else {}
        ps = {score: p_values(values, of, score) for score in of.scores}
        rows = []
        for method in methods:
            mean = values.get((method, "mean"))
            cells = [("in the paper", of.printed.get(method, ""))]
            for score, heading in of.scores.items():
                baseline = of.baseline_of(score)
                cells += [(heading, spread_of(values, method, score))]
                cells += [(f"minus `{baseline}`", difference_of(values, method, baseline, score))]
                cells += [(f"`{of.subject}` minus this", difference_of(values, of.subject, method, score))]
                cells += [("p", p_text(ps[score].get(method)))]
            rounds = [float(row["accuracy"]) for row in best if row["method"] == method]
            cells += [("best test round\\*", f"{statistics.fmean(rounds):.3f}" if rounds else "")]
            worse = mean["worse_off"] if mean else ""
            cells += [("worse off than alone", f"{float(worse):.0%}" if worse else "")]
            for count, heading in COUNTS.items():
                cells += [(heading, f"{float(mean[count] or 0):,.0f}" if mean else "")]
            measured = costs.get(method) if of.costs else mean
            cells += [
                (way, format_bytes(float(measured[f"bytes_{way}"])) if measured else "") for way in ("up", "down")
            ]
            measured = costs.get(method)
            work = f"{float(measured['multiplications']) / 1e6:,.0f} M" if measured else ""
            cells += [
                ("multiplications", work),
                ("memory", format_bytes(float(measured["memory"])) if measured else ""),
            ]
            rows.append(cells)
        kept = [place for place, column in enumerate(zip(*rows, strict=True)) if any(text for _, text in column)]
        headings = [rows[0][place][0] for place in kept]
        lines = [f"| method | {' | '.join(headings)} |", f"| --- |{' ---: |' * len(kept)}"]
        for method, cells in zip(methods, rows, strict=True):
            lines.append(f"| `{method}` | {' | '.join(cells[place][1] for place in kept)} |")
        return "\n".join(lines)

    def written(self, text: str) -> str:
        """The page with the tables written anew."""
        for name in self.benchmarks:
            begin, end = BEGIN.format(name), END.format(name)
            if begin in text:
                before, rest = text.split(begin)
                text = f"{before}{begin}\n{self.table(name)}\n\n{end}{rest.split(end)[1]}"
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
    return shown(found) if found else ""


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


def shown(difference: Difference) -> str:
    """A difference with its interval."""
    margin = difference.margin() or 0.0
    return f"{difference.mean:+.3f} [{difference.mean - margin:+.3f}, {difference.mean + margin:+.3f}]"


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


def is_named(variant: str) -> bool:
    """Whether a variant's text has a name of its own."""
    return "=" in variant.partition(",")[0]


def best_rounds(found: Comparison) -> Iterator[tuple[object, ...]]:
    """A heading, then for each run the round with the highest accuracy, and that accuracy."""
    yield "method", "seed", "round", "accuracy"
    for result in found.results:
        for each in result.outcomes:
            accuracy, place = max((accuracy, -place) for place, accuracy in each.files.curve)
            yield result.variant, each.run.seed, -place, accuracy


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
        texts = [*(f"{mean:.3f}" for mean in means), shown(gain) if gain else ""]
        lines.append(f"| `{name}` | {' | '.join([*texts, of.printed.get(name, '')])} |")
    return "\n".join(lines)
