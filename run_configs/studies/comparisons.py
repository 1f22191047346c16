"""Run the comparisons of the result pages, and write the pages' tables from their csv files.

    python run_configs/studies/comparisons.py fedma own --data FOLDER --runs FOLDER   # run one, or continue it
    python run_configs/studies/comparisons.py                                         # write the tables of all pages

`comparisons/PAGE.toml` declares the comparisons and tables of `run_configs/PAGE/README.md`. A comparison leaves the
files of `fedhet compare` in the folder of `--runs`; its `comparison.csv` and `tuning.csv` are kept as `NAME.csv` and
`NAME_tuning.csv` in `results/PAGE/`.
"""

import argparse
import csv
import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from fedhet.comparing import Tuning, compare
from fedhet.comparing.measures import Difference, holm, paired_difference
from fedhet.comparing.settings import variants_of
from fedhet.config.configuration import read, resolve, run_configs
from fedhet.methods.registry import module_of
from fedhet.results.terminal import format_bytes
from fedhet.utils.files import write_text

HERE = Path(__file__).resolve().parent
PAGES = ("fedma", "fedharm", "htfl", "fedhenn", "papers", "grid")
COLUMNS = {"steps": "gradient steps", "bytes_up": "up", "bytes_down": "down"}
"""Headings of further columns of `comparison.csv` that a table may show."""

Values = Mapping[tuple[str, str], Mapping[str, str]]
"""The rows of a `comparison.csv` by method and seed (or statistic over seeds)."""


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as dictionaries by column name; raises an OSError if the file is missing."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Comparison:
    """A comparison of a page.

    Attributes:
        variants: methods with their settings, as `fedhet compare` takes them.
        preset: settings for all methods; "" for those of `set` only.
        set: further settings for all methods; "" takes a key of the preset back.
        baseline: the variant that differences are computed to.
        baselines: the variant for single scores, if another one.
        seeds: the seeds that are reported.
        tune: values to try by key, for all methods alike.
        tune_seeds: the seeds of the tuning.
        tune_runs: configurations to try for each method; 0 for as many as the largest grid has.
        settings_of: a comparison whose tuning chose the settings; nothing is tuned then.
        client_setup: a file with the functions `model` and `data`, if clients have their own.
        scores: headings of the table's scores by column of the csv file.
        printed: what a paper prints for a variant.
        columns: further columns of the table, of `COLUMNS`.
    """

    variants: Sequence[str]
    preset: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = "local"
    baselines: Mapping[str, str] = field(default_factory=dict)
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune_seeds: Sequence[int] = ()
    tune_runs: int = 0
    settings_of: str = ""
    client_setup: str = ""
    scores: Mapping[str, str] = field(default_factory=lambda: {"personal_accuracy": "last round"})
    printed: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()

    def baseline_of(self, score: str) -> str:
        """Return the variant that differences of a score are computed to."""
        return self.baselines.get(score, self.baseline)


@dataclass(frozen=True)
class Summary:
    """A table with one row for each of several comparisons.

    Attributes:
        rows: headings of the rows by comparison.
        methods: variants whose accuracy is a column, with what the paper prints in brackets.
        differences: pairs of variants whose paired difference is a column; bold if the second one is the comparison's
            baseline and p < 0.05.
        settings_are_columns: whether the table is transposed.
    """

    rows: Mapping[str, str]
    methods: Sequence[str]
    differences: Sequence[tuple[str, str]]
    settings_are_columns: bool = False


class Page:
    """The comparisons and tables of a result page."""

    def __init__(self, name: str) -> None:
        """Read the page's declaration."""
        declared = tomllib.loads((HERE / "comparisons" / f"{name}.toml").read_text(encoding="utf-8"))
        self.comparisons: dict[str, Comparison] = {}
        merged: dict[str, dict[str, Any]] = {}
        for comparison, own in declared["comparisons"].items():
            base = merged[own.pop("like")] if "like" in own else {}
            merged[comparison] = {**base, **own, "set": {**base.get("set", {}), **own.get("set", {})}}
            self.comparisons[comparison] = Comparison(**merged[comparison])
        self.summaries = {summary: Summary(**own) for summary, own in declared.get("summaries", {}).items()}
        self.file = run_configs() / name / "README.md"
        self.results = HERE / "results" / name

    def rows_of(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a csv file of results, or nothing if it does not exist."""
        path = self.results / f"{name}.csv"
        return read_csv(path) if path.is_file() else []

    def values_of(self, name: str) -> Values:
        """Return the rows of a comparison by method and seed."""
        return {(row["method"], row["seed"]): row for row in self.rows_of(name)}

    def variants(self, comparison: Comparison) -> list[str]:
        """Return the variants of a comparison, with the settings that another one chose for them.

        Raises:
            FileNotFoundError: the other comparison has not been run.
        """
        if not comparison.settings_of:
            return list(comparison.variants)
        rows = [row for row in self.rows_of(f"{comparison.settings_of}_tuning") if row["result"] == "chosen"]
        if not rows:
            raise FileNotFoundError(f"run {comparison.settings_of} first: it chooses the settings")
        keys = [*itertools.takewhile(lambda column: not column.startswith("seed "), rows[0])][1:]
        chosen = {row["method"]: [f"{key}={row[key]}" for key in keys if row[key]] for row in rows}
        texts = []
        for text, variant in zip(comparison.variants, variants_of(comparison.variants), strict=True):
            settings = chosen[variant.name if variant.name in chosen else variant.method]
            texts.append(",".join([f"{variant.name}={text.removeprefix(f'{variant.name}=')}", *settings]))
        return texts

    def settings(self, comparison: Comparison, data: Path) -> dict[str, Any]:
        """Return the settings for all methods of a comparison, with the folder of the data set's files."""
        preset = read(run_configs() / f"{comparison.preset}.toml") if comparison.preset else {}
        settings = {**preset, **comparison.set, "data": str(data)}
        own = ("model", "data") if comparison.client_setup else ()
        settings["data"] = resolve({"preset": "", **settings}, strict=False, supplied=own).data  # digits: ""
        return {"preset": "", **{key: value for key, value in settings.items() if value != ""}}

    def run(self, name: str, data: Path, runs: Path, jobs: int | None = None) -> None:
        """Run a comparison, and keep its csv files."""
        comparison = self.comparisons[name]
        setup: dict[str, Any] = {}
        if comparison.client_setup:
            module = module_of(str(run_configs().parent / comparison.client_setup))
            cloudpickle.register_pickle_by_value(module)  # the processes of runs cannot import it
            setup = {"model": module.model, "data": module.data}
        tuning = None
        if comparison.tune and not comparison.settings_of:
            tuning = Tuning(comparison.tune, comparison.tune_seeds, comparison.tune_runs or None)
        found = compare(
            self.variants(comparison),
            self.settings(comparison, data),
            seeds=comparison.seeds,
            out=runs,
            jobs=jobs,
            baseline=comparison.baseline,
            tuning=tuning,
            **setup,
        )
        found.check()
        self.results.mkdir(parents=True, exist_ok=True)
        for file, kept in (("tuning.csv", f"{name}_tuning.csv"), ("comparison.csv", f"{name}.csv")):
            if (runs / file).is_file():
                write_text(self.results / kept, (runs / file).read_text(encoding="utf-8"))

    def table(self, name: str) -> str:
        """Return the table of a comparison, without columns that are empty in all rows."""
        comparison, values = self.comparisons[name], self.values_of(name)
        methods = [variant.name for variant in variants_of(comparison.variants)]
        filled = [column for column in table_columns(comparison, values, methods) if any(column[1:])]
        return markdown(zip(["method", *(f"`{method}`" for method in methods)], *filled, strict=True))

    def summary(self, name: str) -> str:
        """Return a table of several comparisons."""
        summary = self.summaries[name]
        lines = [["setting", *(f"`{method}`" for method in summary.methods)]]
        lines[0] += [f"`{one}` minus `{other}`" for one, other in summary.differences]
        for row, heading in summary.rows.items():
            comparison, values = self.comparisons[row], self.values_of(row)
            score = next(iter(comparison.scores))
            ps = p_values(values, comparison, score)
            printed = {method: f" ({text})" for method, text in comparison.printed.items()}
            cells = [heading, *(spread_of(values, each, score) + printed.get(each, "") for each in summary.methods)]
            for one, other in summary.differences:
                known = {(one, "mean"), (other, "mean")} <= values.keys()
                text = difference_of(values, one, other, score) if known else ""
                clear = other == comparison.baseline_of(score) and ps.get(one, 1) < 0.05
                cells.append(f"**{text}**" if clear else text)
            lines.append(cells)
        return markdown(zip(*lines, strict=True) if summary.settings_are_columns else lines)

    def written(self, text: str) -> str:
        """Return the page with its tables written anew."""
        for name in self.comparisons:
            if f"<!-- {name} -->" in text:
                text = replaced(text, name, self.table(name))
        for name in self.summaries:
            text = replaced(text, name, self.summary(name))
        return text


def replaced(text: str, name: str, table: str) -> str:
    """Return a page with a new table between the comments that begin and end it."""
    before, rest = text.split(f"<!-- {name} -->\n")
    end = f"<!-- end of {name} -->\n"
    return f"{before}<!-- {name} -->\n\n{table}\n\n{end}{rest.split(end)[1]}"


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, whose first row is the heading."""
    head, *body = rows
    lines = (head, ["---", *["---:"] * (len(head) - 1)], *body)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table_columns(comparison: Comparison, values: Values, methods: Sequence[str]) -> Iterator[list[str]]:
    """Yield the columns of a table: a heading and a cell for each method, "" where there is no value."""
    yield ["in the paper", *(comparison.printed.get(method, "") for method in methods)]
    for score, heading in comparison.scores.items():
        baseline, ps = comparison.baseline_of(score), p_values(values, comparison, score)
        yield [heading, *(spread_of(values, method, score) for method in methods)]
        texts = {method: difference_of(values, method, baseline, score) for method in methods}
        bold = [f"**{text}**" if ps.get(method, 1) < 0.05 else text for method, text in texts.items()]
        yield [f"minus `{baseline}`", *bold]
    means = [values.get((method, "mean"), {}) for method in methods]
    shares = [mean.get("worse_off") for mean in means]
    yield ["worse off than alone", *(f"{float(share):.0%}" if share else "" for share in shares)]
    for column in comparison.columns:
        shown = format_bytes if column.startswith("bytes") else "{:,.0f}".format
        yield [COLUMNS[column], *(shown(float(mean[column])) if mean else "" for mean in means)]


def spread_of(values: Values, method: str, score: str) -> str:
    """Return the mean and standard deviation of a score, or "" if the method does not have it."""
    mean, deviation = (values.get((method, name), {}).get(score) for name in ("mean", "std"))
    return f"{float(mean):.3f} ± {float(deviation):.3f}" if mean and deviation else ""


def difference_of(values: Values, method: str, other: str, score: str) -> str:
    """Return a paired difference with its interval, or "" if one of both methods does not have the score.

    Intervals of differences to the comparison's baseline are in the csv file; the others follow from the seeds.
    """
    if method == other:
        return ""
    ends = [values.get((method, f"difference{end}"), {}).get(score, "") for end in ("", "_low", "_high")]
    if all(ends) and (other, "difference") not in values:
        return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*map(float, ends))
    found = difference_over_seeds(values, method, other, score)
    return str(found) if found else ""


def difference_over_seeds(values: Values, method: str, other: str, score: str) -> Difference | None:
    """Return the paired difference of two methods over seeds, or None if one of both does not have the score."""
    mine, theirs = (
        {
            int(seed): float(row[score])
            for (name, seed), row in values.items()
            if name == which and seed.isdigit() and row[score]
        }
        for which in (method, other)
    )
    return paired_difference(mine, theirs)


def p_values(values: Values, comparison: Comparison, score: str) -> dict[str, float]:
    """Return the p values of the differences to the baseline, after Holm's correction for the number of variants.

    The csv file has those of personal accuracies.
    """
    baseline = comparison.baseline_of(score)
    others = [variant.name for variant in variants_of(comparison.variants) if variant.name != baseline]
    if score == "personal_accuracy" and baseline == comparison.baseline:
        return {name: float(values[name, "p"][score]) for name in others if (name, "p") in values}
    found = {name: difference_over_seeds(values, name, baseline, score) for name in others}
    ps = {name: each.p for name, each in found.items() if each is not None}
    known = {name: p for name, p in ps.items() if p is not None}
    return dict(zip(known, holm([*known.values()]), strict=True))


def main() -> None:
    """Run a comparison, and write the tables."""
    parser = argparse.ArgumentParser(description="Run a comparison of a result page, or write the tables of all pages.")
    parser.add_argument("page", nargs="?", choices=PAGES)
    parser.add_argument("name", nargs="?", help="a comparison in PAGE.toml; left out: only write the tables")
    parser.add_argument("--data", type=Path, default=Path(), help="folder with the data set's files")
    parser.add_argument("--runs", type=Path, help="folder of the comparison")
    parser.add_argument("--jobs", type=int, help="runs at a time")
    given = parser.parse_args()
    if given.name:
        if not given.runs:
            parser.error("--runs is missing: name a folder for the runs")
        Page(given.page).run(given.name, given.data, given.runs, given.jobs)
    for page in map(Page, [given.page] if given.page else PAGES):
        write_text(page.file, page.written(page.file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
