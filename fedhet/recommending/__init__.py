"""Recommend a method for a federation's own clients, models and data, within a time budget.

The methods that can serve the clients try configurations on validation parts. The best of them are then compared, on
test parts and with other seeds, with the methods without exchange.
"""

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet import config as configuration
from fedhet import registry, running, text
from fedhet.comparing import Comparison, publish
from fedhet.comparing.chosen import PLACES
from fedhet.comparing.measures import VariantResult, corrected_p_values, measure
from fedhet.comparing.runs import Execution, check, check_out, why_incomplete
from fedhet.comparing.settings import PlannedRun, SharedSettings, distinct, shared_settings, variants_of
from fedhet.comparing.tables import notes_below, terminal_table
from fedhet.comparing.tuning import WHOLE, Choice, Tuner, Tuning, check_tuning, different, held_out
from fedhet.comparing.uncertainty import CONFIDENCE, Difference
from fedhet.engines import children
from fedhet.errors import ConfigError, FedhetError, check_kinds, check_list
from fedhet.files import write_text
from fedhet.machine import device_of, runs_at_once
from fedhet.options import Value
from fedhet.recommending.serving import CONTROL, Candidates, ask, by_reason
from fedhet.recommending.trials import SEED, Trials, configurations
from fedhet.results.tables import format_value
from fedhet.supplied import Supplied
from fedhet.toml import to_toml
from fedhet.validation import ineffective

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Recommendation", "recommend"]

TRYING = 0.6
"""Part of the budget for trying configurations; the rest is for the comparison."""
WRITING = 0.1
"""Part of the budget for writing the page, of `WRITING_SECONDS` at most."""
WRITING_SECONDS = 30.0
SCORE = "personal_accuracy"

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Recommendation:
    """A method for the clients, and why.

    Attributes:
        folder: its files.
        method: the recommended method; one without exchange if nothing beats training alone.
        beats_alone: whether the best federated method beats every method without exchange.
        verdict: the winner and its gain in sentences.
        settings: the settings to go on with, as in `recommended.toml`.
        refused: why other methods cannot serve, or cost too much, by name.
        comparison: the comparison of the best methods with those without exchange.
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
    public_labels: bool = False,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    out: str | Path | None = None,
    jobs: int | None = None,
    console: "Console | None" = None,
) -> Recommendation:
    """Find out which method serves these clients best, and whether any beats training alone.

    Started again with the same settings, it keeps its completed runs and has the whole budget again.

    Args:
        config: settings for all methods, as for `fedhet.compare`.
        model: the clients' networks, as for `fedhet.run`.
        data: the clients' data, as for `fedhet.run`.
        task: the task of the user's data.
        methods: methods to try in addition to those without exchange; by default all.
        allow: kinds of arrays that may leave the clients (`fedhet.client.policy.KINDS`), with commas; None: all.
        max_bytes: the most that a client may send and receive in a round, such as `"500 KB"`; None: no limit.
        budget: the total time, such as `"30m"` or seconds.
        public_labels: whether labels of a configured public dataset are known; the user's data show whether they are.
        seeds: seeds of the comparison, as many as there is time for.
        out: folder for all files; by default `runs/recommend`.
        jobs: runs at a time, as for `fedhet.compare`.
        console: where progress and tables go; None: standard output.

    Raises:
        ConfigError: settings that cannot be run; nothing was started.
        FedhetError: the clients cannot train alone, the budget ended before they did, or all runs failed.
    """
    began, seconds = time.monotonic(), parsed("budget", budget, _SECONDS, "30m")
    most = math.inf if max_bytes is None else parsed("max-bytes", max_bytes, _BYTES, "500KB")
    children.prepare("matplotlib.backends.backend_agg")
    check_kinds(config=(config, (Mapping, str, Path)), out=(out, (str, Path)), jobs=(jobs, (int,)))
    check_list("methods", methods, str, "['fedhenn', 'fedavg']")
    check_list("seeds", seeds, int, "[0, 1, 2]")
    supplied = Supplied(model, data, task)
    base, seeds = configuration.completed(config, supplied.words.keys()), distinct(seeds)
    out = Path(out or Path("runs") / "recommend")
    check_out(out)
    run = partial(running.run, model=model, data=data, task=task) if supplied else running.run
    jobs = jobs or runs_at_once(device_of(str(base.get("device", "auto"))))
    deadline = began + seconds - min(WRITING * seconds, WRITING_SECONDS)
    execute = Execution(run, jobs, console or text.console(soft_wrap=True), deadline)
    if data is None:
        base = {"test-split": "drawn"} | base
        base["public-samples"] = configuration.resolve({**base, "method": CONTROL}, strict=False).public_samples
    wanted = [CONTROL, *(name for name in registry.methods() if _alone(name)), *(methods or registry.methods())]
    candidates = ask(distinct(wanted), base, supplied, seed=SEED, allow=allow, labels=public_labels)
    _introduce(candidates, execute)
    if CONTROL not in candidates.choices:
        raise FedhetError(f"these clients cannot even train alone: {candidates.refused[CONTROL]}")
    shared = shared_settings(variants_of([*candidates.choices]), seeds=[SEED, *seeds], config=base, supplied=supplied)
    check_tuning(Tuning({}, (SEED,)), shared, seeds)
    until = replace(execute, deadline=began + TRYING * seconds)
    choices = {name: _choices(shared, name, candidates.choices[name]) for name in shared.own}
    trials = Trials(Tuner(shared, held_out(shared), out / "tried", until), choices, most)
    trials.run()
    execute.show(terminal_table(list(trials.standing())))
    for names, why in by_reason(trials.left):
        execute.tell(f"{names} left: {why}")
    tuner = replace(trials.tuner, folder=out / "compared", execute=replace(trials.tuner.execute, deadline=deadline))
    return _conclude(trials, candidates, out, *_compare(trials, candidates, seeds, tuner), execute)


def parsed(name: str, given: str | float, units: Mapping[str, int], example: str) -> float:
    """Return a number with a unit in the first of these units; a ConfigError unless it is above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)", str(given).strip())
    factors = {unit.lower(): factor for unit, factor in units.items()} | {"": 1}
    if not match or match[2].lower() not in factors or not float(match[1]):
        raise ConfigError(f"{name} = {given}: write a number above 0 and one of {', '.join(units)}, such as {example}")
    return float(match[1]) * factors[match[2].lower()]


def _alone(name: str) -> bool:
    try:
        method = registry.method(name)
        return not method.traits_of(method.Parameters()).communicates
    except ConfigError:  # a package that is installed and broken; it is asked, and says so
        return False


def _introduce(candidates: Candidates, execute: Execution) -> None:
    """Print the methods that can and cannot serve."""
    execute.show(terminal_table([["method", "sends"], *([n, candidates.sends[n]] for n in candidates.choices)]))
    for names, reason in by_reason(candidates.refused):
        execute.tell(f"{names} cannot serve: {reason}")


def _choices(shared: SharedSettings, name: str, choices: Sequence[Choice]) -> list[Choice]:
    """Return a method's configurations, each once, with keys that have an effect."""
    settings = shared.settings(name, SEED)
    wanted = configurations(choices, settings.optimizer, settings.learning_rate)
    pairs = [(each, shared.settings(name, SEED, each).flat()) for each in wanted]
    effective = [key for key in wanted[0] if all(each[key] == flat[key] for each, flat in pairs)]
    return different({key: each[key] for key in effective} for each in wanted)


def _compare(
    trials: Trials, candidates: Candidates, seeds: Sequence[int], tuner: Tuner
) -> tuple[list[PlannedRun], dict[str, str]]:
    """Run the best methods with other seeds, as time permits; return the runs and the failures."""
    best = [trials.searches[name].best for name in trials.finalists(candidates.alone)]
    runs, failed = list[PlannedRun](), dict[str, str]()
    tuner.execute.tell(f"comparison on test parts: {', '.join(each.variant for each in best)}")
    for seed in seeds:
        planned = [tuner.plan(tried, seed, WHOLE) for tried in best]
        if runs and not trials.fits(planned, tuner.execute):
            break
        check(planned, tuner.shared.supplied)
        failed |= tuner.execute(planned)
        runs += [run for run in planned if run.name in failed or why_incomplete(run) is None]
    if not any(run.variant in candidates.alone and run.name not in failed for run in runs):
        reasons = "\n".join(failed.values()) or "give --budget more; the same command goes on where it was"
        raise FedhetError(f"the budget ended, and training alone has no result on test parts:\n{reasons}")
    return sorted(runs, key=lambda run: [each.variant for each in best].index(run.variant)), failed


def _conclude(
    trials: Trials,
    candidates: Candidates,
    out: Path,
    runs: Sequence[PlannedRun],
    failed: Mapping[str, str],
    execute: Execution,
) -> Recommendation:
    """Judge the methods; write and print the results."""
    results = measure(runs, failed)
    ranked = sorted((each for each in results if each.outcomes), key=lambda each: -(each.mean(SCORE) or 0.0))
    alone = next(each for each in ranked if each.variant in candidates.alone)
    federated = next((each for each in ranked if each.variant not in candidates.alone), None)
    beats = federated is not None and _beats(federated, [each for each in ranked if each.variant in candidates.alone])
    method = federated.variant if federated and beats else alone.variant
    done, settings = Comparison(out, results, alone, failed), _settings_of(trials, method)
    refused = candidates.refused | {name: why for name, why in trials.left.items() if "max-bytes" in why}
    said = _verdict(alone, federated, beats=beats)
    seeds = len({run.seed for run in runs})
    notes = [said, f"Compared with {seeds} seeds.", *notes_below(results, alone, trials.tuner.shared.notes)]
    refusals = [["left, or cannot serve", "why"], *map(list, by_reason(trials.left | candidates.refused))]
    publish(done, notes, "Which method for these clients", more=[list(trials.standing()), refusals])
    file = out / "recommended.toml"
    write_text(file, to_toml(settings))
    outcome = {"method": method, "beats_alone": beats, "verdict": said, "refused": refused, "left": trials.left}
    write_text(out / "recommend.json", json.dumps(outcome, indent=2) + "\n")
    for table in done.tables():
        execute.show(terminal_table(table))
    execute.tell(f"{said}\nGo on with these settings ({file}):\n{to_toml(settings).rstrip()}")
    return Recommendation(out, method, beats, said, settings, refused, done)


def _beats(federated: VariantResult, controls: Sequence[VariantResult]) -> bool:
    """Whether a method is above every method without exchange, by intervals and corrected p-values."""
    differences = [federated.difference(each, SCORE) for each in controls]
    above = all(each is not None and each.low is not None and each.low > 0 for each in differences)
    p_values = corrected_p_values([federated, *controls], controls[0])
    return above and p_values.get(federated.variant, 1.0) < 1 - CONFIDENCE


def _verdict(alone: VariantResult, federated: VariantResult | None, *, beats: bool) -> str:
    """Return the verdict in sentences."""
    best = f"alone, the best is {alone.variant}, {format_value(alone.mean(SCORE))}"
    if federated is None:
        return f"Nothing beats training alone here, since no federated method has a result: {best}."
    difference = federated.difference(alone, SCORE)
    both = f"{best}; federated, {federated.variant}, {format_value(federated.mean(SCORE))}: {_interval(difference)}."
    worse = federated.mean("worse_off")
    clients = "" if worse is None else f" With it, {worse:.0%} of clients have less than under local."
    if beats:
        return f"{federated.variant} beats training alone: {both}{clients}"
    if difference is None or difference.low is None:
        return f"There are too few seeds for a verdict: {both}{clients}"
    return f"Nothing clearly beats training alone here: {both}{clients}"


def _interval(difference: Difference | None) -> str:
    if difference is None or difference.low is None:
        return "no interval" if difference is None else str(difference)
    return f"{difference} ({CONFIDENCE:.0%} interval)"


def _settings_of(trials: Trials, name: str) -> dict[str, Value]:
    """Return a method's best settings, without those that its defaults have or that say where a run lies."""
    shared = trials.tuner.shared
    complete = shared.settings(name, 0, {**trials.searches[name].best.choice, **WHOLE})
    plain = configuration.resolve({"method": complete.method, "preset": ""}).flat()
    without = ineffective(complete, registry.traits(complete), shared.supplied.replacing(complete))
    left_out = PLACES | {"seed"} | without.keys() - {"dataset"}
    flat = {key: value for key, value in complete.flat().items() if key not in left_out}
    return {"method": complete.method} | {key: value for key, value in flat.items() if value != plain.get(key)}
