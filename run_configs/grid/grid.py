"""The grid: every method of the registry, tuned alike, in every setting of `settings.json`, on the same clients.

    python run_configs/grid/grid.py --data FOLDER --runs FOLDER             # goes on where it stopped
    python run_configs/grid/grid.py --data FOLDER --runs FOLDER --estimate  # says what is left, and the time it takes

With `--networks mixed` and `--networks equal` two processes can fill the tables at once, and more with `--setting`.
`chosen.csv` gets a row for each method, set of networks and tuning setting, `grid.csv` one for each run. A method that
cannot serve a setting has its reason in their place. `page.py` makes the table and the picture of them.
"""

import argparse
import csv
import json
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet import registry, running, text
from fedhet.comparing.measures import measure
from fedhet.comparing.runs import Execution
from fedhet.comparing.settings import SharedSettings, shared_settings, variants_of
from fedhet.comparing.tuning import Tuning, tune
from fedhet.errors import FedhetError
from fedhet.files import read_csv

HERE = Path(__file__).resolve().parent
CONTROLS = ("local", "nearest-neighbour", "logistic-regression", "label-spreading")
"""Training alone, and scikit-learn on each client's own examples: what a method has to beat. They run first."""

CHOSEN = ("tuned", "networks", "method", "choice", "validation_accuracy", "tried", "ties", "edges", "steps", "reason")
MEASURED = ("personal_accuracy", "trained_accuracy", "labelled", "unlabelled", "private_steps", "steps", "forwards")
COSTS = ("bytes_up", "bytes_down", "seconds")
GRID = ("setting", "networks", "method", "seed", *MEASURED, *COSTS, "clients", "reason")

SECONDS, MOST_HOURS = 45.0, 40.0
"""Of a run on one core, as long as none is measured; and what the whole grid may take, unless `--hours` says more."""

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Cell:
    """A setting with a set of networks: its name, what it is tuned as, its keys, and variants that differ in it."""

    setting: str
    networks: str
    tuned: str
    keys: Mapping[str, Any]
    variants: Mapping[str, str]


def cells(plan: Mapping[str, Any], data: Path | None) -> list[Cell]:
    """The cells of `settings.json`; data sets with files are looked for in folders of `data`."""
    found = []
    for name, setting in plan["settings"].items():
        for networks, models in plan["networks"].items():
            keys = {**plan["all"], **models, **setting}
            tuned = keys.pop("tuned")
            variants = {variant: f"{variant}={text}" for variant, text in keys.pop("variants", {}).items()}
            if "data" in keys and data is not None:
                keys["data"] = str(data / keys["data"])
            found.append(Cell(name, networks, tuned, keys, variants))
    return found


def methods(plan: Mapping[str, Any]) -> dict[str, str]:
    """The controls, the plan's variants and all other methods of the registry: as `compare` takes them, by name."""
    others = dict.fromkeys((*CONTROLS, *plan.get("variants", {}), *registry.own_methods()))
    texts = {name: f"{name}={text}" for name, text in plan.get("variants", {}).items()}
    return {name: texts.get(name, name) for name in others}


def shared(cell: Cell, variant: str, seeds: Sequence[int]) -> SharedSettings:
    """The settings of a method in a cell; a `FedhetError` says why it cannot serve there.

    A one-shot method trains as long in its one round as the others in all of theirs.
    """
    keys, variants = dict(cell.keys), variants_of([variant])
    if registry.method(variants[0].method).one_shot:
        keys |= {"rounds": 1, "local-epochs": keys["local-epochs"] * keys["rounds"]}
    settings = shared_settings(variants, seeds=seeds, config={"preset": "", **keys}, strict=False)
    if settings.equalised:
        raise FedhetError("needs equal networks")
    return settings


class Table:
    """Rows of a csv file by their first columns; each new row is in the file at once."""

    def __init__(self, path: Path, columns: Sequence[str], key: int) -> None:
        self.path, self.columns, self.key = path, columns, key
        self.rows: dict[tuple[str, ...], Row] = {}
        if path.is_file():
            self.rows = {self._key(row): row for row in read_csv(path)}

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self.columns[: self.key])

    def add(self, row: Row) -> None:
        """Add a row."""
        there = self.path.is_file()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if not there:
                writer.writeheader()
            writer.writerow(row)
        self.rows[self._key(row)] = row


@dataclass(frozen=True)
class Grid:
    """The plan, its two tables, where runs lie and how they are carried out, and the settings to complete (all)."""

    plan: Mapping[str, Any]
    cells: Sequence[Cell]
    methods: Mapping[str, str]
    chosen: Table
    results: Table
    folder: Path
    execute: Execution
    settings: Collection[str] = ()

    def run(self) -> None:
        """Complete both tables; a `FedhetError` if a run did not end, not even by a failure of its own."""
        for cell, method in self.waiting():
            if (cell.tuned, cell.networks, method) not in self.chosen.rows:
                self.chosen.add(self._tuned(cell, method))
            for row in self._measured(cell, method):
                self.results.add(row)

    def waiting(self) -> Iterator[tuple[Cell, str]]:
        """Yield what is not complete: a cell and a method, a cell after the other."""
        settings = self.settings or self.plan["settings"]
        for cell in self.cells:
            for method in self.methods:
                if cell.setting in settings and self._seeds(cell, method):
                    yield cell, method

    def _seeds(self, cell: Cell, method: str) -> list[int]:
        row = (cell.setting, cell.networks, method)
        if (*row, "") in self.results.rows:  # refused
            return []
        return [seed for seed in self.plan["seeds"] if (*row, str(seed)) not in self.results.rows]

    def _tuned(self, cell: Cell, method: str) -> Row:
        """Tune a method; the first setting that is tuned so stands for all."""
        row: Row = {"tuned": cell.tuned, "networks": cell.networks, "method": method}
        first = next(each for each in self.cells if (each.tuned, each.networks) == (cell.tuned, cell.networks))
        try:
            settings = shared(first, self.methods[method], [*self.plan["tuning-seeds"], *self.plan["seeds"]])
            families = ("", settings.settings(method, self.plan["seeds"][0]).family)
            grid = {key: values for key, values in self.plan["tune"].items() if key.rpartition(".")[0] in families}
            tuning = Tuning(grid, self.plan["tuning-seeds"], self.plan["tries"])
            out = self.folder / f"tuned-{cell.tuned}-{cell.networks}-{method}"
            found, failed = tune(tuning, settings, reported=self.plan["seeds"], out=out, execute=self.execute)
        except FedhetError as error:
            return row | {"reason": one_line(error)}
        if method in failed:
            return row | {"reason": one_line(failed[method])}
        search = found[method]
        return row | {
            "choice": json.dumps(search.best.choice),
            "validation_accuracy": f"{search.best.accuracy:.4f}",
            "tried": len(search.tried),
            "edges": " ".join(search.edges),
            "steps": sum(each.steps for each in search.tried),
        }

    def _measured(self, cell: Cell, method: str) -> Iterator[Row]:
        """Yield a row for each seed that is left, or one with the reason why there is none."""
        row: Row = {"setting": cell.setting, "networks": cell.networks, "method": method}
        chosen = self.chosen.rows[cell.tuned, cell.networks, method]
        if chosen.get("reason"):
            yield row | {"seed": "", "reason": chosen["reason"]}
            return
        try:
            settings = shared(cell, cell.variants.get(method, self.methods[method]), self.plan["seeds"])
        except FedhetError as error:
            yield row | {"seed": "", "reason": one_line(error)}
            return
        choice = {**json.loads(chosen["choice"]), "validation": 0.0, "validation-on": "own", "report": False}
        for seed in self._seeds(cell, method):
            name = f"{cell.setting}-{cell.networks}-{method}-seed{seed}"
            run = settings.plan(method, seed, self.folder / name, choice)
            failed = self.execute([run])
            if reason := failed.get(run.name):
                if not (run.folder / "summary.json").is_file():  # it was killed, or another process has the folder
                    raise FedhetError(f"{run.name}: {reason}. Start again to go on")
                yield row | {"seed": seed, "reason": one_line(reason)}
                continue
            outcome = measure([run], failed)[0].outcomes[0]
            last = max(each.round for each in outcome.files.clients)
            accuracies = [each.accuracy for each in outcome.files.clients if each.round == last]
            yield row | {
                "seed": seed,
                **{name: value for name in (*MEASURED, *COSTS) if (value := outcome.values[name]) is not None},
                "clients": " ".join("-" if value is None else f"{value:.4f}" for value in accuracies),
            }

    def left(self) -> tuple[int, float]:
        """How many runs are left, and their hours on one core if each takes as long as those that are there."""
        done = [float(row["seconds"]) for row in self.results.rows.values() if row.get("seconds")]
        left = {(cell, method): len(self._seeds(cell, method)) for cell, method in self.waiting()}
        groups = {(cell.tuned, cell.networks, method) for cell, method in left} - self.chosen.rows.keys()
        runs = sum(left.values()) + len(groups) * self.plan["tries"] * len(self.plan["tuning-seeds"])
        return runs, runs * (statistics.fmean(done) if done else SECONDS) / 3600


def one_line(error: object) -> str:
    """Return the text of an error as a cell of the csv files."""
    return " ".join(str(error).split())


def grid_of(data: Path | None, runs: Path, networks: Sequence[str] = (), settings: Sequence[str] = ()) -> Grid:
    """The grid, or its part with some networks or settings; its tables are beside this file, runs in a folder."""
    plan = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
    plan["networks"] = {name: keys for name, keys in plan["networks"].items() if name in (networks or plan["networks"])}
    results = Table(HERE / "grid.csv", GRID, 4)
    execute = Execution(running.run, 1, text.console(soft_wrap=True))
    return Grid(
        plan, cells(plan, data), methods(plan), Table(HERE / "chosen.csv", CHOSEN, 3), results, runs, execute, settings
    )


def main() -> None:
    """Run the grid, or say what is left."""
    parser = argparse.ArgumentParser(description="Complete grid.csv, run by run.")
    parser.add_argument("--data", type=Path, help="folder of the folders mnist, fashionmnist and cifar10")
    parser.add_argument(
        "--runs", type=Path, required=True, help="folder of the runs, which a further start goes on with"
    )
    parser.add_argument("--networks", action="append", default=[], choices=("mixed", "equal"), help="only these cells")
    names = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))["settings"]
    parser.add_argument("--setting", action="append", default=[], choices=names, help="only this one; may be repeated")
    parser.add_argument("--estimate", action="store_true", help="run nothing, say what is left")
    parser.add_argument("--hours", type=float, default=MOST_HOURS, help="run nothing if more is left")
    given = parser.parse_args()
    grid = grid_of(given.data, given.runs, given.networks, given.setting)
    runs, hours = grid.left()
    print(f"about {runs:,} runs are left: {hours:.1f} hours on one core", flush=True)
    if hours > given.hours:
        parser.error(f"that is above {given.hours:g} hours: take out settings, or set --hours")
    if not given.estimate:
        grid.run()


if __name__ == "__main__":
    main()
