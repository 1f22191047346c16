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
from fedhet.files import write_csv
from fedhet.registry import module_of
from fedhet.results.tables import format_bytes

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
        return [
            ",".join(
                [
                    text if is_named(text) else f"{variant.name}={text}",
                    *(chosen.get(variant.name) or chosen[variant.method]),
                ]
            )
            for text, variant in zip(of.variants, variants_of(of.variants), strict=True)
        ]

    def run(self, name: str, data: Path, runs: Path, jobs: int = 1) -> None:
        """Run a comparison, and keep its csv files, its best rounds and what a round costs in `results`."""
        of = self.benchmarks[name]
        place = "public-data" if "public-dataset" in of.keys else "data"
        config = {"preset": "", **named(run_configs() / of.preset), **of.keys, place: str(data)}
        variants = self.variants(of)
        how: dict[str, Any] = {
            "seeds": of.seeds,
            "out": runs,
            "jobs": jobs,
            "baseline": of.baseline,
            "tuning": of.tuning,
        }
        found = compare(variants, config, **of.supplied, **how)
        found.check()
        self.results.mkdir(exist_ok=True)
        for file in ("comparison.csv", "tuning.csv"):
            if (runs / file).is_file():
                kept = self.results / file.replace("comparison", name).replace("tuning", f"{name}_tuning")
                kept.write_bytes((runs / file).read_bytes())
        if of.best:
            write_csv(self.results / f"{name}_rounds.csv", best_rounds(found))
        if of.unseen:
            write_csv(self.results / f"{name}_unseen.csv", unseen_clients(found))
        if of.costs and not self.rows_of(of.costs):
            write_csv(self.results / f"{of.costs}.csv", self.a_round(of, config))

    def a_round(self, of: Benchmark, config: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
        """A heading, then for each variant what a round costs one of the measured clients, by the mean over them."""
        yield "method", "bytes_up", "bytes_down", "multiplications", "memory"
        torch.set_num_threads(1)
        variants = variants_of(self.variants(of))
        shared = shared_settings(variants, seeds=of.seeds, config={**config, "report": False})
        for variant in variants:
            settings = shared.settings(variant.name, of.seeds[0])
            meters = [costs.measured(settings, what, MEASURED) for what in ("multiplications", "memory")]
            sizes = zip(*(meters[0].bytes[client] for client in MEASURED), strict=True)
            yield (
                variant.name,
                *map(statistics.fmean, sizes),
                *(statistics.fmean(each.values.values()) for each in meters),
            )

    def table(self, name: str) -> str:
        """A table of the page."""
        of = self.benchmarks[name]
        if of.unseen:
            return unseen_table(of, self.rows_of(f"{name}_unseen"))
        values = {(row["method"], row["seed"]): row for row in self.rows_of(name)}
        if not values:
            return NOT_RUN
        best: dict[str, list[float]] = {}
        for row in self.rows_of(f"{name}_rounds") if of.best else ():
            best.setdefault(row["method"], []).append(float(row["accuracy"]))
        rounds = {row["method"]: row for row in self.rows_of(of.costs)} if of.costs else {}
        ps = p_values(values, of)
        columns = ["in the paper"] if of.printed else []
        for heading in of.scores.values():
            columns += [heading, f"minus `{of.baseline}`", *([f"`{of.subject}` minus this"] if of.subject else [])]
        columns += ["p", *(["best test round\\*"] if of.best else []), "worse off than alone"]
        columns += ["unlabelled examples", "gradient steps", "up", "down"]
        columns += ["multiplications", "memory"] if of.costs else []
        lines = [f"| method | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
        for variant in variants_of(of.variants):
            method = variant.name
            mean = values[method, "mean"]
            cells = [of.printed.get(method, "")] if of.printed else []
            for score in of.scores:
                cells += [spread_of(values, method, score), difference_of(values, method, score, of.baseline)]
                if of.subject:
                    cells.append("" if method == of.subject else shown(between(values, of.subject, method, score)))
            cells.append("" if (p := ps.get(method)) is None else "< 0.001" if p < 0.001 else f"{p:.3f}")
            if of.best:
                cells.append(f"{statistics.fmean(best[method]):.3f}")
            cells.append(f"{float(mean['worse_off']):.0%}" if mean["worse_off"] else "")
            cells += (f"{float(mean[count] or 0):,.0f}" for count in ("unlabelled", "private_steps"))
            cells += (
                format_bytes(float((rounds or {method: mean})[method][way])) for way in ("bytes_up", "bytes_down")
            )
            if of.costs:
                cells.append(f"{float(rounds[method]['multiplications']) / 1e6:,.0f} M")
                cells.append(format_bytes(float(rounds[method]["memory"])))
            lines.append(f"| `{method}` | {' | '.join(cells)} |")
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


Values = Mapping[tuple[str, str], Mapping[str, str]]
"""The rows of a `comparison.csv` by method and what they are: a seed, or a statistic of all."""


def spread_of(values: Values, method: str, score: str) -> str:
    """A mean and the standard deviation; "" if the method has no such score."""
    mean, deviation = (values[method, name][score] for name in ("mean", "std"))
    return f"{float(mean):.3f} ± {float(deviation):.3f}" if mean else ""


def difference_of(values: Values, method: str, score: str, baseline: str) -> str:
    """A paired difference with its interval; "" for the baseline, and where one of both has no such score."""
    if method == baseline:
        return ""
    ends = [values[method, f"difference{end}"][score] for end in ("", "_low", "_high")]
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*map(float, ends)) if all(ends) else ""


def between(values: Values, method: str, other: str, score: str) -> Difference:
    """The paired difference of two methods, whose interval is by the spread over seeds."""
    mine, theirs = (
        {int(seed): float(row[score]) for (name, seed), row in values.items() if name == which and seed.isdigit()}
        for which in (method, other)
    )
    found = paired_difference(mine, theirs)
    assert found is not None
    return found


def shown(difference: Difference | None) -> str:
    """A difference with its interval."""
    assert difference is not None
    margin = difference.margin() or 0.0
    return f"{difference.mean:+.3f} [{difference.mean - margin:+.3f}, {difference.mean + margin:+.3f}]"


def p_values(values: Values, of: Benchmark) -> dict[str, float]:
    """The p values of no difference to the baseline in the first score, corrected (Holm).

    Those of personal accuracies are in the csv file, and cover test examples, too.
    """
    score = next(iter(of.scores))
    others = [variant.name for variant in variants_of(of.variants) if variant.name != of.baseline]
    if score == "personal_accuracy":
        return {name: float(values[name, "p"][score]) for name in others if (name, "p") in values}
    found = {name: between(values, name, of.baseline, score).p for name in others if values[name, "mean"][score]}
    return dict(zip(found, holm([1.0 if p is None else p for p in found.values()]), strict=True))


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
    """The table of unseen clients, a line for each variant."""
    if not rows:
        return NOT_RUN
    last = max(int(row["epoch"]) for row in rows)
    columns = ("as received", f"after {last} epochs", f"from scratch, after {last}", "difference", "in the paper")
    lines = [f"| unseen | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for variant in variants_of(of.variants):
        found: dict[tuple[str, int], dict[int, float]] = {}
        for row in rows:
            if row["method"] == variant.name:
                found.setdefault((row["start"], int(row["epoch"])), {})[int(row["seed"])] = float(row["accuracy"])
        received, scratch = found["received", last], found["scratch", last]
        cells = [statistics.fmean(each.values()) for each in (found["received", 0], received, scratch)]
        texts = [*(f"{cell:.3f}" for cell in cells), shown(paired_difference(received, scratch))]
        lines.append(f"| `{variant.name}` | {' | '.join([*texts, of.printed.get(variant.name, '')])} |")
    return "\n".join(lines)
