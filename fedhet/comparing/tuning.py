"""Tuning: chooses every variant's settings on validation parts, with seeds that are not reported.

All configurations run with the tuning seeds. A best value at the edge of its list widens the list, at most `WIDENED`
times. Then those that are not clearly worse than the best go on with further seeds, half of them each time (successive
halving; Jamieson and Talwalkar, AISTATS 2016), at most `HALVINGS` times, the others are dropped. The highest mean is
chosen; configurations with as many seeds of which it is not clear are ties. Nothing reads the results on test parts.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhet.comparing.runs import Execution, check, why_incomplete
from fedhet.comparing.search import Choice, Search, Tried, record, rows
from fedhet.comparing.settings import SAME_FOR_ALL, PlannedRun, SharedSettings, distinct
from fedhet.errors import ConfigError, FedhetError
from fedhet.files import write_csv, write_text
from fedhet.options import Value
from fedhet.randomness import numpy_generator
from fedhet.results.history import read_run, showing

SEEDS = (1000, 1001, 1002)
SHARE = 0.2
"""Of the training examples: validation, in tuning runs with no other share set."""

WHOLE: dict[str, Value] = {"validation": 0.0, "validation-on": "own"}
"""Reported runs train on whole training parts."""

WIDENED, HALVINGS = 2, 2
RATE = "learning-rate"

_NOT_TUNED = SAME_FOR_ALL | {"architectures", "assign"}


@dataclass(frozen=True)
class Tuning:
    """The configurations to try.

    Attributes:
        grid: values by key, of keys that all methods share or that are a method's own (`fedhenn.eta0`); under
            `NAME:KEY` those that one variant tries instead of the others'.
        seeds: each configuration runs once with each.
        runs: configurations that a variant tries, with further learning rates where its grid is smaller; None: as many
            as the largest grid has.
    """

    grid: Mapping[str, Sequence[Value]]
    seeds: Sequence[int] = SEEDS
    runs: int | None = None


@dataclass(frozen=True)
class Tuner:
    """Runs configurations in a folder with the `held_out` settings, by which validation parts are set apart."""

    tuning: Tuning
    shared: SharedSettings
    held_out: Mapping[str, Value]
    folder: Path
    execute: Execution

    def run(self, asked: Sequence[Tried], seeds: Sequence[int]) -> None:
        """Run configurations with further seeds, and note their accuracies; nothing of runs that had no time."""
        planned = [(tried, seed, self.plan(tried, seed, self.held_out)) for tried in asked for seed in seeds]
        runs = [run for _, _, run in planned]
        check(runs, self.shared.supplied)
        failed = self.execute(runs)
        for tried, seed, run in planned:
            reason = failed.get(run.name)
            if reason is None and why_incomplete(run) is not None:
                continue
            with showing(run.folder):
                tried.note(seed, None if reason else read_run(run.folder), reason)

    def plan(self, tried: Tried, seed: int, settings: Mapping[str, Value]) -> PlannedRun:
        """The run of a configuration, with further settings."""
        words = [f"{key}={value}".replace("/", "_") for key, value in tried.choice.items()]
        place = self.folder / ",".join([tried.variant, *words, f"seed={seed}"])
        return self.shared.plan(tried.variant, seed, place, {**tried.choice, **settings})

    def widen(self, searches: Sequence[Search]) -> None:
        """Try values beyond the edges at which the best configurations lie; note the edges that remain."""
        for attempt in range(WIDENED + 1):
            beyond = {search.variant: list(self._beyond(search)) for search in searches}
            for search in searches:
                search.edges = distinct(key for key, _ in beyond[search.variant])
            if attempt == WIDENED or not any(beyond.values()):
                return
            self.execute.tell("the best value is the last of its list: trying further ones")
            for search in searches:
                search.tried += [tried for _, tried in beyond[search.variant]]
            self.run([tried for each in beyond.values() for _, tried in each], self.tuning.seeds)

    def _beyond(self, search: Search) -> Iterator[tuple[str, Tried]]:
        """Each key whose best value is the lowest or highest tried, and the best choice with a value beyond it.

        A value with the very same accuracy counts as well: of rates that all end at chance the lowest and the highest.
        """
        best = search.best.choice
        texts = {key: value for key, value in best.items() if isinstance(value, str)}
        comparable = [each for each in search.tried if texts.items() <= each.choice.items()]
        level = [each.choice for each in (search.best, *search.ties) if each.accuracy == search.best.accuracy]
        for key in best:
            numbers = [each.choice[key] for each in comparable if isinstance(each.choice[key], int | float)]
            values = sorted({number for number in numbers if not isinstance(number, bool)})
            for value in [choice[key] for choice in level if choice == {**best, key: choice[key]}]:
                if len(values) < 2 or value == 0 or value not in (values[0], values[-1]):
                    continue
                further = _further(*(values[1::-1] if value == values[0] else values[-2:]))
                choice = {**best, key: further}
                try:
                    self.shared.settings(search.variant, self.tuning.seeds[0], choice)
                except ConfigError:  # the key's own range ends here
                    continue
                if all(each.choice != choice for each in search.tried):
                    yield key, Tried(search.variant, choice)

    def halve(self, searches: Sequence[Search], reported: Sequence[int]) -> None:
        """Give the better half of the configurations that are not clearly worse than the best further seeds."""
        used = [*self.tuning.seeds, *reported]
        for _ in range(HALVINGS):
            seeds = [max(used) + 1 + number for number in range(len(self.tuning.seeds))]
            asked: list[Tried] = []
            for search in searches:
                if ties := search.ties:
                    asked += [search.best, *ties][: max(2, math.ceil((1 + len(ties)) / 2))]
            if not asked:
                return
            self.execute.tell(f"{len(asked)} configurations are not clear of each other: seeds {seeds[0]} and on")
            self.run(asked, seeds)
            used += seeds


def tune(
    tuning: Tuning, shared: SharedSettings, *, reported: Sequence[int], out: Path, execute: Execution
) -> tuple[dict[str, Search], dict[str, str]]:
    """Run every variant's configurations in `out/tuning`, and write `tuning.json` and `tuning.csv` into `out`.

    Returns the outcome by variant; and of variants without a configuration that completed with all seeds, why.

    Raises:
        ConfigError: settings that cannot be tuned so; nothing was started.
        FedhetError: no configuration of any variant completed.
    """
    check_tuning(tuning, shared, reported)
    tuner = Tuner(tuning, shared, held_out(shared), out / "tuning", execute)
    grids = {variant: _grid(tuning, shared, variant) for variant in shared.own}
    largest = max(map(len, grids.values()))
    number = min(tuning.runs or largest, largest)
    searches = []
    for variant, grid in grids.items():
        order = numpy_generator(tuning.seeds[0], "tuning", variant).permutation(len(grid))[:number]
        choices = _filled([grid[index] for index in sorted(order)], number)
        searches.append(Search(variant, len(grid), [Tried(variant, choice) for choice in choices]))
    counts = ", ".join(f"{len(each.tried)} for {each.variant}" for each in searches)
    execute.tell(f"tuning with seeds {', '.join(map(str, tuning.seeds))}: configurations {counts}")
    tuner.run([tried for search in searches for tried in search.tried], tuning.seeds)
    without = {each.variant: each.reasons for each in searches if not each.completed}
    if len(without) == len(searches):
        raise FedhetError("\n".join(without.values()))
    searches = [each for each in searches if each.completed]
    tuner.widen(searches)
    tuner.halve(searches, reported)
    outcome = {
        "note": validation_note(shared),
        "seeds": list(tuning.seeds),
        "validation": tuner.held_out["validation"],
        "validation-on": tuner.held_out["validation-on"],
        "methods": {each.variant: record(each) for each in searches},
        "failed": without,
    }
    write_text(out / "tuning.json", json.dumps(outcome, indent=2) + "\n")
    write_csv(out / "tuning.csv", rows(searches))
    for each in searches:
        execute.tell(f"chosen for {each.text}")
    return {each.variant: each for each in searches}, without


def held_out(shared: SharedSettings) -> dict[str, Value]:
    """The settings by which tuning runs set validation parts apart.

    Where the table reports the common test set, they are images with its labels, if there are any.
    """
    common = shared.for_all["test-on"] == "global" and shared.supplied.data is None
    return {
        "validation": float(shared.for_all["validation"]) or SHARE,
        "validation-on": "common" if common else shared.for_all["validation-on"],
        "report": False,
    }


def validation_note(shared: SharedSettings) -> str:
    """Say that validation parts have other labels than the test set that the table reports; empty if they do not."""
    if shared.for_all["test-on"] != "global" or shared.supplied.data is None:
        return ""
    return (
        "Tuning measured validation parts of each client's own examples; the table reports the common test set "
        "(test-on = global), whose labels other settings may suit better. Data of one's own have no images held out "
        "for all: return a `validation` part with the labels of the common test set."
    )


def check_tuning(tuning: Tuning, shared: SharedSettings, reported: Sequence[int]) -> None:
    """Check that the settings can be tuned so; a ConfigError with every problem."""
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
    """Return a variant's grid of configurations, each once, for keys that it does not set itself."""
    prefixes = ("", shared.settings(variant, tuning.seeds[0]).family)
    grid = {name: values for name, values in tuning.grid.items() if ":" not in name}
    prefix = f"{variant}:"
    grid |= {name.removeprefix(prefix): values for name, values in tuning.grid.items() if name.startswith(prefix)}
    keys = [key for key in grid if key.rpartition(".")[0] in prefixes and key not in shared.fixed[variant]]
    choices = []
    for values in itertools.product(*(grid[key] for key in keys)):
        settings = shared.settings(variant, tuning.seeds[0], dict(zip(keys, values, strict=True))).flat()
        choices.append({key: settings[key] for key in keys})
    effective = [key for key in keys if len({each[key] for each in choices}) >= min(len({*grid[key]}), 2)]
    return different({key: each[key] for key in effective} for each in choices)


def different(choices: Iterable[Choice], number: float = math.inf) -> list[Choice]:
    """Return the first `number` different choices, in their order."""
    kept: list[Choice] = []
    for choice in choices:
        if len(kept) >= number:
            break
        if choice not in kept:
            kept.append(choice)
    return kept


def _filled(choices: list[Choice], number: int) -> list[Choice]:
    """The choices, and further learning rates with each of their other settings until they are `number`."""
    rates = sorted({float(each[RATE]) for each in choices if RATE in each})
    if not rates or rates[0] <= 0:
        return choices
    further = (choice | {RATE: float(f"{rate:.3g}")} for rate in _refined(rates) for choice in choices)
    return different(itertools.chain(choices, further), number)


def _refined(rates: list[float]) -> Iterator[float]:
    """Further values without end: halfway between neighbours by ratio, one beyond each end, and so on."""
    while True:
        between = [math.sqrt(low * high) for low, high in itertools.pairwise(rates)]
        ratio = rates[1] / rates[0] if len(rates) > 1 else 3.0
        further = [*between, rates[0] / ratio, rates[-1] * ratio]
        yield from further
        rates = sorted([*rates, *further])


def _further(inner: Value, edge: Value) -> Value:
    """A number as far beyond the edge of a list as its neighbour lies before it: by ratio, by difference from 0."""
    low, high = float(inner), float(edge)
    beyond = high * high / low if low > 0 and high > 0 else 2 * high - low
    return round(beyond) if isinstance(inner, int) and isinstance(edge, int) else float(f"{beyond:.3g}")
