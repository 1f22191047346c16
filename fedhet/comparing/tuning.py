"""The choice of each method's settings on validation examples, with other seeds than in the comparison.

All methods try equally many configurations with all tuning seeds. That with the best mean validation accuracy is used.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedhet.comparing.runs import Execution, check
from fedhet.comparing.settings import OPTIMISER, SAME_FOR_ALL, Choice, PlannedRun, SharedSettings, distinct
from fedhet.errors import ConfigError, FedhetError, check_kind, check_kinds, check_list
from fedhet.methods.options import Value
from fedhet.results.history import RunFiles, read_run, showing
from fedhet.tasks import direction, worst
from fedhet.utils.files import csv_lines, write_text
from fedhet.utils.randomness import numpy_generator
from fedhet.utils.statistics import Metric, over_same_clients

WHOLE: dict[str, Value] = {"validation": 0.0, "validation-on": "own"}
"""Settings of the runs after tuning, which train on all training examples, without a validation part."""

RATE = "learning-rate"

_NOT_TUNED = SAME_FOR_ALL | {"architectures", "assign"}


@dataclass(frozen=True)
class Tuning:
    """The configurations that `compare` tries, to choose each method's settings.

    Attributes:
        grid: the values to try for each key, such as `learning-rate` or a method's `fedhenn.eta0`; `NAME:KEY` is for
            the method NAME only. A configuration has one value for each key.
        seeds: seeds of tuning; each configuration runs once with each seed.
        runs: number of configurations per method; default: the largest grid's. Smaller grids get more learning rates.
    """

    grid: Mapping[str, Sequence[Value]]
    seeds: Sequence[int] = (1000, 1001, 1002)
    runs: int | None = None

    def __post_init__(self) -> None:
        check_kind("grid", self.grid, (Mapping,))
        check_kinds(runs=(self.runs, (int,)))
        check_list("seeds", self.seeds, int, "[1000, 1001]")
        for key, values in self.grid.items():
            check_list(f"grid: {key}", values, object, "[0.1, 0.2]")


@dataclass
class Trial:
    """A configuration (`choice`) that tuning tries, with its validation accuracy or reason of failure for each seed.

    `runs` has a run for each seed.
    """

    choice: Choice
    by_seed: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    runs: Sequence[PlannedRun] = ()

    @property
    def accuracy(self) -> float | None:
        """The mean validation accuracy over seeds, or None if a run failed."""
        return None if self.failed else statistics.fmean(self.by_seed.values())


@dataclass
class Search:
    """A variant's trials; `grid` is the size of its grid, and `idle` has the reason for each key without effect.

    `metric` is the name of the metric that chooses, and `usual` has the values of tuned keys that the method has
    without tuning, in place of those for all methods.
    """

    variant: str
    grid: int
    tried: list[Trial]
    idle: Mapping[str, str]
    metric: str = "accuracy"
    usual: Choice = field(default_factory=dict)

    @property
    def runs(self) -> list[PlannedRun]:
        """The runs of all trials."""
        return [run for trial in self.tried for run in trial.runs]

    @property
    def best(self) -> Trial | None:
        """The first trial with the best mean accuracy, or None if no configuration completed with all seeds."""
        completed = [trial for trial in self.tried if trial.accuracy is not None]
        return max(completed, key=lambda trial: direction(self.metric) * (trial.accuracy or 0.0), default=None)

    @property
    def text(self) -> str:
        """A description of the best configuration, or the reasons why no configuration completed."""
        if (best := self.best) is None:
            reasons = dict.fromkeys(reason for tried in self.tried for reason in tried.failed.values())
            return f"no configuration of {self.variant} completed with all tuning seeds: {'; '.join(reasons)}"
        more = len(self.tried) - self.grid
        tried = f"{len(self.tried)} tried" + (f", {more} beyond its grid" if more > 0 else f" of {self.grid}")
        chosen = ", ".join(f"{key} = {value}" for key, value in best.choice.items()) or "nothing to choose"
        words = [f"{self.variant}: {chosen} (validation {best.accuracy:.3f}, {tried})"]
        for key, value in best.choice.items():
            numbers = {v for trial in self.tried if isinstance(v := trial.choice[key], int | float)}
            if not isinstance(value, bool | str) and len(numbers) > 1 and value in (min(numbers), max(numbers)):
                words.append(f"{key} at the edge of the values tried")
            if self.usual.get(key, value) not in (trial.choice[key] for trial in self.tried):
                words.append(f"its usual {self.usual[key]} was not tried: set a grid of its own, {self.variant}:{key}")
        return "; ".join([*words, *(why.partition(": ")[0] for why in self.idle.values())])


def rows(searches: Sequence[Search]) -> Iterator[Sequence[object]]:
    """Yield the rows of `tuning.csv`: headings, and a row for each configuration of each method."""
    keys = distinct(key for each in searches for tried in each.tried for key in tried.choice)
    seeds = sorted({seed for each in searches for tried in each.tried for seed in tried.by_seed})
    scored = [search for search in searches if any(trial.by_seed for trial in search.tried)]
    metric = "/".join(sorted({search.metric for search in scored or searches}))
    yield ["method", *keys, *(f"seed {seed}" for seed in seeds), f"validation_{metric}", "result"]
    for search in searches:
        for tried in search.tried:
            values = [tried.choice.get(key) for key in keys]
            accuracies = [tried.by_seed.get(seed) for seed in seeds]
            result = "chosen" if tried is search.best else "; ".join(dict.fromkeys(tried.failed.values()))
            yield [search.variant, *values, *accuracies, tried.accuracy, result]


def tune(searches: Sequence[Search], out: Path, execute: Execution) -> None:
    """Carry out the runs of `searches` (see `planned_trials`), and write a table of the trials to `out/tuning.csv`.

    Raises a FedhetError if no configuration completed.
    """
    numbers = ", ".join(f"{len(each.tried)} for {each.variant}" for each in searches)
    seeds = ", ".join(str(run.seed) for run in searches[0].tried[0].runs)
    execute.tell(f"tuning with seeds {seeds}; configurations to try: {numbers}")
    failed = execute([run for search in searches for run in search.runs])
    for search in searches:
        for of_one_seed in zip(*(trial.runs for trial in search.tried), strict=True):
            with showing(out / "tuning"):
                files = {run.name: read_run(run.folder) for run in of_one_seed if run.name not in failed}
                accuracies = validation_accuracies(files)
            search.metric = next((run.metric for run in files.values()), search.metric)
            for trial, run in zip(search.tried, of_one_seed, strict=True):
                if (accuracy := accuracies.get(run.name)) is None:
                    trial.failed[run.seed] = failed.get(run.name, f"there is no validation {search.metric}")
                else:
                    trial.by_seed[run.seed] = accuracy
    write_text(out / "tuning.csv", csv_lines(rows(searches)))
    if not any(each.best for each in searches):
        raise FedhetError("\n".join(each.text for each in searches))
    for search in searches:
        execute.tell(f"chosen for {search.text}" if search.best else search.text)


def planned_trials(tuning: Tuning, shared: SharedSettings, reported: Sequence[int], out: Path) -> list[Search]:
    """Return a search for each method, with trial runs in `out/tuning`.

    `shared` has the comparison's settings and `reported` its seeds, which tuning must not use. Raises a ConfigError if
    settings cannot be tuned.
    """
    check_tuning(tuning, shared, reported)
    grids = {variant: _grid(tuning, shared, variant) for variant in shared.own}
    largest = max(len(grid) for grid, _ in grids.values())
    number = min(tuning.runs or largest, largest)
    varied = {key for grid, _ in grids.values() for key in grid[0]}
    if vain := [reason for _, idle in grids.values() for key, reason in idle.items() if key not in varied]:
        raise ConfigError("\n".join(distinct(vain)))
    searches = list[Search]()
    for variant, (grid, idle) in grids.items():
        order = numpy_generator(tuning.seeds[0], "tuning", variant).permutation(len(grid))[:number]
        tried = [
            Trial(choice, runs=[trial_run(shared, out / "tuning", variant, choice, seed) for seed in tuning.seeds])
            for choice in _filled([grid[index] for index in sorted(order)], number)
        ]
        usual = {key: value for key, value in shared.own[variant].items() if key in OPTIMISER and key in grid[0]}
        searches.append(Search(variant, len(grid), tried, idle, usual=usual))
    check([run for search in searches for run in search.runs], shared.functions)
    return searches


def trial_run(
    shared: SharedSettings,
    folder: Path,
    variant: str,
    choice: Choice,
    seed: int,
    settings: Mapping[str, Value] | None = None,
) -> PlannedRun:
    """Plan a variant's run with the changed settings `choice`, in a subfolder of `folder` that is named after them.

    `settings` are further changes; by default, they hold out a part of the training examples for validation.
    """
    words = [variant, *(f"{key}={value}".replace("/", "_") for key, value in choice.items()), f"seed={seed}"]
    return shared.plan(variant, seed, folder / ",".join(words), choice | dict(settings or held_out(shared)))


def validation_accuracies(runs: Mapping[str, RunFiles]) -> dict[str, float | None]:
    """Return the runs' validation accuracies, by the same names, over the clients that any of the runs scored.

    A client that a run did not score counts as the metric's worst value. The accuracy is None if it is unknown.
    """
    scores = {name: run.by_client(run.scored, "validation") for name, run in runs.items()}
    metric = next((run.metric for run in runs.values()), "")
    complete = dict(zip(scores, over_same_clients([*scores.values()], worst(metric)), strict=True))
    accuracies = {name: run.accuracy("validation") for name, run in runs.items()}
    for name, accuracy in accuracies.items():
        if accuracy is not None and scores[name] and len(scores[name]) < len(complete[name]):
            accuracies[name] = Metric.total(complete[name].values()).value
    return accuracies


def held_out(shared: SharedSettings) -> dict[str, Value]:
    """Return settings that hold out validation examples, with labels distributed as in the comparison's test set."""
    common = shared.for_all["test-on"] == "global" and shared.functions.data is None
    return {
        "validation": float(shared.for_all["validation"]) or 0.2,  # of the training examples
        "validation-on": "common" if common else shared.for_all["validation-on"],
        "report": False,
    }


def check_tuning(tuning: Tuning, shared: SharedSettings, reported: Sequence[int]) -> None:
    """Raise a `ConfigError` if `tuning` contradicts `shared` or has a seed of the comparison (`reported`)."""
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
            problems.append(f"{name}: {variant} is not among the compared methods: use one of {', '.join(shared.own)}")
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
    """Return the configurations to try for a variant, and the reason for each key of the grid that has no effect."""
    prefixes = ("", shared.settings(variant, tuning.seeds[0]).family)
    grid = {name: values for name, values in tuning.grid.items() if ":" not in name}
    prefix = f"{variant}:"
    grid |= {name.removeprefix(prefix): values for name, values in tuning.grid.items() if name.startswith(prefix)}
    keys = [key for key in grid if key.rpartition(".")[0] in prefixes and key not in shared.fixed[variant]]
    choices = list[Choice]()
    remarks = dict[str, str]()
    for values in itertools.product(*(grid[key] for key in keys)):
        settings = shared.settings(variant, tuning.seeds[0], dict(zip(keys, values, strict=True)))
        choices.append({key: settings.flat()[key] for key in keys})
        remarks |= settings.remarks
    idle = {key: remarks[key] for key in keys if key in remarks and len({choice[key] for choice in choices}) == 1}
    distinct = [{key: choice[key] for key in keys if key not in idle} for choice in choices]
    return [choice for number, choice in enumerate(distinct) if choice not in distinct[:number]], idle


def _filled(choices: list[Choice], number: int) -> list[Choice]:
    """Extend `choices` to at most `number` configurations by learning rates between and beyond the given ones."""
    rates = sorted({float(each[RATE]) for each in choices if RATE in each})
    filled = list(choices)
    while len(filled) < number and rates and rates[0] > 0:
        between = [math.sqrt(low * high) for low, high in itertools.pairwise(rates)]
        ratio = rates[1] / rates[0] if len(rates) > 1 else 3.0
        further = [*between, rates[0] / ratio, rates[-1] * ratio]
        for rate, choice in itertools.product(further, choices):
            each = choice | {RATE: float(f"{rate:.3g}")}
            if each not in filled:
                filled.append(each)
        rates = sorted([*rates, *further])
    return filled[:number]
