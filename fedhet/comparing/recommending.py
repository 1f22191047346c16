"""Recommend a method for a federation's clients, models and data, within a time budget.

Each method that can train the clients runs once on validation examples. The best methods are then compared with methods
whose clients exchange nothing, such as `local`, on test examples and with other seeds.
"""

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedhet.client.policy import Policy
from fedhet.comparing import Comparison, publish
from fedhet.comparing.measures import CONTROLS, FEWEST, VariantResult, measure
from fedhet.comparing.runs import Execution, check, continued, prepared, why_incomplete
from fedhet.comparing.settings import (
    PLACES,
    Choice,
    PlannedRun,
    SharedSettings,
    config_of,
    distinct,
    shared_settings,
    variants_of,
)
from fedhet.comparing.tables import notes_below, unequal_steps
from fedhet.comparing.tuning import WHOLE, Tuning, check_tuning, held_out, trial_run, validation_accuracies
from fedhet.config.toml import to_toml
from fedhet.config.validation import ineffective
from fedhet.engines.running import shake_hands
from fedhet.errors import ConfigError, FedhetError, check_list
from fedhet.methods import registry
from fedhet.methods.options import Config, Value
from fedhet.results.history import read_run
from fedhet.results.report import Section
from fedhet.results.terminal import TerminalTable, format_bytes, format_seconds, format_value
from fedhet.server.handshake import NOBODY
from fedhet.setup.user_functions import UserFunctions
from fedhet.tasks import worst
from fedhet.utils.files import expanded, write_text
from fedhet.utils.process import alone
from fedhet.utils.statistics import grouped
from fedhet.utils.text import counted

FIRST = ("fedavg", "fedhenn", "fml", "fedproto")  # asked and tried first, if there is no time for all
SEED = 1000  # of handshakes and trials
LONGER = 1.5  # than expected a run of the comparison may take
LATE = "there was no time for it within the budget"
SCORE = "personal_accuracy"
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Recommendation:
    """The recommended `method`, and the comparison from which it was chosen. `folder` has all runs and files.

    `beats_alone`: whether the method is federated and significantly better than local training; `verdict` says it in a
    sentence. `settings` is the content of `recommended.toml`, and `refused` maps each method left out to the reason.
    """

    folder: Path
    method: str
    beats_alone: bool
    verdict: str
    settings: Mapping[str, Value] = field(repr=False)
    refused: Mapping[str, str] = field(repr=False)
    comparison: Comparison = field(repr=False)


@alone()
@continued()
def recommend(
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    model: Any = None,
    data: Any = None,
    task: str | None = None,
    methods: Sequence[str] = (),
    allow: str | None = None,
    max_bytes: str | float | None = None,
    budget: str | float = "30m",
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    out: str | Path | None = None,
    jobs: int | None = None,
    console: Console | None = None,
) -> Recommendation:
    """Find the best method for a federation's clients, and whether it is better than local training.

    If called again with the same settings, it keeps completed runs and has the whole budget again. Raises a ConfigError
    for invalid settings, and a FedhetError if local training fails or exceeds the budget.

    Args:
        config: settings for all methods, as for `fedhet.compare`.
        model: the clients' networks, as for `fedhet.run`.
        data: the clients' data, as for `fedhet.run`.
        task: the task (loss and metric) of the user's data, as for `fedhet.run`.
        methods: federated methods to try; by default all. Local training is always tried.
        allow: kinds of arrays that may leave the clients, such as `"posteriors,prototypes"`; by default all.
        max_bytes: limit for the bytes that a client sends and receives per round in total, such as `"500 KB"`.
        budget: the total time, such as `"30m"`, or in seconds; the first three seeds may exceed it by a quarter.
        seeds: seeds of the comparison; the last ones are left out if the time is not sufficient, and as many follow if
            time is left.
        out: folder for all files; by default `runs/recommend`.
        jobs: number of simultaneous runs, as for `fedhet.compare`.
        console: console for progress and tables; by default standard output.
    """
    began, seconds = time.monotonic(), min(parsed("budget", budget, _SECONDS, "30m"), 1e9)  # the longest possible wait
    most = parsed("max-bytes", max_bytes, _BYTES, "500KB") if max_bytes is not None else math.inf
    check_list("seeds", seeds, int, "[0, 1, 2]")
    given = [variant.method for variant in variants_of(methods)]  # an unknown one is refused before anything else
    wanted = distinct([CONTROLS[0], *(given or FIRST), *CONTROLS, *(given or registry.methods())])
    out = expanded(out or Path("runs") / "recommend")
    functions = UserFunctions(model, data, task)
    base, execute = prepared(config, functions, out, jobs, console)
    execute = replace(execute, deadline=began + max(0.9 * seconds, seconds - 30))  # then the page is written
    if data is None:
        base = {"test-split": "drawn"} | base
        base["public-samples"] = config_of(base, {"method": "local"}).public_samples
    execute.tell(f"checking which of {len(wanted)} methods can train the clients")
    choices, refused = ask(
        wanted, base, functions, allow=allow, deadline=began + seconds / 10, latest=began + seconds / 3
    )
    execute.tell(f"these methods can train the clients: {', '.join(choices) or 'none'}")
    _tell(refused, "tried", execute)
    if "local" not in choices:
        raise FedhetError(f"no method can be recommended, since local training is not possible: {refused['local']}")
    shared = shared_settings(variants_of([*choices]), seeds=[SEED, *seeds], config=base, functions=functions)
    check_tuning(Tuning({}, (SEED,)), shared, seeds)
    search = _Search(shared, out, execute, choices, refused, latest=began + 1.25 * seconds)
    search.shorten(began, seconds)
    search.try_out(most)
    return search.conclude(*search.compare(seeds))


def parsed(name: str, given: str | float, units: Mapping[str, int], example: str) -> float:
    """Return the number in a text such as `30m` times the factor of its unit; errors quote `name` and `example`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)", str(given).strip())
    factors = {unit.lower(): factor for unit, factor in units.items()} | {"": 1}
    if not match or match[2].lower() not in factors or not float(match[1]):
        raise ConfigError(f"{name} = {given}: write a number above 0 and a unit ({', '.join(units)}), as in {example}")
    return float(match[1]) * factors[match[2].lower()]


def ask(
    methods: Iterable[str],
    base: Mapping[str, Any],
    functions: UserFunctions,
    *,
    allow: str | None,
    deadline: float = math.inf,
    latest: float = math.inf,
) -> tuple[dict[str, Choice], dict[str, str]]:
    """Find out which `methods` can train the clients, by a handshake with the clients and without training.

    Returns two dictionaries by method: the settings to change for each suitable method (often none), and the reason why
    each other method is unsuitable. `base` has settings for all methods, `functions` the user's models and data, and
    `allow` the kinds of arrays that may leave the clients, such as `"posteriors,prototypes"` (None allows all). Methods
    without a handshake by the `deadline` (in seconds, as `time.monotonic()`) count as unsuitable if a federated method
    is suitable, and those without one by `latest` if any method is. Raises a ConfigError for invalid settings.
    """
    node_config = {} if allow is None else {"allow": allow}
    Policy.of(node_config, deployed=False)
    shared_settings(variants_of(CONTROLS[:1]), seeds=[SEED], config=base, functions=functions, strict=False)
    choices, refused = dict[str, Choice](), dict[str, str]()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for reference in methods:
            federated = choices.keys() - {*CONTROLS}
            if choices and time.monotonic() > (deadline if federated else latest):
                refused[reference] = "the budget left no time to check whether it can train the clients"
                continue
            try:
                name = registry.method(reference).name
                shared = shared_settings(
                    variants_of([CONTROLS[0], name]), seeds=[SEED], config=base, functions=functions, strict=False
                )
                as_they_are = {key: shared.for_all[key] for key in ("architectures", "assign")}  # and not equal ones
                needs = shared.settings(name, SEED, as_they_are).specs()
                at_need = {key: spec.metadata["at_need"] for key, spec in needs.items()}
                at_need = {key: value for key, value in at_need.items() if value is not None}
                for choice in [{}, at_need] if at_need else [{}]:
                    config = shared.settings(name, SEED, as_they_are | choice)
                    if not (reason := _refusal(config, functions, node_config)):
                        choices[name] = choice
                        refused.pop(name, None)
                        break
                    refused.setdefault(name, reason)
            except Exception as error:  # a method that raises is unsuitable
                refused[reference] = _line(error)
    finally:
        logging.disable(disabled)
    return choices, refused


def _refusal(config: Config, functions: UserFunctions, node_config: Mapping[str, str]) -> str:
    """Return the reason why the method in `config` cannot train all clients, or an empty string if it can."""
    try:
        functions.check(config)
        if not registry.traits(config).serves_clients:
            return "it trains a model of the server only, and recommend compares clients' models: use fedhet compare"
        public = functions.public_dataset(config)
        owned = node_config and {**node_config, "partition": config.partition}  # the owner's choice, as its data are
        strategy = shake_hands(config, functions, None if public is None else public.unlabelled, owned)
    except Exception as error:
        return _line(error)
    return "; ".join(strategy.run.round.lines())


def _line(error: Exception) -> str:
    lines = str(error).removeprefix(NOBODY).replace(":\n", ": ").strip().splitlines()
    return "; ".join(" ".join(line.split()) for line in lines) or type(error).__name__


def _tell(reasons: Mapping[str, str], what: str, execute: Execution) -> None:
    for reason, names in grouped((reason, name) for name, reason in reasons.items()).items():
        execute.tell(f"methods that were not {what}: {', '.join(names)} ({reason})")


@dataclass
class _Search:
    """The search for the best method: trials on validation examples, then a comparison on test examples.

    `choices` has the settings to change for each method that can train the clients, and `refused` the reason why each
    other method is left out. Runs stop at the deadline of `execute`; those with the first `FEWEST` seeds of the
    comparison, which every recommendation needs, stop at `latest` (`time.monotonic()`, in seconds). `shorter` has fewer
    rounds and epochs if the budget requires this, and `accuracies` validation accuracies by method; `direction` is 1 if
    higher ones are better, and -1 if lower ones are.
    """

    shared: SharedSettings
    out: Path
    execute: Execution
    choices: dict[str, Choice]
    refused: dict[str, str]
    latest: float
    shorter: Choice = field(default_factory=dict)
    accuracies: dict[str, float] = field(default_factory=dict)
    direction: int = 1

    def plan(self, name: str, seed: int) -> PlannedRun:
        """Plan a run of a method in the comparison or, if `seed` is `SEED`, a trial scored on validation examples."""
        folder, settings = ("tried", held_out(self.shared)) if seed == SEED else ("compared", WHOLE)
        return trial_run(self.shared, self.out / folder, name, self.choices[name] | self.shorter, seed, settings)

    def run(self, runs: Sequence[PlannedRun], deadline: float) -> dict[str, str]:
        """Carry out runs until `deadline` (as `time.monotonic()`); return why runs were not completed, by name."""
        check(runs, self.shared.functions)
        failed = replace(self.execute, deadline=deadline)(runs)
        return {run.name: failed.get(run.name, LATE) for run in runs if why_incomplete(run) is not None}

    def shorten(self, began: float, budget: float) -> None:
        """Measure the time of a round of the method `local`; choose fewer rounds and epochs if the budget requires it.

        `began` (as `time.monotonic()`) and `budget` are in seconds. Raises a FedhetError if not even two rounds fit.
        """
        whole = self.shared.settings("local", SEED)
        start = time.monotonic()
        rounds, epochs, closing = whole.rounds, whole.local_epochs, whole.closing_epochs
        self.shorter = {"rounds": 1, "local-epochs": min(epochs, 1), **({"closing-epochs": 0} if closing else {})}
        run = self.plan("local", SEED)
        if problem := self.run([run], max(self.execute.deadline, start + 60)).get(run.name):
            raise FedhetError(f"no method can be recommended, since the method local failed: {problem}")
        now = time.monotonic()
        alone = max(now - start, _seconds(run))  # it may have completed in an earlier call
        rows = read_run(run.folder).rows
        first = next((row["timing"]["seconds"] for row in rows if row["round"] == 1), alone)

        def needed(rounds: int, epochs: int) -> float:
            last = closing if epochs == whole.local_epochs else min(closing, epochs)
            seconds = alone + first * (rounds * max(epochs, 1) + last - 1)
            return (now - began + math.ceil(2 / self.execute.at_once) * (1 + LONGER * FEWEST) * seconds) / 0.9

        few = min(rounds, 2)  # in the second round, clients have something from others
        quarter = max(few, math.ceil(rounds / 4))
        parts = [(number, epochs) for number in range(rounds, quarter - 1, -1)]
        parts += [(number, min(epochs, 1)) for number in range(quarter, few - 1, -1)]
        enough = next((part for part in parts if needed(*part) <= budget), None)
        if not enough:
            most, least = (math.ceil(needed(*part) / 60) for part in (parts[0], parts[-1]))
            raise FedhetError(
                f"the budget of {format_seconds(budget)} is too short to compare methods: set --budget {most}m to "
                f"train {_training(*parts[0])}, or at least --budget {least}m for only {_training(*parts[-1])}"
            )
        self.shorter = {} if enough == parts[0] else {"rounds": enough[0], "local-epochs": enough[1]}
        if min(epochs, closing) > enough[1]:
            self.shorter = {**self.shorter, "closing-epochs": enough[1]}
        self.execute.tell(f"the time budget allows {_training(*enough)} per run (configured: {_training(*parts[0])})")

    def try_out(self, max_bytes: float) -> None:
        """Run each method once, in about half of the time left, and set `accuracies`, measured on validation examples.

        Methods are refused if they do not finish, or if a client sends and receives more than `max_bytes` in a round.
        """
        runs = dict[str, PlannedRun]()
        for name in self.choices:
            try:
                runs[name] = self.plan(name, SEED)
            except ConfigError as error:  # it cannot train fewer epochs
                self.refused[name] = str(error)
        start = time.monotonic()
        end = self.execute.deadline
        planned = [*runs.values()]
        late = self.run(planned[:2], end)  # without these there is no verdict
        took = time.monotonic() - start
        late |= self.run(planned[2:], min((time.monotonic() + end) / 2, end - LONGER * FEWEST * took))
        self.refused |= {name: late[run.name] for name, run in runs.items() if run.name in late}
        completed = {name: read_run(run.folder) for name, run in runs.items() if run.name not in late}
        accuracies = validation_accuracies(completed)
        for name, files in completed.items():
            self.direction = files.direction
            cost = max((row.bytes_up + row.bytes_down for row in files.clients if row.round), default=0)
            if cost > max_bytes:
                self.refused[name] = f"a round costs {format_bytes(cost)}, above max-bytes = {format_bytes(max_bytes)}"
            else:
                accuracy = accuracies[name]
                self.accuracies[name] = worst(files.metric) if accuracy is None else accuracy
        self.execute.show(TerminalTable(self.standing()))

    def standing(self) -> list[list[str]]:
        """Return a table, as rows of text, of methods and their validation accuracies, the best method first."""
        ranked = sorted(self.accuracies.items(), key=lambda item: -self.direction * item[1])
        return [["method", "validation"], *([name, format_value(accuracy)] for name, accuracy in ranked)]

    def compare(self, seeds: Sequence[int]) -> tuple[list[PlannedRun], dict[str, str]]:
        """Run the best methods and local training with one seed after the other until the budget is used up.

        Returns the runs for the seeds that were completed, and the reason for each failed run, by the run's name.
        """
        ranked = [name for name, _ in self.standing()[1:]]
        alone = sorted((name for name in ranked if name in CONTROLS), key=lambda name: name != "local")
        sharing = [name for name in ranked if name not in CONTROLS]
        best = [*alone[:1], *sharing[:1], *alone[1:], *sharing[1:2]]
        available = (self.execute.deadline - time.monotonic()) * self.execute.at_once
        seconds = [LONGER * min(FEWEST, len(seeds)) * _seconds(self.plan(name, SEED)) for name in best]
        fit = next((number for number in range(len(best), 2, -1) if sum(seconds[:number]) <= available), 2)
        self.refused |= dict.fromkeys(best[fit:], LATE)
        _tell({name: reason for name, reason in self.refused.items() if name in self.choices}, "compared", self.execute)
        tried = self.plan(best[0], SEED).settings
        words = _training(tried.rounds, tried.local_epochs)
        self.execute.tell(f"comparing the best methods on test examples, {words} per run: {', '.join(best[:fit])}")
        runs = list[PlannedRun]()
        failed = dict[str, str]()
        # Time that is left is for as many further seeds, whatever the results are.
        for number, seed in enumerate([*seeds, *range(max(seeds) + 1, max(seeds) + 1 + len(seeds))]):
            if number >= len(seeds) and time.monotonic() >= self.execute.deadline:
                break
            planned = [self.plan(name, seed) for name in best[:fit]]
            problems = self.run(planned, self.latest if number < FEWEST else self.execute.deadline)
            if LATE in problems.values() and runs:
                break
            runs += [run for run in planned if problems.get(run.name) != LATE]
            failed |= {name: reason for name, reason in problems.items() if reason != LATE}
        if not any(run.variant == "local" and run.name not in failed for run in runs):
            reasons = "\n".join(dict.fromkeys(failed.values())) or LATE
            raise FedhetError(
                "no run of the method local completed, so no method can be recommended; repeat the command to resume "
                f"the runs. Reasons:\n{reasons}"
            )
        return runs, failed

    def conclude(self, runs: Sequence[PlannedRun], failed: Mapping[str, str]) -> Recommendation:
        """Recommend a method, given the comparison's runs and the errors of failed ones by name; write all results."""
        results = measure(runs, failed)
        local = next(result for result in results if result.variant == "local")
        sign = self.direction
        gains = {
            result.variant: sign * difference.mean
            for result in results
            if (difference := result.difference(local, SCORE))
        }
        ranked = sorted((each for each in results if each.variant in gains), key=lambda each: -gains[each.variant])
        controls = [result for result in ranked if result.variant in CONTROLS]
        federated = next((result for result in ranked if result not in controls), None)
        alone = controls[0]
        differences = [federated.difference(result, SCORE) for result in controls] if federated else [None]
        beats = all(difference is not None and difference.better(sign) for difference in differences)
        method = federated.variant if federated and beats else alone.variant
        verdict = _verdict(alone, federated, beats=beats)
        if federated and (unequal := unequal_steps(federated, alone)):
            verdict += f" {unequal}"
        scores = {name: self.accuracies[name] for name in CONTROLS if name in self.refused and name in self.accuracies}
        absent = [f"{name} ({format_value(score)})" for name, score in scores.items()]
        if absent:
            verdict += f" Training without exchange, too, but not compared (validation): {', '.join(absent)}."
        if self.shorter:
            words = _training(runs[0].settings.rounds, runs[0].settings.local_epochs)
            verdict += f" The time budget was enough for {words} only: a larger one can give another verdict."
            verdict += " recommended.toml has the rounds and epochs as configured."
        refused = self.refused
        left = Section("Methods left out", [[["method", "reason"], *map(list, refused.items())]])
        sections = [Section("Trials", [self.standing()]), left]
        notes = notes_below(results, alone, self.shared.notes)
        title = "Which method for these clients"
        done = Comparison(self.out, results, alone, failed, title, verdict, notes, sections)
        publish(done, runs, self.execute)
        file = self.out / "recommended.toml"
        settings = self.settings_of(method)
        write_text(file, to_toml(settings))
        outcome = {"method": method, "beats_alone": beats, "verdict": verdict, "refused": refused}
        write_text(self.out / "recommend.json", json.dumps(outcome, indent=2) + "\n")
        self.execute.tell(f"Verdict: {verdict}\nRecommended settings ({file}):\n{to_toml(settings).rstrip()}")
        return Recommendation(self.out, method, beats, verdict, settings, refused, done)

    def settings_of(self, name: str) -> dict[str, Value]:
        """Return a method's settings for `recommended.toml`, without default values, folders, engine and seed.

        They say that they need no preset, which would replace the default values.
        """
        complete = self.shared.settings(name, 0, {**self.choices[name], **WHOLE})
        plain = config_of({"method": complete.method, "preset": ""}).flat()
        without = ineffective(complete, registry.traits(complete), self.shared.functions.replacing(complete))
        left_out = PLACES | {"seed"} | without.keys() - {"dataset"}
        flat = {key: value for key, value in complete.flat().items() if key not in left_out}
        chosen = {key: value for key, value in flat.items() if value != plain.get(key)}
        return {"method": complete.method, "preset": "", **chosen}


def _training(rounds: int, epochs: int) -> str:
    return f"{counted(rounds, 'round')} of {counted(epochs, 'epoch')}"


def _seconds(run: PlannedRun) -> float:
    return float(read_run(run.folder).summary.get("seconds") or 0)


def _verdict(alone: VariantResult, federated: VariantResult | None, *, beats: bool) -> str:
    best = f"alone, the best is {alone.variant}, {format_value(alone.mean(SCORE))}"
    if federated is None:
        return f"No federated method was compared with local, so it is open whether one beats training alone: {best}."
    said = "Nothing clearly beats training alone here"
    difference = federated.difference(alone, SCORE)
    if difference is None:
        return f"There is no verdict, since {federated.apart(alone)}."
    if beats:
        said = f"{federated.variant} beats training alone"
    elif difference.low is None:
        further = " (the same command goes on with further seeds)" if difference.seeds < FEWEST else ""
        said = f"There is no verdict with {difference.lacking}{further}"
    result = f"federated, {federated.variant}, {format_value(federated.mean(SCORE))}"
    return f"{said}: {best}; {result}: {difference}{difference.where}."
