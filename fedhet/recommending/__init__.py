"""Recommending a method for a federation's own clients, models and data, by a race within a time budget."""

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
from fedhet.comparing.measures import measure
from fedhet.comparing.runs import Execution, check, check_out, why_incomplete
from fedhet.comparing.search import Choice, record
from fedhet.comparing.settings import PlannedRun, SharedSettings, distinct, shared_settings, variants_of
from fedhet.comparing.tables import notes_below, terminal_table
from fedhet.comparing.tuning import WHOLE, Tuner, Tuning, check_tuning, different, held_out
from fedhet.comparing.uncertainty import FEWEST
from fedhet.engines import children
from fedhet.errors import ConfigError, FedhetError, check_kinds, check_list
from fedhet.files import write_text
from fedhet.machine import device_of, runs_at_once
from fedhet.options import Value
from fedhet.recommending.race import SEEDS, Race, configurations
from fedhet.recommending.serving import CONTROL, Candidates, ask, by_reason
from fedhet.recommending.verdict import SCORE, Verdict, judge, still_learning
from fedhet.results.tables import format_bytes, format_seconds, format_value
from fedhet.supplied import Supplied
from fedhet.toml import to_toml
from fedhet.validation import ineffective

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Recommendation", "recommend"]

RACE = 0.65
"""Part of the budget for the race; the rest is for the comparison of its best methods."""
PAGE = 0.1
"""Part of the budget for writing the page, of `PAGE_SECONDS` at most."""
PAGE_SECONDS = 30.0

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Recommendation:
    """A finished race.

    Attributes:
        folder: its files.
        method: the method to go on with; one without exchange if nothing beats training alone.
        beats_alone: whether the best federated method beats training alone.
        verdict: who wins by how much, which clients lose, and what it costs, in sentences.
        settings: those to go on with, as `recommended.toml` has them.
        refused: why other methods cannot serve, or may not, by name.
        comparison: of the race's best methods and of those without exchange.
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

    Methods that can serve the clients race on validation parts (`fedhet.recommending.race`). The best are compared on
    test parts with the methods without exchange, which never leave the race. Started again with the same settings, it
    keeps its completed runs and has the whole budget again.

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
        seeds: seeds of the final comparison, as many as there is time for.
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
    deadline = began + seconds - min(PAGE * seconds, PAGE_SECONDS)
    execute = Execution(run, jobs, console or text.console(soft_wrap=True), deadline)

    if data is None:
        base = {"test-split": "drawn"} | base
        base["public-samples"] = configuration.resolve({**base, "method": CONTROL}, strict=False).public_samples
    wanted = [CONTROL, *(name for name in registry.methods() if _alone(name)), *(methods or registry.methods())]
    candidates = ask(distinct(wanted), base, supplied, seed=SEEDS[0], allow=allow, labels=public_labels)
    _introduce(candidates, execute, allow, most, seconds)
    if CONTROL not in candidates.settings:
        raise FedhetError(f"these clients cannot even train alone: {candidates.refused[CONTROL]}")
    order = sorted(candidates.settings, key=lambda name: (name != CONTROL, name not in candidates.alone))
    shared = shared_settings(variants_of(order), seeds=[*SEEDS, *seeds], config=base, supplied=supplied)
    race = _race(shared, candidates, seeds, most, out, replace(execute, deadline=began + RACE * seconds))
    runs, failed = _compare(
        race,
        seeds,
        replace(race.tuner, folder=out / "compared", execute=replace(race.execute, deadline=execute.deadline)),
    )
    results = measure(runs, failed)
    verdict = judge(results, candidates.alone, rivals=len(candidates.settings) - len(candidates.alone))
    return _conclude(race, candidates, verdict, Comparison(out, results, verdict.alone, failed), execute)


def parsed(name: str, supplied: str | float, units: Mapping[str, int], example: str) -> float:
    """A number with a unit, or one of the first unit; a ConfigError if it is none above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)", str(supplied).strip())
    factors = {unit.lower(): factor for unit, factor in units.items()} | {"": 1}
    if not match or match[2].lower() not in factors or not float(match[1]):
        raise ConfigError(
            f"{name} = {supplied}: write a number above 0 and one of {', '.join(units)}, such as {example}"
        )
    return float(match[1]) * factors[match[2].lower()]


def _alone(name: str) -> bool:
    try:
        method = registry.method(name)
        return not method.traits_of(method.Parameters()).communicates
    except ConfigError:  # a package that is installed and broken; it is asked, and says so
        return False


def _introduce(candidates: Candidates, execute: Execution, allow: str | None, most: float, seconds: float) -> None:
    """Print the conditions, and the methods that can and cannot serve."""
    may = "anything may leave the clients (--allow)" if allow is None else f"only {allow} may leave the clients"
    cost = "a round may cost anything (--max-bytes)" if most == math.inf else f"a round {format_bytes(most)} a client"
    execute.tell(f"{may}; {cost}; {format_seconds(seconds)} for all (--budget)")
    execute.show(terminal_table([["method", "sends"], *([n, candidates.sends[n]] for n in candidates.settings)]))
    for names, reason in by_reason(candidates.refused):
        execute.tell(f"{names} cannot serve: {reason}")


def _race(
    shared: SharedSettings, candidates: Candidates, seeds: Sequence[int], most: float, out: Path, execute: Execution
) -> Race:
    check_tuning(Tuning({}, SEEDS), shared, seeds)
    choices = {name: _choices(shared, name, candidates.settings[name]) for name in shared.own}
    tuner = Tuner(Tuning({}, SEEDS), shared, held_out(shared), out / "race", execute)
    race = Race(tuner, choices, candidates.alone, most)
    race.run()
    execute.show(terminal_table(list(race.standing())))
    for names, why in by_reason(race.left):
        execute.tell(f"{names} left the race: {why}")
    return race


def _choices(shared: SharedSettings, name: str, choices: Sequence[Choice]) -> list[Choice]:
    """Return a method's configurations, each once, with keys that have an effect."""
    settings = shared.settings(name, SEEDS[0])
    wanted = configurations(choices, settings.optimizer, settings.learning_rate)
    resolved = [shared.settings(name, SEEDS[0], each).flat() for each in wanted]
    pairs = list(zip(wanted, resolved, strict=True))
    effective = [key for key in wanted[0] if all(each[key] == flat[key] for each, flat in pairs)]
    return different({key: each[key] for key in effective} for each in wanted)


def _compare(race: Race, seeds: Sequence[int], tuner: Tuner) -> tuple[list[PlannedRun], dict[str, str]]:
    """Run the best methods with seeds not used in the race, as time permits; return the runs and their failures."""
    best = [race.searches[name].best for name in race.by_turns()]
    runs, failed, compared = list[PlannedRun](), dict[str, str](), 0
    fewest = [tuner.plan(tried, seed, WHOLE) for tried in best for seed in seeds[:FEWEST]]
    if not race.fits(fewest, tuner.execute.deadline):  # a verdict on the best method comes first
        behind = [name for name in race.finalists if name not in race.alone][1:]
        best = [tried for tried in best if tried.variant not in behind]
        race.notes += [f"No time to compare {name} as well: a larger budget does." for name in behind]
    left = format_seconds(max(tuner.execute.deadline - time.monotonic(), 0.0))
    tuner.execute.tell(
        f"comparison on test parts, {len(seeds)} seeds at most: {', '.join(each.variant for each in best)}; {left} left"
    )
    for number, seed in enumerate(seeds):
        planned = [tuner.plan(tried, seed, WHOLE) for tried in best]
        if number and not race.fits(planned, tuner.execute.deadline):
            break
        check(planned, tuner.shared.supplied)
        now = tuner.execute(planned)
        ended = [run for run in planned if run.name in now or why_incomplete(run) is None]
        if number and len(ended) < len(planned):
            break
        runs, failed, compared = [*runs, *ended], failed | now, number + 1
        race.notes += [f"No time to compare {run.variant}." for run in planned if run not in ended]
    if compared < len(seeds):
        one = sum(map(race.expected, (tuner.plan(tried, seeds[0], WHOLE) for tried in best))) / tuner.execute.at_once
        more = format_seconds((len(seeds) - compared) * one)
        race.notes.append(
            f"Compared with {compared} of {len(seeds)} seeds within the budget: the same command goes on, and the "
            f"others take about {more}."
        )
    if not any(run.variant in race.alone and run.name not in failed for run in runs):
        reasons = "\n".join(failed.values()) or "give --budget more; the same command goes on where it was"
        raise FedhetError(f"the budget ended, and training alone has no result on test parts:\n{reasons}")
    return sorted(runs, key=lambda run: race.finalists.index(run.variant)), failed


def _settings_of(race: Race, name: str) -> dict[str, Value]:
    """Return a method's best settings, without those that its defaults have or that say where a run lies."""
    shared = race.tuner.shared
    complete = shared.settings(name, 0, {**race.searches[name].best.choice, **WHOLE})
    plain = configuration.resolve({"method": complete.method, "preset": ""}).flat()
    without = ineffective(complete, registry.traits(complete), shared.supplied.replacing(complete))
    left_out = PLACES | {"seed"} | without.keys() - {"dataset"}
    flat = {key: value for key, value in complete.flat().items() if key not in left_out}
    return {"method": complete.method} | {key: value for key, value in flat.items() if value != plain.get(key)}


def _conclude(
    race: Race, candidates: Candidates, verdict: Verdict, done: Comparison, execute: Execution
) -> Recommendation:
    """Write and print the results."""
    shared, name = race.tuner.shared, verdict.winner.variant
    settings = _settings_of(race, name)
    refused = candidates.refused | {each: why for each, why in race.left.items() if "max-bytes" in why}
    said = [*verdict.lines(), *still_learning(done.results)]
    if (network := verdict.network) is not None and network is not verdict.winner:
        file = done.folder / "recommended_network.toml"
        write_text(file, to_toml(_settings_of(race, network.variant)))
        said.append(
            f"{name} trains no network. Of the methods that do, {network.variant} has most, "
            f"{format_value(network.mean(SCORE))}: its settings are in {file}."
        )
    notes = [*said, *race.notes, *notes_below(done.results, done.baseline, shared.notes)]
    refusals = [["left the race, or cannot serve", "why"], *map(list, by_reason(race.left | candidates.refused))]
    publish(done, notes, "Which method for these clients", more=[list(race.standing()), refusals])
    write_text(done.folder / "recommended.toml", to_toml(settings))
    outcome = {
        "method": name,
        "beats_alone": verdict.beats,
        "verdict": said,
        "notes": race.notes,
        "refused": refused,
        "race": {each: record(search) for each, search in race.searches.items() if search.completed},
        "left": race.left,
    }
    write_text(done.folder / "recommend.json", json.dumps(outcome, indent=2) + "\n")
    for table in done.tables():
        execute.show(terminal_table(table))
    goes_on = [f"Go on with these settings ({done.folder / 'recommended.toml'}):", to_toml(settings).rstrip()]
    if shared.supplied.model is not None:
        goes_on.append(f"fedhet.run({str(done.folder / 'recommended.toml')!r}, model=..., data=...)")
    for lines in [*race.notes, *said, *goes_on]:
        execute.tell(lines)
    return Recommendation(done.folder, name, verdict.beats, "\n".join(said), settings, refused, done)
