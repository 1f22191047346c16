"""Tuning: every method's settings are chosen on validation parts, with seeds of which nothing is reported.

Test parts are evaluated in tuning runs as in all others, and nothing reads what came of that.
"""

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet.comparing import cases
from fedhet.comparing.arms import GIVEN
from fedhet.comparing.cases import Case
from fedhet.comparing.execution import Execution
from fedhet.comparing.ground import Ground, distinct
from fedhet.config import Value
from fedhet.errors import ConfigError, FedhetError
from fedhet.files import write_csv, write_text
from fedhet.randomness import numpy_generator
from fedhet.results.run_files import read_run

SEEDS = (1000, 1001, 1002)
SHARE = 0.2
"""Of the training examples: validation, in tuning runs that are told no other share."""

_GIVEN = GIVEN | {"architectures", "assign"}

Choice = tuple[tuple[str, Value], ...]
"""Keys and values that are tried together."""


@dataclass(frozen=True)
class Tuning:
    """What is tried.

    Attributes:
        grid: values by key, of keys that all methods share or that are a method's own (`fedhenn.eta0`); under
            `ARM:KEY` those that one arm tries instead of the others'.
        seeds: each configuration runs once with each.
        runs: configurations that a method may try; None: as many for each as the smallest grid with a choice has.
    """

    grid: Mapping[str, Sequence[Value]]
    seeds: Sequence[int] = SEEDS
    runs: int | None = None


@dataclass(frozen=True)
class Tried:
    """A configuration of a method: its validation accuracy by seed, pooled over clients, or why there is none."""

    choice: Choice
    by_seed: Mapping[int, float]
    failed: Mapping[int, str]

    @property
    def accuracy(self) -> float | None:
        """The mean over tuning seeds; None unless all of them came to one."""
        return None if self.failed else statistics.fmean(self.by_seed.values())


@dataclass(frozen=True)
class Tuned:
    """What an arm's tuning came to: how many configurations its grid holds, those tried, and the best of these."""

    arm: str
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
        return f"{self.arm}: {chosen} (validation {self.best.accuracy:.3f}, {len(self.tried)} of {self.grid} tried)"


def tune(tuning: Tuning, ground: Ground, *, reported: Sequence[int], out: Path, execute: Execution) -> dict[str, Tuned]:
    """Run every method's configurations in `out/tuning`, and write `tuning.json` and `tuning.csv` into `out`.

    Args:
        tuning: what is tried.
        ground: the comparison's settings.
        reported: the seeds of the comparison's own runs.
        out: the comparison's folder.
        execute: carries runs out.

    Returns:
        What came of it, by arm.

    Raises:
        ConfigError: settings that cannot be tuned so; nothing was started.
        FedhetError: no configuration of a method completed with all seeds; the same command tries again.
    """
    _check(tuning, ground, reported)
    grids = {arm: _grid(tuning, ground, arm) for arm in ground.own}
    number = tuning.runs or min((len(grid) for grid in grids.values() if len(grid) > 1), default=1)
    drawn = {arm: _drawn(grid, number, tuning.seeds[0], arm) for arm, grid in grids.items()}
    planned = {
        (arm, choice): [_case(ground, arm, choice, seed, out / "tuning") for seed in tuning.seeds]
        for arm, choices in drawn.items()
        for choice in choices
    }
    cases.check(case for group in planned.values() for case in group)
    counts = ", ".join(f"{len(drawn[arm])} of {len(grid)} for {arm}" for arm, grid in grids.items())
    execute.tell(f"tuning with seeds {', '.join(map(str, tuning.seeds))}: configurations {counts}")
    failed = execute([case for group in planned.values() for case in group])
    results = {
        arm: Tuned(
            arm,
            len(grids[arm]),
            [_tried(choice, planned[arm, choice], failed) for choice in choices],
        )
        for arm, choices in drawn.items()
    }
    without = [arm for arm, each in results.items() if all(tried.accuracy is None for tried in each.tried)]
    if without:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        raise FedhetError(f"no configuration of {', '.join(without)} completed with all tuning seeds:\n{reasons}")
    write_text(out / "tuning.json", json.dumps(_record(tuning, ground, results), indent=2) + "\n")
    write_csv(out / "tuning.csv", _rows(tuning, results))
    for each in results.values():
        execute.tell(f"chosen for {each.text}")
    return results


def share_of(ground: Ground) -> float:
    """The validation part of tuning runs."""
    return float(ground.for_all["validation"]) or SHARE


def _check(tuning: Tuning, ground: Ground, reported: Sequence[int]) -> None:
    problems = []
    if not tuning.seeds:
        problems.append("tuning needs at least one seed of its own")
    if both := sorted(set(tuning.seeds) & set(reported)):
        problems.append(f"seeds {both} are tuned with and reported: what is reported must not have been tuned on")
    if ground.for_all["early-stopping"]:
        problems.append("early-stopping: tuned methods are refitted on whole training parts, without validation")
    names = {ground.settings(arm, 0, {}).prefix for arm in ground.own}
    for name, values in tuning.grid.items():
        arm, _, key = name.rpartition(":")
        prefix = key.rpartition(".")[0]
        if arm and arm not in ground.own:
            problems.append(f"{name}: {arm} is not among the arms compared ({', '.join(ground.own)})")
        elif arm and key in ground.fixed[arm]:
            problems.append(f"{name}: {arm} sets {key} itself")
        if key in _GIVEN:
            problems.append(f"{key} is the same for all methods of a comparison and cannot be tuned")
        if prefix and prefix not in names:
            problems.append(f"{key}: {prefix} is not among the methods compared")
        if not values:
            problems.append(f"{key}: there are no values to try")
    if problems:
        raise ConfigError("\n".join(problems))


def _grid(tuning: Tuning, ground: Ground, arm: str) -> list[Choice]:
    """An arm's configurations of keys that it does not set itself, those left out that come to the same."""
    prefixes = ("", ground.settings(arm, tuning.seeds[0], {}).prefix)
    own = {name.rpartition(":")[2]: values for name, values in tuning.grid.items() if name.rpartition(":")[0] == arm}
    grid = {name: values for name, values in tuning.grid.items() if ":" not in name} | own
    keys = [key for key in grid if key.rpartition(".")[0] in prefixes and key not in ground.fixed[arm]]
    choices = []
    for values in itertools.product(*(grid[key] for key in keys)):
        settings = ground.settings(arm, tuning.seeds[0], dict(zip(keys, values, strict=True))).flat()
        choices.append(tuple((key, settings[key]) for key in keys))
    return distinct(choices)


def _drawn(grid: Sequence[Choice], number: int, seed: int, arm: str) -> list[Choice]:
    """So many configurations, in the grid's order, drawn from the seed where there are more."""
    order = numpy_generator(seed, "tuning", arm).permutation(len(grid))[:number]
    return [grid[index] for index in sorted(order)]


def _case(ground: Ground, arm: str, choice: Choice, seed: int, folder: Path) -> Case:
    settings = ground.settings(arm, seed, {**dict(choice), "validation": share_of(ground), "report": False})
    words = [f"{key}={value}".replace("/", "_") for key, value in choice]
    return ground.case(arm, seed, settings, folder / ",".join([arm, *words, f"seed={seed}"]))


def _tried(choice: Choice, group: Sequence[Case], failed: Mapping[str, str]) -> Tried:
    by_seed, reasons = {}, {}
    for case in group:
        if case.name in failed:
            reasons[case.seed] = failed[case.name]
            continue
        accuracy = ((read_run(case.folder).summary or {}).get("validation_accuracy") or {}).get("weighted")
        if accuracy is None:
            reasons[case.seed] = "there is no validation accuracy"
        else:
            by_seed[case.seed] = float(accuracy)
    return Tried(choice, by_seed, reasons)


def _record(tuning: Tuning, ground: Ground, results: Mapping[str, Tuned]) -> dict[str, Any]:
    return {
        "seeds": list(tuning.seeds),
        "validation": share_of(ground),
        "methods": {
            each.arm: {
                "grid": each.grid,
                "chosen": dict(each.best.choice),
                "validation_accuracy": each.best.accuracy,
                "tried": [
                    {
                        "settings": dict(tried.choice),
                        "validation_accuracy": tried.accuracy,
                        "by_seed": dict(tried.by_seed),
                        "failed": dict(tried.failed),
                    }
                    for tried in each.tried
                ],
            }
            for each in results.values()
        },
    }


def _rows(tuning: Tuning, results: Mapping[str, Tuned]) -> Iterator[Sequence[object]]:
    """A heading, and a row for each configuration of each method."""
    keys = list(dict.fromkeys(name.rpartition(":")[2] for name in tuning.grid))
    yield ["method", *keys, *(f"seed {seed}" for seed in tuning.seeds), "validation_accuracy", "chosen"]
    for each in results.values():
        for tried in each.tried:
            values = [dict(tried.choice).get(key) for key in keys]
            accuracies = [tried.by_seed.get(seed) for seed in tuning.seeds]
            yield [each.arm, *values, *accuracies, tried.accuracy, tried is each.best]
