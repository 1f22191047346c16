"""Run the methods in other libraries' benchmarks, and write the tables of README.md.

    python run_configs/htfl/tables.py mnist --data FOLDER --runs FOLDER   # goes on where it stopped
    python run_configs/htfl/tables.py                                     # the tables anew, from results/

A table is a comparison (`fedhet compare`), whose `comparison.csv` goes into `results/`, where `rounds.csv` has the
round with the highest test accuracy of each run, and `costs.csv` what a round costs a client (`../grid/costs.py`).
"""

import argparse
import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedhet.comparing import Comparison, Tuning, compare
from fedhet.comparing.settings import shared_settings, variants_of
from fedhet.config import named
from fedhet.files import write_csv
from fedhet.registry import module_of
from fedhet.results.tables import format_bytes

HERE = Path(__file__).resolve().parent
PAGE, RESULTS = HERE / "README.md", HERE / "results"
BEGIN, END = "<!-- {} -->\n", "<!-- end of {} -->\n"
SEEDS = (0, 1, 2, 3, 4)
MEASURED = (4, 5, 6, 7)
"""Partition ids of clients, one of each kind, whose costs are measured when others have warmed up the process."""

costs = module_of(str(HERE.parent / "grid" / "costs.py"))


@dataclass(frozen=True)
class Benchmark:
    """A comparison whose results are on the page.

    Attributes:
        preset: settings for all, a file in `run_configs`.
        keys: settings beside it.
        variants: as `fedhet compare` takes them.
        baseline: the variant that differences are to.
        costs: name of the csv file with what a round costs a client.
        tuning: what is tuned, for all alike.
        best: whether the table has the round with the highest test accuracy, too, of rounds that are all evaluated.
    """

    preset: str
    keys: Mapping[str, Any]
    variants: Sequence[str]
    baseline: str
    costs: str
    tuning: Tuning | None = None
    best: bool = True


HTFL = {
    "preset": "local/htfl_mnist.toml",
    "keys": {"public-samples": 500},
    "variants": (
        *("local", "fedproto", "fd", "fml", "alone=run_configs/fml/controls.py:shared_alone", "lg-fedavg", "fedgh"),
        *("fedmrl", "fedtgp", "paper=fedtgp,fedtgp.weight=.1", "fedkd", "fedgen", "fedhenn", "flha-ghn"),
        *("nearest-neighbour", "label-spreading"),
    ),
    "baseline": "local",
    "costs": "htfl_costs",
}
BENCHMARKS = {
    "mnist": Benchmark(**HTFL),
    "fashion-mnist": Benchmark(**{**HTFL, "keys": {**HTFL["keys"], "dataset": "fashion-mnist"}}),
    "mnist-two-classes": Benchmark(**{**HTFL, "keys": {**HTFL["keys"], "partition": "classes"}}),
    "mnist-tuned": Benchmark(**HTFL, tuning=Tuning({"learning-rate": (0.01, 0.03, 0.1)}, (10, 11))),
    "heflwr": Benchmark(
        "heterofl/heflwr_mnist.toml",
        {"samples-per-client": 375, "evaluate-every": 50},
        ("heterofl", "fedrolex", "fjord", "large=run_configs/heterofl/controls.py:large_only", "fedavg", "local"),
        "large",
        "heflwr_costs",
        tuning=Tuning({"learning-rate": (0.001, 0.003, 0.01)}, (10, 11)),
        best=False,
    ),
    "depths": Benchmark(
        "depthfl/digits_plain.toml",
        {"evaluate-every": 30},
        (
            *("depthfl", "exits=run_configs/depthfl/controls.py:exits_large_only", "inclusivefl"),
            *("large=run_configs/depthfl/controls.py:large_only", "fedavg", "local"),
        ),
        "large",
        "depths_costs",
        tuning=Tuning({"learning-rate": (0.001, 0.003, 0.01)}, (10, 11)),
        best=False,
    ),
}


def run(name: str, data: Path, runs: Path, jobs: int = 1) -> None:
    """Run a comparison, and keep its csv files, its best rounds and what a round costs in `results/`."""
    of = BENCHMARKS[name]
    config = {"preset": "", **named(HERE.parent / of.preset), **of.keys, "data": str(data)}
    found = compare(of.variants, config, seeds=SEEDS, out=runs, jobs=jobs, baseline=of.baseline, tuning=of.tuning)
    found.check()
    for file in ("comparison.csv", "tuning.csv"):
        if (runs / file).is_file():
            kept = RESULTS / file.replace("comparison", name).replace("tuning", f"{name}_tuning")
            kept.write_bytes((runs / file).read_bytes())
    if of.best:
        write_csv(RESULTS / f"{name}_rounds.csv", best_rounds(found))
    if not (RESULTS / f"{of.costs}.csv").is_file():
        write_csv(RESULTS / f"{of.costs}.csv", a_round(of, config))


def best_rounds(found: Comparison) -> Iterator[tuple[object, ...]]:
    """A heading, then for each run the round with the highest accuracy, and that accuracy."""
    yield "method", "seed", "round", "accuracy"
    for result in found.results:
        for each in result.outcomes:
            accuracy, place = max((accuracy, -place) for place, accuracy in each.files.curve)
            yield result.variant, each.run.seed, -place, accuracy


def a_round(of: Benchmark, config: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """A heading, then for each variant what a round costs one of the measured clients, by the mean over them."""
    yield "method", "bytes_up", "bytes_down", "multiplications", "memory"
    torch.set_num_threads(1)
    variants = variants_of(of.variants)
    shared = shared_settings(variants, seeds=SEEDS, config={**config, "report": False})
    for variant in variants:
        settings = shared.settings(variant.name, SEEDS[0])
        meters = [costs.measured(settings, what, MEASURED) for what in ("multiplications", "memory")]
        sizes = zip(*(meters[0].bytes[client] for client in MEASURED), strict=True)
        yield variant.name, *map(statistics.fmean, sizes), *(statistics.fmean(each.values.values()) for each in meters)


def table(name: str) -> str:
    """A table of the page."""
    of = BENCHMARKS[name]
    if not (RESULTS / f"{name}.csv").is_file():
        return "Not run so far."
    values = {(row["method"], row["seed"]): row for row in rows_of(name)}
    best: dict[str, list[float]] = {}
    for row in rows_of(f"{name}_rounds") if of.best else ():
        best.setdefault(row["method"], []).append(float(row["accuracy"]))
    rounds = {row["method"]: row for row in rows_of(of.costs)}
    columns = ["last round", f"minus `{of.baseline}`", "p", "best test round\\*", "worse off than alone"]
    columns += ["unlabelled examples", "gradient steps", "up", "down", "multiplications", "memory"]
    if not of.best:
        columns.remove("best test round\\*")
    lines = [f"| method | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for variant in variants_of(of.variants):
        method = variant.name
        mean, spread = values[method, "mean"], values[method, "std"]
        cells = [f"{float(mean['personal_accuracy']):.3f} ± {float(spread['personal_accuracy']):.3f}", "", ""]
        if method != of.baseline:
            ends = (values[method, f"difference{end}"]["personal_accuracy"] for end in ("", "_low", "_high"))
            cells[1] = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*map(float, ends))
            p = float(values[method, "p"]["personal_accuracy"])
            cells[2] = "< 0.001" if p < 0.001 else f"{p:.3f}"
        if of.best:
            cells.append(f"{statistics.fmean(best[method]):.3f}")
        cells.append(f"{float(mean['worse_off']):.0%}" if mean["worse_off"] else "")
        cells += (f"{float(mean[count] or 0):,.0f}" for count in ("unlabelled", "private_steps"))
        cells += (format_bytes(float(rounds[method][way])) for way in ("bytes_up", "bytes_down"))
        cells.append(f"{float(rounds[method]['multiplications']) / 1e6:,.0f} M")
        cells.append(format_bytes(float(rounds[method]["memory"])))
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a csv file in `results/`."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page(text: str) -> str:
    """The page with the tables written anew."""
    for name in BENCHMARKS:
        begin, end = BEGIN.format(name), END.format(name)
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n{table(name)}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Run a benchmark, or only write the tables."""
    parser = argparse.ArgumentParser(description="Run the methods in other libraries' benchmarks.")
    parser.add_argument("name", nargs="?", choices=BENCHMARKS, help="none: only write the tables")
    parser.add_argument("--data", type=Path, help="folder with the data set's files")
    parser.add_argument("--runs", type=Path, help="folder of the comparison")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    given = parser.parse_args()
    if given.name and not (given.data and given.runs):
        parser.error(f"{given.name} needs --data and --runs")
    if given.name:
        run(given.name, given.data, given.runs, given.jobs)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
