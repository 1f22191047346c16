"""Choose every variant's settings on validation examples, with other seeds than in the comparison.

Every variant tries the same number of configurations with all tuning seeds; the one with the highest mean accuracy is
chosen.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedhet.comparing.runs import Execution, check, why_incomplete
from fedhet.comparing.settings import SAME_FOR_ALL, PlannedRun, SharedSettings, distinct
from fedhet.errors import ConfigError, FedhetError
from fedhet.methods.options import Value
from fedhet.results.history import RunFiles, read_run, showing
from fedhet.utils.files import write_csv
from fedhet.utils.randomness import numpy_generator

Choice = dict[str, Value]
"""Keys and values that are tried together."""

SEEDS = (1000, 1001, 1002)
SHARE = 0.2
"""The share of training examples in validation parts, if the settings give none."""

WHOLE: dict[str, Value] = {"validation": 0.0, "validation-on": "own"}
"""Settings of reported runs, which train on whole training parts."""

RATE = "learning-rate"

_NOT_TUNED = SAME_FOR_ALL | {"architectures", "assign"}


@dataclass(frozen=True)
class Tuning:
    """The configurations to try in tuning.

    Attributes:
        grid: the values to try for each key, such as `learning-rate` or a method's `fedhenn.eta0`; `NAME:KEY` is for
            the variant NAME only.
        seeds: seeds of tuning; each configuration runs once with each seed.
        runs: number of configurations for each variant; by default the size of the largest grid. Smaller grids are
            extended by further learning rates.
    """

    grid: Mapping[str, Sequence[Value]]
    seeds: Sequence[int] = SEEDS
    runs: int | None = None


@dataclass
class Trial:
    """A configuration in tuning, with its validation accuracies and failures by seed, and its costs.

    `round_bytes` is the most that one client sent and received in a round, and `seconds` the time of the longest run.
    """

    variant: str
    choice: Choice
    by_seed: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    round_bytes: int = 0
    seconds: float = 0.0

    def note(self, seed: int, run: RunFiles | None, reason: str | None) -> None:
        """Record a run's validation accuracy, bytes and time, or the reason why it has no accuracy."""
        accuracy = run.accuracy("validation") if run else None
        if run is None or accuracy is None:
            self.failed[seed] = reason or "there is no validation accuracy"
            return
        clients, failed = run.measured("validation")  # a client whose evaluation failed counts with 0
        self.by_seed[seed] = accuracy * clients / (clients + len(failed)) if failed else float(accuracy)
        training = {row["round"] for row in run.rows if row["round"] and not row.get("final")}
        sent = (row.bytes_up + row.bytes_down for row in run.clients if row.round in training)
        self.round_bytes = max(self.round_bytes, *sent, 0)
        self.seconds = max(self.seconds, float((run.summary or {}).get("seconds") or 0))

    @property
    def accuracy(self) -> float | None:
        """The mean validation accuracy over seeds; None unless all seeds have an accuracy."""
        return None if self.failed or not self.by_seed else statistics.fmean(self.by_seed.values())

    @property
    def words(self) -> str:
        """The tuned keys and their values as text."""
        return ", ".join(f"{key} = {value}" for key, value in self.choice.items()) or "nothing to choose"


@dataclass
class Search:
    """The tuning of a variant: trials, number of configurations in its grid, and why keys have no effect (`idle`)."""

    variant: str
    grid: int
    tried: list[Trial]
    idle: Mapping[str, str] = field(default_factory=dict)

    @property
    def completed(self) -> list[Trial]:
        """The configurations that completed with all seeds, in order of accuracy."""
        done = [each for each in self.tried if each.accuracy is not None]
        return sorted(done, key=lambda each: -(each.accuracy or 0.0))

    @property
    def best(self) -> Trial:
        """The first configuration with the highest mean accuracy."""
        return self.completed[0]

    @property
    def edges(self) -> list[str]:
        """Keys whose best value is the lowest or the highest value tried."""
        ends = []
        for key, value in self.best.choice.items():
            numbers = {v for each in self.tried if isinstance(v := each.choice[key], int | float)}
            if not isinstance(value, bool | str) and len(numbers) > 1 and value in (min(numbers), max(numbers)):
                ends.append(key)
        return ends

    @property
    def reasons(self) -> str:
        """A message that no configuration completed with all seeds, with the reasons."""
        reasons = dict.fromkeys(reason for tried in self.tried for reason in tried.failed.values())
        return f"no configuration of {self.variant} completed with all tuning seeds: {'; '.join(reasons)}"

    @property
    def text(self) -> str:
        """The best configuration as text, with a remark on keys whose best value is at the edge of the values tried."""
        more = len(self.tried) - min(self.grid, len(self.tried))
        tried = f"{len(self.tried)} tried" + (f", {more} beyond its grid" if more else f" of {self.grid}")
        words = [f"{self.variant}: {self.best.words} (validation {self.best.accuracy:.3f}, {tried})"]
        words += [f"{key} at the edge of the values tried" for key in self.edges]
        return "; ".join([*words, *(why.partition(": ")[0] for why in self.idle.values())])


def rows(searches: Sequence[Search]) -> Iterator[Sequence[object]]:
    """Yield the rows of `tuning.csv`: headings, and a row for each configuration of each variant."""
    keys = distinct(key for each in searches for tried in each.tried for key in tried.choice)
    seeds = sorted({seed for each in searches for tried in each.tried for seed in tried.by_seed})
    yield ["method", *keys, *(f"seed {seed}" for seed in seeds), "validation_accuracy", "result"]
    for search in searches:
        best = search.best if search.completed else None
        for tried in search.tried:
            values = [tried.choice.get(key) for key in keys]
            accuracies = [tried.by_seed.get(seed) for seed in seeds]
            result = "chosen" if tried is best else "; ".join(dict.fromkeys(tried.failed.values()))
            yield [search.variant, *values, *accuracies, tried.accuracy, result]


@dataclass(frozen=True)
class Tuner:
    """Runs configurations in a folder; the settings `held_out` hold out validation examples."""

    shared: SharedSettings
    held_out: Mapping[str, Value]
    folder: Path
    execute: Execution

    def run(self, trials: Sequence[Trial], seeds: Sequence[int]) -> None:
        """Run configurations with these seeds and record their outcomes; runs stopped by the deadline are skipped."""
        planned = [(tried, seed, self.plan(tried, seed, self.held_out)) for tried in trials for seed in seeds]
        runs = [run for _, _, run in planned]
        check(runs, self.shared.functions)
        failed = self.execute(runs)
        for tried, seed, run in planned:
            reason = failed.get(run.name)
            if reason is None and why_incomplete(run) is not None:
                continue
            with showing(run.folder):
                tried.note(seed, None if reason else read_run(run.folder), reason)

    def plan(self, tried: Trial, seed: int, settings: Mapping[str, Value]) -> PlannedRun:
        """Return the planned run of a configuration with one seed and the changed `settings`."""
        words = [f"{key}={value}".replace("/", "_") for key, value in tried.choice.items()]
        place = self.folder / ",".join([tried.variant, *words, f"seed={seed}"])
        return self.shared.plan(tried.variant, seed, place, {**tried.choice, **settings})


def tune(
    tuning: Tuning, shared: SharedSettings, *, reported: Sequence[int], out: Path, execute: Execution
) -> tuple[dict[str, Search], dict[str, str]]:
    """Run every variant's configurations in `out/tuning`, and write `tuning.csv` into `out`.

    Returns the searches by variant, and why other variants have none: no configuration completed with all seeds.
    Raises a ConfigError if settings cannot be tuned, and a FedhetError if no variant completed.
    """
    check_tuning(tuning, shared, reported)
    tuner = Tuner(shared, held_out(shared), out / "tuning", execute)
    grids = {variant: _grid(tuning, shared, variant) for variant in shared.own}
    largest = max(len(grid) for grid, _ in grids.values())
    number = min(tuning.runs or largest, largest)
    varied = {key for grid, _ in grids.values() for key in grid[0]}
    if vain := [why for _, idle in grids.values() for key, why in idle.items() if key not in varied]:
        raise ConfigError("\n".join(distinct(vain)))
    searches = []
    for variant, (grid, idle) in grids.items():
        order = numpy_generator(tuning.seeds[0], "tuning", variant).permutation(len(grid))[:number]
        choices = _filled([grid[index] for index in sorted(order)], number)
        searches.append(Search(variant, len(grid), [Trial(variant, choice) for choice in choices], idle))
    counts = ", ".join(f"{len(each.tried)} for {each.variant}" for each in searches)
    execute.tell(f"tuning with seeds {', '.join(map(str, tuning.seeds))}: configurations {counts}")
    tuner.run([tried for search in searches for tried in search.tried], tuning.seeds)
    write_csv(out / "tuning.csv", rows(searches))
    without = {each.variant: each.reasons for each in searches if not each.completed}
    if len(without) == len(searches):
        raise FedhetError("\n".join(without.values()))
    searches = [each for each in searches if each.completed]
    for each in searches:
        execute.tell(f"chosen for {each.text}")
    return {each.variant: each for each in searches}, without


def held_out(shared: SharedSettings) -> dict[str, Value]:
    """Return settings that hold out validation examples whose labels are distributed as in the reported test set."""
    common = shared.for_all["test-on"] == "global" and shared.functions.data is None
    return {
        "validation": float(shared.for_all["validation"]) or SHARE,
        "validation-on": "common" if common else shared.for_all["validation-on"],
        "report": False,
    }


def validation_note(shared: SharedSettings) -> str:
    """Return a warning if validation parts and the reported test set differ in their labels, or an empty string."""
    if shared.for_all["test-on"] != "global" or shared.functions.data is None:
        return ""
    return (
        "Tuning measured validation parts of each client's own examples, but the table reports the common test set "
        "(test-on = global), which has other labels: return a `validation` part with the labels of that test set."
    )


def check_tuning(tuning: Tuning, shared: SharedSettings, reported: Sequence[int]) -> None:
    """Raise a `ConfigError` with all reasons why the settings cannot be tuned."""
    problems = []
    if not tuning.seeds:
        problems.append("tuning needs at least one seed that is not a seed of the comparison: set its seeds")
    if both := sorted(set(tuning.seeds) & set(reported)):
        problems.append(f"seeds {both} are used for tuning and reported: choose other tuning seeds")
    prefixes = {shared.settings(variant, 0).family for variant in shared.own}
    for name, values in tuning.grid.items():
        variant, _, key = name.rpartition(":")
        prefix = key.rpartition(".")[0]
        if variant and variant not in shared.own:
            problems.append(f"{name}: {variant} is not among the variants compared ({', '.join(shared.own)})")
        elif variant and key in shared.fixed[variant]:
            problems.append(f"{name}: the variant {variant} sets {key} itself, so leave it out of the grid")
        if key in _NOT_TUNED:
            problems.append(f"{key} is equal for all methods and cannot be tuned, so leave it out of the grid")
        if prefix and prefix not in prefixes:
            problems.append(f"{key}: {prefix} is not among the methods compared, so leave the key out of the grid")
        if not values:
            problems.append(f"{key}: the grid has no values to try, so add some")
    if problems:
        raise ConfigError("\n".join(problems))


def _grid(tuning: Tuning, shared: SharedSettings, variant: str) -> tuple[list[Choice], dict[str, str]]:
    """Return a variant's configurations of keys that have an effect, and the reasons why other keys have none."""
    prefixes = ("", shared.settings(variant, tuning.seeds[0]).family)
    grid = {name: values for name, values in tuning.grid.items() if ":" not in name}
    prefix = f"{variant}:"
    grid |= {name.removeprefix(prefix): values for name, values in tuning.grid.items() if name.startswith(prefix)}
    keys = [key for key in grid if key.rpartition(".")[0] in prefixes and key not in shared.fixed[variant]]
    choices, remarks = list[Choice](), dict[str, str]()
    for values in itertools.product(*(grid[key] for key in keys)):
        settings = shared.settings(variant, tuning.seeds[0], dict(zip(keys, values, strict=True)))
        choices.append({key: settings.flat()[key] for key in keys})
        remarks |= settings.remarks
    idle = {key: remarks[key] for key in keys if key in remarks and len({each[key] for each in choices}) == 1}
    found = [{key: each[key] for key in keys if key not in idle} for each in choices]
    return [each for number, each in enumerate(found) if each not in found[:number]], idle


def _filled(choices: list[Choice], number: int) -> list[Choice]:
    """Return the choices, extended to `number` choices by further learning rates."""
    rates = sorted({float(each[RATE]) for each in choices if RATE in each})
    if not rates or rates[0] <= 0:
        return choices
    filled = list(choices)
    for rate in _refined(rates):
        for choice in choices:
            further = choice | {RATE: float(f"{rate:.3g}")}
            if len(filled) < number and further not in filled:
                filled.append(further)
        if len(filled) >= number:
            break
    return filled


def _refined(rates: list[float]) -> Iterator[float]:
    """Yield an endless sequence of further learning rates: between neighbours and beyond both ends, repeatedly."""
    while True:
        between = [math.sqrt(low * high) for low, high in itertools.pairwise(rates)]
        ratio = rates[1] / rates[0] if len(rates) > 1 else 3.0
        further = [*between, rates[0] / ratio, rates[-1] * ratio]
        yield from further
        rates = sorted([*rates, *further])
