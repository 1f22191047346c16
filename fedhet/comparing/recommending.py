"""Recommend a method for a federation's own clients, models and data, within a time budget.

Configurations of methods are tried on validation examples. The best are compared with training without exchange on
test examples, with other seeds.
"""

import json
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.comparing import Comparison, publish
from fedhet.comparing.budget import SEED, WRITING, WRITING_SECONDS, in_time
from fedhet.comparing.candidates import CONTROL, Candidates, ask, methods_to_ask
from fedhet.comparing.measures import FEWEST, VariantResult, measure
from fedhet.comparing.runs import Execution, check, prepared, why_incomplete
from fedhet.comparing.settings import PLACES, PlannedRun, SharedSettings, shared_settings, variants_of
from fedhet.comparing.tables import TerminalTable, notes_below
from fedhet.comparing.tuning import RATE, WHOLE, Choice, Search, Trial, Tuner, Tuning, check_tuning, held_out
from fedhet.config import configuration
from fedhet.config.toml import to_toml
from fedhet.config.user_functions import UserFunctions
from fedhet.config.validation import ineffective
from fedhet.errors import ConfigError, FedhetError, check_kinds, check_list
from fedhet.methods import registry
from fedhet.methods.options import Value
from fedhet.results.report import Section
from fedhet.results.tables import format_bytes, format_value
from fedhet.utils.files import write_text
from fedhet.utils.statistics import grouped

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Recommendation", "recommend"]

FACTORS = (1, 3, 1 / 3)
"""Factors of the learning rate in successive trials."""
FINALISTS = 2
"""Methods that exchange something and are compared at the end."""
ASKING = 0.1
"""Part of the budget after which no further methods are asked."""
LONGER = 2.0
"""How much longer than its trial a run of the comparison may take: its process starts, and others run beside it."""
SCORE = "personal_accuracy"

LONGEST = 1e9
"""The longest budget in seconds; operating systems cannot wait much longer."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Recommendation:
    """The recommended method; `beats_alone` says whether it is federated and better than training without exchange.

    `settings` is the content of `recommended.toml`, and `refused` maps each method that was left out to the reason.
    """

    folder: Path
    method: str
    beats_alone: bool
    verdict: str
    settings: Mapping[str, Value] = field(repr=False)
    refused: Mapping[str, str] = field(repr=False)
    comparison: Comparison = field(repr=False)


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
    console: "Console | None" = None,
) -> Recommendation:
    """Find the best method for a federation's clients, and whether it is better than training without exchange.

    If called again with the same settings, completed runs are kept, and the whole budget is available again. Raises a
    ConfigError for invalid settings, and a FedhetError if training without exchange failed or exceeds the budget.

    Args:
        config: settings for all methods, as for `fedhet.compare`.
        model: the clients' networks, as for `fedhet.run`.
        data: the clients' data, as for `fedhet.run`.
        task: the task of the user's data.
        methods: methods to try in addition to those without exchange; by default all.
        allow: kinds of arrays that may leave the clients, such as `"posteriors"`, comma-separated; by default all.
        max_bytes: the most bytes that a client may send and receive in a round, such as `"500 KB"`.
        budget: the total time, such as `"30m"`, or a number of seconds.
        seeds: seeds of the comparison; the last ones are left out if the time is not sufficient.
        out: folder for all files; by default `runs/recommend`.
        jobs: number of simultaneous runs, as for `fedhet.compare`.
        console: console for progress and tables; by default standard output.
    """
    began, seconds = time.monotonic(), min(parsed("budget", budget, _SECONDS, "30m"), LONGEST)
    most = math.inf if max_bytes is None else parsed("max-bytes", max_bytes, _BYTES, "500KB")
    check_list("methods", methods, str, "['fedhenn', 'fedavg']")
    check_list("seeds", seeds, int, "[0, 1, 2]")
    wanted = methods_to_ask(methods)
    out, functions = Path(out or Path("runs") / "recommend"), UserFunctions(model, data, task)
    base, execute = prepared(config, functions, out, jobs, console)
    execute = replace(execute, deadline=began + seconds - min(WRITING * seconds, WRITING_SECONDS))
    if data is None:
        base = {"test-split": "drawn"} | base
        base["public-samples"] = configuration.resolve({**base, "method": CONTROL}, strict=False).public_samples
    execute.tell(f"asking the clients which of {len(wanted)} methods they can train")
    candidates = ask(wanted, base, functions, seed=SEED, allow=allow, deadline=began + ASKING * seconds)
    _tell_answers(candidates, execute)
    shared = shared_settings(variants_of([*candidates.choices]), seeds=[SEED, *seeds], config=base, functions=functions)
    check_tuning(Tuning({}, (SEED,)), shared, seeds)
    tuner = Tuner(shared, held_out(shared), out / "tried", execute)
    choices, late, trying = in_time(tuner, candidates, seconds, began)
    trying_out, compared = replace(execute, deadline=trying), replace(tuner, folder=out / "compared")
    searches, left = _try_out(replace(tuner, execute=trying_out), choices, most, execute.deadline)
    best, short = _affordable(_finalists(searches, left, candidates.alone), execute, min(FEWEST, len(seeds)))
    runs, failed = _compare(best, seeds, compared)
    return _conclude(searches, candidates.alone, candidates.refused | late | left | short, runs, failed, compared)


def parsed(name: str, given: str | float, units: Mapping[str, int], example: str) -> float:
    """Convert text such as `30m` to a number by the factors `units`; raises a ConfigError that names `name`."""
    check_kinds(**{name: (given, (str, float, int))})
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)", str(given).strip())
    factors = {unit.lower(): factor for unit, factor in units.items()} | {"": 1}
    if not match or match[2].lower() not in factors or not float(match[1]):
        raise ConfigError(f"{name} = {given}: write a number above 0 and one of {', '.join(units)}, such as {example}")
    return float(match[1]) * factors[match[2].lower()]


def _tell_answers(candidates: Candidates, execute: Execution) -> None:
    execute.tell(f"{', '.join(candidates.choices)} can serve")
    for reason, names in grouped((reason, name) for name, reason in candidates.refused.items()).items():
        execute.tell(f"{', '.join(names)} cannot serve: {reason}")
    if CONTROL not in candidates.choices:
        raise FedhetError(f"the clients cannot be trained with the method local: {candidates.refused[CONTROL]}")


def _trials(shared: SharedSettings, name: str, choice: Choice) -> list[Trial]:
    """Return a method's trials, one for each of the `FACTORS` of its rate, or one if the rate has no effect."""
    rate = shared.settings(name, SEED, choice).learning_rate
    trials = [{**choice, RATE: float(f"{factor * rate:.3g}")} for factor in FACTORS]
    if any(shared.settings(name, SEED, each).flat()[RATE] != each[RATE] for each in trials):
        return [Trial(name, choice)]
    return [Trial(name, each) for each in trials]


def _try_out(
    tuner: Tuner, choices: Mapping[str, Choice], max_bytes: float, end: float
) -> tuple[dict[str, Search], dict[str, str]]:
    """Run all first trials, then all second ones, and so on, as long as a comparison of the best fits before `end`.

    Returns the trials by method, and the reasons why methods are left out.
    """
    trials = {name: _trials(tuner.shared, name, choice) for name, choice in choices.items()}
    searches = {name: Search(name, len(each), []) for name, each in trials.items()}
    left: dict[str, str] = {}
    for number in range(len(FACTORS)):
        asked = [each[number] for name, each in trials.items() if number < len(each) and name not in left]
        if not number:
            until_end = replace(tuner, execute=replace(tuner.execute, deadline=end))
            until_end.run(asked[:2], [SEED])  # the least for a verdict
            latest = end - LONGER * FEWEST * sum(tried.seconds for tried in asked[:2]) / tuner.execute.at_once
            tuner = replace(tuner, execute=replace(tuner.execute, deadline=min(tuner.execute.deadline, latest)))
        tuner.run(asked[2 * (not number) :], [SEED])
        ended = [tried for tried in asked if tried.by_seed or tried.failed]
        if number and len(ended) < len(asked):
            plural = "s" * (number > 1)
            tuner.execute.tell(f"each method tried at most {number} configuration{plural} in the budget")
            break
        for tried in ended:
            searches[tried.variant].tried.append(tried)
            if tried.round_bytes > max_bytes:
                cost, limit = format_bytes(tried.round_bytes), format_bytes(max_bytes)
                left[tried.variant] = f"a round costs a client {cost}, above the limit of {limit} (max-bytes)"
    for name, search in searches.items():
        if not search.tried:
            left[name] = "there was no time to try it within the budget"
        elif not search.completed:
            left[name] = search.reasons
    tuner.execute.show(TerminalTable(_standing(searches)))
    for name, why in left.items():
        tuner.execute.tell(f"{name} left: {why}")
    return searches, left


def _standing(searches: Mapping[str, Search]) -> list[list[str]]:
    best = sorted((each.best for each in searches.values() if each.completed), key=lambda tried: -(tried.accuracy or 0))
    lines = [[tried.variant, format_value(tried.accuracy), tried.words] for tried in best]
    return [["method", "validation", "settings"], *lines]


def _finalists(searches: Mapping[str, Search], left: Collection[str], alone: Collection[str]) -> list[Trial]:
    """Return the best trials of the methods in `alone` and of the two best others, without methods in `left`."""
    best = [each.best for name, each in searches.items() if each.completed and name not in left]
    best.sort(key=lambda tried: -(tried.accuracy or 0))
    others = [tried for tried in best if tried.variant not in alone][:FINALISTS]
    controls = sorted((tried for tried in best if tried.variant in alone), key=lambda tried: tried.variant != CONTROL)
    return [*controls[:1], *others[:1], *controls[1:2], *others[1:], *controls[2:]]


def _affordable(best: Sequence[Trial], execute: Execution, seeds: int) -> tuple[Sequence[Trial], dict[str, str]]:
    """Return the first trials that can be compared with `seeds` seeds by the deadline, and why others are left out."""
    left = (execute.deadline - time.monotonic()) * execute.at_once
    fit = max(2, sum(needed <= left for needed in accumulate(LONGER * seeds * tried.seconds for tried in best)))
    why = f"there is no time to compare it with {seeds} seeds within the budget"
    return best[:fit], {each.variant: why for each in best[fit:]}


def _compare(best: Sequence[Trial], seeds: Sequence[int], tuner: Tuner) -> tuple[list[PlannedRun], dict[str, str]]:
    runs, failed = list[PlannedRun](), dict[str, str]()
    tuner.execute.tell(f"comparison on test parts: {', '.join(each.variant for each in best)}")
    for seed in seeds:
        planned = [tuner.plan(tried, seed, WHOLE) for tried in best]
        check(planned, tuner.shared.functions)
        failed |= tuner.execute(planned)
        ended = [run for run in planned if run.name in failed or why_incomplete(run) is None]
        if runs and len(ended) < len(planned):
            break
        runs += ended
    if not any(run.variant == CONTROL and run.name not in failed for run in runs):
        reasons = "\n".join(failed.values()) or "increase --budget; the same command continues"
        raise FedhetError(f"local has no result within the budget, so nothing can be recommended:\n{reasons}")
    return sorted(runs, key=lambda run: [each.variant for each in best].index(run.variant)), failed


def _conclude(
    searches: Mapping[str, Search],
    without_exchange: Collection[str],
    refused: Mapping[str, str],
    runs: Sequence[PlannedRun],
    failed: Mapping[str, str],
    tuner: Tuner,
) -> Recommendation:
    execute, out, results = tuner.execute, tuner.folder.parent, measure(runs, failed)
    ranked = sorted((each for each in results if each.outcomes), key=lambda each: -(each.mean(SCORE) or 0.0))
    controls = [each for each in ranked if each.variant in without_exchange]
    federated, alone = next((each for each in ranked if each not in controls), None), controls[0]
    lows = [difference.low for each in controls if federated and (difference := federated.difference(each, SCORE))]
    beats = bool(lows) and all(low is not None and low > 0 for low in lows)
    method = federated.variant if federated and beats else alone.variant
    done = Comparison(out, results, alone, failed)
    choice, said = dict(searches[method].best.choice), _verdict(alone, federated, beats=beats)
    if rounds := choice.pop("rounds", None):
        only = "rounds of one epoch" if choice.pop("local-epochs", None) else "rounds"
        said += f" The budget was enough for {rounds} {only} only: a larger one can give another verdict."
    refusals = [["method", "reason"], *map(list, refused.items())]
    more = [Section("Trials", [_standing(searches)]), Section("Methods left out", [refusals])]
    publish(done, said, notes_below(results, alone, tuner.shared.notes), "Which method for these clients", more)
    file = out / "recommended.toml"
    settings = _settings_of(tuner.shared, method, choice)
    write_text(file, to_toml(settings))
    outcome = {"method": method, "beats_alone": beats, "verdict": said, "refused": refused}
    write_text(out / "recommend.json", json.dumps(outcome, indent=2) + "\n")
    for table in done.tables():
        execute.show(TerminalTable(table))
    execute.tell(f"{said}\nGo on with these settings ({file}):\n{to_toml(settings).rstrip()}")
    return Recommendation(out, method, beats, said, settings, refused, done)


def _verdict(alone: VariantResult, federated: VariantResult | None, *, beats: bool) -> str:
    """Return a sentence on whether the best federated method is better than training without exchange."""
    best = f"alone, the best is {alone.variant}, {format_value(alone.mean(SCORE))}"
    if federated is None:
        return f"Nothing beats training alone here, since no federated method has a result: {best}."
    difference, worse = federated.difference(alone, SCORE), federated.mean("worse_off")
    said = f"{best}; federated, {federated.variant}, {format_value(federated.mean(SCORE))}: {difference}."
    if worse is not None:
        said += f" With it, {worse:.0%} of clients have less than under local."
    if beats:
        return f"{federated.variant} beats training alone: {said}"
    if difference is None or difference.low is None:
        return f"There are too few seeds for a verdict (the same command goes on with further seeds): {said}"
    return f"Nothing clearly beats training alone here: {said}"


def _settings_of(shared: SharedSettings, name: str, choice: Choice) -> dict[str, Value]:
    """Return a method's settings with the changes `choice`, without defaults, folders, engine and seed."""
    complete = shared.settings(name, 0, {**choice, **WHOLE})
    plain = configuration.resolve({"method": complete.method, "preset": ""}).flat()
    without = ineffective(complete, registry.traits(complete), shared.functions.replacing(complete))
    left_out = PLACES | {"seed"} | without.keys() - {"dataset"}
    flat = {key: value for key, value in complete.flat().items() if key not in left_out}
    return {"method": complete.method} | {key: value for key, value in flat.items() if value != plain.get(key)}
