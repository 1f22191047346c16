"""Run what gives a number of the papers, at its own scale, and add the result to `measured.csv`.

    python run_configs/papers/measure.py R4 --data FOLDER --runs FOLDER   # goes on where it stopped; then run page.py

`R4` is the name of a run in PAPERS.md. Its curve goes to `curves/`, and `measured.csv` has the mean over the seeds with
a curve. Numbers that are read from `clients.csv` are left to the reader of the run's folder.
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path

import fedhet
from fedhet.comparing.runs import why_incomplete
from fedhet.comparing.settings import PlannedRun
from fedhet.config import resolve
from fedhet.errors import ConfigError
from fedhet.files import read_csv, write_csv
from fedhet.keys import default_of
from fedhet.options import keys_that
from fedhet.registry import module_of
from fedhet.results.history import RunFiles, TestSet, learning_curve, read_run

HERE = Path(__file__).resolve().parent
page = module_of(str(HERE / "page.py"))
costs = page.costs

READ = "personal accuracy", "global accuracy", "global model on the clients' test parts"
"""The accuracies of a run that numbers are; on the common test set that of the server's model, also of an ensemble."""

MEASURED = (*page.NUMBER, "value", "seeds", "date", "machine", "curve")


def run(of: tuple[str, str], seed: int, data: Path, folder: Path) -> RunFiles:
    """Run it, or go on with it, on all cores or a GPU, with about ten evaluations.

    Raises:
        ConfigError: The folder has a run with other settings.
    """
    config = resolve({**page.runs_of(costs.rows_of("numbers.csv"))[of], "data": str(data), "seed": seed})
    config = config.but(evaluate_every=max(config.evaluate_every, page.rounds(config) // 10))
    if not (folder / "config.toml").is_file():
        fedhet.run(config, out=folder)
        return read_run(folder)
    there = {key: default_of(spec) for key, spec in config.specs().items()} | read_run(folder).settings
    wanted = {key: value for key, value in config.flat().items() if key not in keys_that("resumable")}
    if other := [key for key, value in wanted.items() if there[key] != value]:
        raise ConfigError(f"{folder} has a run with another {', '.join(other)}: choose another folder of runs")
    if why_incomplete(PlannedRun(config.method_name, seed, config, folder, equalised=False)):
        fedhet.run({"data": str(data)}, resume=folder)
    return read_run(folder)


def curve_of(of: tuple[str, str]) -> str:
    """The file of a run's curve beside this one, with the seed left open."""
    preset, keys = of
    return f"curves/{'-'.join([preset, *keys.split()]).replace('/', '-')}-seed{{}}.csv"


def curve(files: RunFiles) -> Iterator[tuple[object, ...]]:
    """A heading, then the accuracies of each evaluation by round, and last those of the run (round "end")."""
    yield "round", *READ
    at_server = ((files.summary or {}).get("common") or {}).get("received")
    scored_on: TestSet = "common" if files.settings["test-on"] == "global" else "own"
    curves = (
        learning_curve(files.rows, files.scored, "weighted", scored_on),
        learning_curve(files.rows, "received" if at_server else "trained", "weighted", "common"),
        learning_curve(files.rows, "received", "weighted") if files.has_global else [],
    )
    by_round = [dict(each) for each in curves]
    for round in sorted({round for each in by_round for round in each}):
        yield round, *(each.get(round) for each in by_round)
    yield "end", files.accuracy("personal"), files.common_accuracy, files.accuracy("global")


def results(of: tuple[str, str], machine: str) -> Iterator[dict[str, str]]:
    """Yield a row of `measured.csv` for each number that the run gives and that can be read from its curves."""
    files = sorted(HERE.glob(curve_of(of).format("*")))
    ends = {path.stem.rpartition("seed")[2]: read_csv(path)[-1] for path in files}
    for row in costs.rows_of("numbers.csv"):
        if (row["preset"], row["keys"]) == of and row["read"] in READ:
            value = 100 * statistics.fmean(float(end[row["read"]]) for end in ends.values())
            found = {"value": f"{value:.2f}", "seeds": " ".join(ends), "date": str(date.today())}
            found |= {"machine": machine, "curve": curve_of(of)}
            yield {**{name: row[name] for name in page.NUMBER}, **found}


def add(rows: Iterable[Mapping[str, str]]) -> None:
    """Write rows into `measured.csv`, in place of what it has for the same numbers."""
    known = {page.number_of(row): row for row in (*costs.rows_of("measured.csv"), *rows)}
    write_csv(HERE / "measured.csv", [MEASURED, *([row[name] for name in MEASURED] for row in known.values())])


def main() -> None:
    """Run one, and write down what came out."""
    names = {name: of for of, name in page.names_of(costs.rows_of("numbers.csv")).items()}
    parser = argparse.ArgumentParser(description="Measure numbers of the papers at their own scale.")
    parser.add_argument("name", choices=names, metavar="RUN", help="a run of PAPERS.md, such as R4")
    parser.add_argument("--data", type=Path, required=True, help="folder with the data set's files")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    of = names[given.name]
    path = HERE / curve_of(of).format(given.seed)
    files = run(of, given.seed, given.data, given.runs / path.stem)
    path.parent.mkdir(exist_ok=True)
    write_csv(path, curve(files))
    found = list(results(of, ", ".join((files.summary or {})["devices"])))
    add(found)
    print(f"{path}; numbers added to measured.csv: {len(found)}")


if __name__ == "__main__":
    main()
