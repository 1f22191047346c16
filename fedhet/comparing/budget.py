"""Estimate how long runs take, and choose the rounds, epochs and methods that fit into a time budget."""

import math
import time
from dataclasses import replace

from fedhet.comparing.candidates import CONTROL, UNASKED, Candidates
from fedhet.comparing.measures import FEWEST
from fedhet.comparing.tuning import Choice, Trial, Tuner
from fedhet.errors import ConfigError, FedhetError
from fedhet.results.history import read_run
from fedhet.results.tables import format_seconds

SEED = 1000
"""The seed of trials."""
BESIDE = 1.5
"""How much longer than one round of `local` suggests, process start included."""
LEAST = 60.0
"""Seconds that the first run of one round may take, whatever the budget."""
WRITING, WRITING_SECONDS = 0.1, 30.0
"""Part of the budget for writing the page, and the most that it is in seconds."""
SHORTEST = 2
"""Rounds of the shortest runs that are compared; after the first, clients have nothing from others."""


def in_time(
    tuner: Tuner, candidates: Candidates, budget: float, began: float
) -> tuple[dict[str, Choice], dict[str, str], float]:
    """Choose the methods, rounds and epochs that fit into `budget` seconds from `began`, by timing a round of `local`.

    Returns the changed settings by method, why other methods are left out, and the time when trials must end.
    """
    execute, whole = tuner.execute, tuner.shared.settings(CONTROL, SEED)
    most = whole.rounds, whole.local_epochs
    trial, start = Trial(CONTROL, {"rounds": 1} | _changes((1, min(most[1], 1)), most)), time.monotonic()
    replace(tuner, execute=replace(execute, deadline=max(execute.deadline, start + LEAST))).run([trial], [SEED])
    passed = time.monotonic() - start
    rows = read_run(tuner.plan(trial, SEED, tuner.held_out).folder).rows if trial.by_seed else []
    took = {row["round"]: row["timing"]["seconds"] for row in reversed(rows)}  # in round 0, clients only evaluate
    alone, now, pairs = max(passed, trial.seconds), time.monotonic(), math.ceil(2 / execute.at_once)
    first = min(took.get(1, passed), alone)
    runs = pairs * (1 + BESIDE * FEWEST)  # once on validation examples, then on test examples

    def run_of(rounds: int, epochs: int) -> float:
        return alone + first * (rounds - 1) + max(first - took.get(0, 0.0), 0.0) * rounds * max(epochs - 1, 0)

    def verdict_after(rounds: int, epochs: int) -> float:
        return (now - began + runs * run_of(rounds, epochs)) / (1 - WRITING)

    sharing = [name for name in candidates.choices if name not in candidates.alone]
    execute.tell(f"a run of local takes about {format_seconds(run_of(*most))} here")
    more = bool(sharing) or UNASKED in candidates.refused.values()
    few = min(SHORTEST, most[0])
    parts = [(max(few, math.ceil(most[0] / part)), most[1]) for part in (1, 2, 4)]
    parts += [(rounds, 1) for rounds in (parts[-1][0], few) if most[1] > 1]
    enough = next((part for part in parts if not more or verdict_after(*part) <= budget), None)
    if not trial.failed and (not trial.by_seed or enough is None):
        needed, least = verdict_after(*most), verdict_after(*parts[-1])
        raise FedhetError(
            f"the budget of {format_seconds(budget)} is too short for a verdict: local and one federated method "
            f"need about {format_seconds(needed)}; set --budget {math.ceil(1.5 * needed / 60)}m or fewer rounds "
            f"(--budget {math.ceil(1.5 * least / 60)}m is enough for {_training(*parts[-1])})"
        )
    fewer = _changes(enough or most, most)
    if fewer:
        execute.tell(f"the budget is enough for {_training(*(enough or most))} instead of {_training(*most)}")
    each = run_of(*(enough or most))
    both = each * pairs
    compared = BESIDE * FEWEST * both
    until = max(now + both, min((now + execute.deadline) / 2, execute.deadline - compared))
    fit = max(1, int((until - now) / each * execute.at_once) - 1) if each else len(sharing)
    why = f"a run takes about {format_seconds(each)}, so there is no time to try it within the budget"
    late = dict.fromkeys(sharing[fit:], why)
    choices = {name: choice | fewer for name, choice in candidates.choices.items() if name not in late}
    return *_valid(tuner, choices, late), until


def _changes(part: tuple[int, int], most: tuple[int, int]) -> Choice:
    """Return the settings of `part` (rounds, local epochs) that are lower than in `most`."""
    return {key: fewer for key, fewer, all_ in zip(("rounds", "local-epochs"), part, most, strict=True) if fewer < all_}


def _valid(tuner: Tuner, choices: dict[str, Choice], late: dict[str, str]) -> tuple[dict[str, Choice], dict[str, str]]:
    """Move methods for which the chosen settings are invalid from `choices` to `late`, each with the reason."""
    for name, choice in [*choices.items()]:
        try:
            tuner.shared.settings(name, SEED, choice)
        except ConfigError as error:
            late[name] = str(error)
            del choices[name]
    return choices, late


def _training(rounds: int, epochs: int) -> str:
    return f"{rounds} round{'s' * (rounds != 1)} of {epochs} epoch{'s' * (epochs != 1)}"
