"""Measure what a round of the papers' runs costs on one core, and add to `costs.csv` what it lacks.

    python run_configs/papers/costs.py --data FOLDER   # goes on where it stopped; then run page.py

`FOLDER` has the folders `cifar10` and `mnist`; the other data sets are made up, in their own shapes. No preset's round
is run whole. A preset's second round (FedHeNN's third; of FedMA all rounds of a pass, of a one-shot method its one)
runs with a client for each network of the preset and few examples, then with twice as many (with more of both, if
that hardly takes longer). The difference gives the seconds that an example takes in an epoch, and the rest is what a
client takes in a round whatever its number of examples, the server's part for it included. Seconds are those that the
process computed, so that other work on the machine hardly counts; but the same run has taken twice as long on another
day, so that only rows of one date compare.
"""

import argparse
import csv
import itertools
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fedhet
from fedhet import models
from fedhet.config import parse_settings, resolve
from fedhet.files import read_csv
from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.options import Config
from fedhet.registry import module_of

HERE = Path(__file__).resolve().parent

made_up = module_of(str(HERE / "made_up.py"))
MADE_UP = {
    "shakespeare": partial(made_up.shakespeare, roles=66, characters=11_000),
    "sentiment140": partial(made_up.sentiment140, users=20, tweets=100_000, vocabulary=2000, words=25, width=300),
    "chestxray14": partial(made_up.chestxray14, patients=600, side=224),
}
"""Write data sets, by name, into a folder."""

CLEAR = 0.5
"""Seconds by which a run with twice as many examples must take longer, to tell from a process's first steps."""

Key = tuple[str, str, str]
"""Preset, networks and kind of data."""


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of one of the csv files beside this one."""
    return read_csv(HERE / name)


def settings(number: Mapping[str, str]) -> dict[str, Any]:
    """A number's preset and the keys on top of it."""
    return {"preset": number["preset"], **parse_settings(number["keys"].split())}


def alike(preset: str, config: Config) -> Key:
    """Return the key that an example's cost goes by; one of CIFAR-100 costs what one of CIFAR-10 does."""
    networks = ",".join(sorted(models.expand(config.architectures)))
    return preset, networks, config.dataset.split("-")[0].replace("cifar100", "cifar10")


def key_of(row: Mapping[str, str]) -> Key:
    """The key of a row of `costs.csv`."""
    return row["preset"], row["architectures"], row["dataset"]


@dataclass
class Clock(Observer):
    """Keeps how many seconds the process had computed when a run began (0) and when its rounds ended.

    It ends the run after the round `last`; 0: after as many as the method needs.
    """

    last: int
    ends: dict[int, float] = field(default_factory=dict)

    def started(self, run: RunInfo, first: int, last: int) -> None:
        """The first round begins."""
        self.ends[0], self.last = time.process_time(), self.last or last

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """One more has ended."""
        self.ends[report.row["round"]] = time.process_time()
        if report.row["round"] == self.last:
            run.state.stopped = self.last


def took(settings: Mapping[str, Any], first: int, last: int) -> float:
    """Run, and return the seconds of a round, by the mean of those after `first`, to `last`."""
    clock = Clock(last)
    with tempfile.TemporaryDirectory() as folder:
        fedhet.run(settings, out=f"{folder}/run", progress=False, observers=[clock])
    return (clock.ends[clock.last] - clock.ends[first]) / (clock.last - first)


def sizes(config: Config, examples: int) -> dict[str, Any]:
    """So many examples a client, and as many public ones where it has a public dataset."""
    return {"samples-per-client": examples} | ({"public-samples": examples} if config.public_samples else {})


def measured(preset: str, config: Config, data: str) -> tuple[float, float, str]:
    """Seconds of an example, those of a client and round beside, and how they were measured."""
    kind, method = alike(preset, config)[2], config.method_name
    # In the hypernetwork's steps a part of the cost is that of a batch.
    batch = config.batch_size if method == "flha-ghn" else min(config.batch_size, 32)
    # The exact number where the server matches; matching takes longer the more clients there are.
    clients = config.clients if method == "fedma" else max(2, len(models.expand(config.architectures)))
    epochs = config.local_epochs if method == "fedrep" else 1  # of which its head has all but a few
    first, last, rounds = {  # what is measured is after `first`, to `last` of `rounds`
        "fedma": (0, 0, 0),
        "ensemble": (0, 1, 1),
        "flha-distillation": (1, 3, 4),  # a round of the teacher, and one of the students
        "fedhenn": (2, 3, 20),  # the term begins in the second round, and first steps take longer
    }.get(method, (1, 2, 20))
    short = {
        "preset": preset,
        "dataset": "cifar10" if kind == "cifar10" else config.dataset,
        "architectures": config.architectures,
        "rounds": rounds,
        "clients": clients,
        "fraction-train": 1,
        "batch-size": batch,
        "local-epochs": epochs,
        "closing-epochs": 0,
        "partition": config.partition if config.partition == "natural" else "iid",
        "assign": "round-robin",
        "test-on": "local",
        "evaluate-every": 20,
        "workers": 1,
        "report": False,
        "data": data,
        **({"fedma.passes": 1} if method == "fedma" else {}),
    }
    if method == "fedhenn":  # the clients' few examples are not enough for the RAD
        short |= {"fedhenn.rad-source": "held-out", "public-samples": config.parameters.rad_size}
    # Ten steps at least, unless they are long ones: a step with Procrustes takes all rows of the RAD.
    fewest = 10 * batch if batch <= 10 and getattr(config.parameters, "kernel", "") != "procrustes" else batch
    if config.partition != "natural":  # else the whole test set is evaluated at the end
        short |= {"test-split": "drawn", "test-share": 0.1}
    for examples in (fewest, 4 * fewest, 16 * fewest, 64 * fewest):
        fewer, twice = (took(short | sizes(config, each), first, last) for each in (examples, 2 * examples))
        if twice - fewer > CLEAR:
            break
    else:
        raise RuntimeError(
            f"{preset}: with {2 * examples} examples a client it takes {twice - fewer:.2g} s more, too few to tell"
        )
    example = (twice - fewer) / (clients * examples * epochs * (2 if config.public_samples else 1))
    how = f"extrapolated: {clients} clients with {examples} and {2 * examples} examples"
    return example, max(0.0, (2 * fewer - twice) / clients), how


def unlike(methods: Collection[str] = ()) -> Iterator[tuple[Key, Config]]:
    """The runs (of some methods) of which an example may cost something else than of those before, once each."""
    known: set[Key] = set()
    for number in rows_of("numbers.csv"):
        if number["preset"]:
            config = resolve(settings(number))
            key = alike(number["preset"], config)
            if key not in known and config.method_name in (methods or {config.method_name}):
                known.add(key)
                yield key, config


def main() -> None:
    """Complete `costs.csv`."""
    parser = argparse.ArgumentParser(description="Add to costs.csv what it lacks.")
    parser.add_argument("--data", type=Path, required=True, help="folder of the folders cifar10 and mnist")
    parser.add_argument("--methods", nargs="+", default=[], help="only these, so that processes can share the work")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = set(map(key_of, rows_of("costs.csv")))
    for kind, group in itertools.groupby(unlike(given.methods), lambda each: each[0][2]):
        with tempfile.TemporaryDirectory() as folder:
            if kind in MADE_UP:
                MADE_UP[kind](Path(folder))
            for key, config in group:
                if key in known:
                    continue
                example, client, how = measured(key[0], config, folder if kind in MADE_UP else str(given.data / kind))
                machine, today = f"1 of {os.cpu_count()} cores", date.today().isoformat()
                cost = (f"{example:.3g}", f"{client:.3g}", how, machine, today)
                with (HERE / "costs.csv").open("a", newline="", encoding="utf-8") as file:
                    csv.writer(file, lineterminator="\n").writerow((*key, *cost))
                print(*key, *cost, flush=True)


if __name__ == "__main__":
    main()
