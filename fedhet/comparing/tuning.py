"""Tuning: every variant's settings are chosen on validation parts, with seeds of which nothing is reported.

Test parts are evaluated in tuning runs as in all others, and nothing reads their results.
"""

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet.comparing.runs import Execution, check
from fedhet.comparing.settings import SAME_FOR_ALL, PlannedRun, SharedSettings, distinct
from fedhet.config import Value
from fedhet.errors import ConfigError, FedhetError
from fedhet.files import write_csv, write_text
from fedhet.randomness import numpy_generator
from fedhet.results.run_files import read_run

SEEDS = (1000, 1001, 1002)
SHARE = 0.2
"""Of the training examples: validation, in tuning runs with no other share set."""

_NOT_TUNED = SAME_FOR_ALL | {"architectures", "assign"}

Choice = tuple[tuple[str, Value], ...]
"""Keys and values that are tried together."""


@dataclass(frozen=True)
class Tuning:
    """The configurations to try.

    Attributes:
        grid: values by key, of keys that all methods share or that are a method's own (`fedhenn.eta0`); under
            `NAME:KEY` those that one variant tries instead of the others'.
        seeds: each configuration runs once with each.
        runs: configurations that a variant may try; None: as many for each as the smallest grid with a choice has.
    """

    grid: Mapping[str, Sequence[Value]]
    seeds: Sequence[int] = SEEDS
    runs: int | None = None


@dataclass(frozen=True)
class Tried:
    """A configuration that was tried: its validation accuracy by seed, pooled over clients, or why there is none."""

    choice: Choice
    by_seed: Mapping[int, float]
    failed: Mapping[int, str]

    @property
    def accuracy(self) -> float | None:
        """The mean over tuning seeds; None unless all of them have one."""
        return None if self.failed else statistics.fmean(self.by_seed.values())


@dataclass(frozen=True)
class Tuned:
    """The outcome of a variant's tuning: how many configurations its grid holds, those tried, and the best of these."""

    variant: str
    grid: int
    tried: Sequence[Tried]

    @property
    def best(self) -> Tried:
        """The first of those with the highest accuracy."""
        return max((each for each in self.tried if each.accuracy is not None), key=lambda each: each.accuracy or 0.0)

    @property
    def text(self) -> str:
        """The choice in words."""
        chosen = ", ".join(f"{key} = {value}" for key, value in self.best.choice) or "nothing to choose"
        tried = f"{len(self.tried)} of {self.grid} tried"
        return f"{self.variant}: {chosen} (validation {self.best.accuracy:.3f}, {tried})"


def tune(
    tuning: Tuning, shared: SharedSettings, *, reported: Sequence[int], out: Path, execute: Execution
) -> dict[str, Tuned]:
    """Run every variant's configurations in `out/tuning`, and write `tuning.json` and `tuning.csv` into `out`.

    Args:
        tuning: the configurations to try.
        shared: the comparison's settings.
        reported: the seeds of the comparison's own runs.
        out: the comparison's folder.
        execute: carries runs out.

    Returns:
        The outcome by variant.

    Raises:
        ConfigError: settings that cannot be tuned so; nothing was started.
        FedhetError: no configuration of a variant completed with all seeds; the same command tries again.
    """
    _check(tuning, shared, reported)
    share = float(shared.for_all["validation"]) or SHARE
    grids = {variant: _grid(tuning, shared, variant) for variant in shared.own}
    number = tuning.runs or min((len(grid) for grid in grids.values() if len(grid) > 1), default=1)
    drawn = {variant: _drawn(grid, number, tuning.seeds[0], variant) for variant, grid in grids.items()}
    planned = {
        (variant, choice): [_plan(shared, variant, choice, share, seed, out / "tuning") for seed in tuning.seeds]
        for variant, choices in drawn.items()
        for choice in choices
    }
    runs = list(itertools.chain(*planned.values()))
    check(runs)
    counts = ", ".join(f"{len(drawn[variant])} of {len(grid)} for {variant}" for variant, grid in grids.items())
    execute.tell(f"tuning with seeds {', '.join(map(str, tuning.seeds))}: configurations {counts}")
    failed = execute(runs)
    results = {
        variant: Tuned(variant, len(grids[variant]), [_tried(c, planned[variant, c], failed) for c in choices])
        for variant, choices in drawn.items()
    }
    without = [variant for variant, each in results.items() if all(tried.accuracy is None for tried in each.tried)]
    if without:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        raise FedhetError(f"no configuration of {', '.join(without)} completed with all tuning seeds:\n{reasons}")
    record = {"seeds": list(tuning.seeds), "validation": share, "methods": {n: _record(e) for n, e in results.items()}}
    write_text(out / "tuning.json", json.dumps(record, indent=2) + "\n")
    write_csv(out / "tuning.csv", _rows(tuning, results))
    for each in results.values():
        execute.tell(f"chosen for {each.text}")
    return results


def _check(tuning: Tuning, shared: SharedSettings, reported: Sequence[int]) -> None:
    problems = []
    if not tuning.seeds:
        problems.append("tuning needs at least one seed of its own")
    if both := sorted(set(tuning.seeds) & set(reported)):
        problems.append(f"seeds {both} are tuned with and reported: what is reported must not have been tuned on")
    if shared.for_all["early-stopping"]:
        problems.append("early-stopping: tuned methods are refitted on whole training parts, without validation")
    prefixes = {shared.settings(variant, 0).family for variant in shared.own}
    for name, values in tuning.grid.items():
        variant, _, key = name.rpartition(":")
        prefix = key.rpartition(".")[0]
        if variant and variant not in shared.own:
            problems.append(f"{name}: {variant} is not among the variants compared ({', '.join(shared.own)})")
        elif variant and key in shared.fixed[variant]:
            problems.append(f"{name}: {variant} sets {key} itself")
        if key in _NOT_TUNED:
            problems.append(f"{key} is the same for all methods of a comparison and cannot be tuned")
        if prefix and prefix not in prefixes:
            problems.append(f"{key}: {prefix} is not among the methods compared")
        if not values:
            problems.append(f"{key}: there are no values to try")
    if problems:
        raise ConfigError("\n".join(problems))


def _grid(tuning: Tuning, shared: SharedSettings, variant: str) -> list[Choice]:
    """A variant's configurations of keys that it does not set itself, each once."""
    prefixes = ("", shared.settings(variant, tuning.seeds[0]).family)
    split = {name: name.rpartition(":") for name in tuning.grid}
    grid = {key: tuning.grid[name] for name, (whose, _, key) in split.items() if not whose}
    grid |= {key: tuning.grid[name] for name, (whose, _, key) in split.items() if whose == variant}
    keys = [key for key in grid if key.rpartition(".")[0] in prefixes and key not in shared.fixed[variant]]
    choices = []
    for values in itertools.product(*(grid[key] for key in keys)):
        settings = shared.settings(variant, tuning.seeds[0], dict(zip(keys, values, strict=True))).flat()
        choices.append(tuple((key, settings[key]) for key in keys))
    return distinct(choices)


def _drawn(grid: Sequence[Choice], number: int, seed: int, variant: str) -> list[Choice]:
    """So many configurations, in the grid's order, drawn from the seed where there are more."""
    order = numpy_generator(seed, "tuning", variant).permutation(len(grid))[:number]
    return [grid[index] for index in sorted(order)]


def _plan(shared: SharedSettings, variant: str, choice: Choice, share: float, seed: int, folder: Path) -> PlannedRun:
    words = [f"{key}={value}".replace("/", "_") for key, value in choice]
    place = folder / ",".join([variant, *words, f"seed={seed}"])
    return shared.plan(variant, seed, place, {**dict(choice), "validation": share, "report": False})


def _tried(choice: Choice, runs: Sequence[PlannedRun], failed: Mapping[str, str]) -> Tried:
    by_seed, reasons = {}, {}
    for run in runs:
        if run.name in failed:
            reasons[run.seed] = failed[run.name]
            continue
        accuracy = ((read_run(run.folder).summary or {}).get("validation_accuracy") or {}).get("weighted")
        if accuracy is None:
            reasons[run.seed] = "there is no validation accuracy"
        else:
            by_seed[run.seed] = float(accuracy)
    return Tried(choice, by_seed, reasons)


def _record(tuned: Tuned) -> dict[str, Any]:
    return {
        "grid": tuned.grid,
        "chosen": dict(tuned.best.choice),
        "validation_accuracy": tuned.best.accuracy,
        "tried": [
            {
                "settings": dict(tried.choice),
                "validation_accuracy": tried.accuracy,
                "by_seed": dict(tried.by_seed),
                "failed": dict(tried.failed),
            }
            for tried in tuned.tried
        ],
    }


def _rows(tuning: Tuning, results: Mapping[str, Tuned]) -> Iterator[Sequence[object]]:
    """A heading, and a row for each configuration of each variant."""
    keys = distinct(name.rpartition(":")[2] for name in tuning.grid)
    yield ["method", *keys, *(f"seed {seed}" for seed in tuning.seeds), "validation_accuracy", "chosen"]
    for each in results.values():
        for tried in each.tried:
            values = [dict(tried.choice).get(key) for key in keys]
            accuracies = [tried.by_seed.get(seed) for seed in tuning.seeds]
            yield [each.variant, *values, *accuracies, tried.accuracy, tried is each.best]
