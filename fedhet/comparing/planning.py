"""The plan of a comparison: which clients each method serves, how many runs there are, and how long they take."""

import time
from collections.abc import Sequence

from fedhet.comparing.runs import Execution, why_incomplete
from fedhet.comparing.settings import PlannedRun
from fedhet.engines.running import shake_hands
from fedhet.errors import ConfigError
from fedhet.results.terminal import format_seconds
from fedhet.setup.user_functions import UserFunctions
from fedhet.utils.process import standard_settings
from fedhet.utils.text import counted

STARTING = 3.0
"""Seconds that a run takes to start and to end."""


def announce(
    tuned: Sequence[PlannedRun], reported: Sequence[PlannedRun], functions: UserFunctions, execute: Execution
) -> None:
    """Shake hands for each method, time a round of it, and print the plan of the runs that are not complete.

    Raises a ConfigError that names each method that cannot train the clients, and the reason.
    """
    missing = [run for run in (*tuned, *reported) if why_incomplete(run) is not None]
    seconds = dict[str, float]()
    problems = []
    firsts = dict[str, PlannedRun]()
    for run in missing:
        firsts.setdefault(run.variant, run)
    for run in firsts.values():
        config = functions.adapted(run.settings, strict=False).replace(keep_best=False, save_every=0)
        try:
            with standard_settings():
                strategy = shake_hands(config, functions, functions.public_dataset(config), train=True)
        except Exception as error:  # whatever a method raises
            problems.append(f"{run.variant} cannot train these clients: {error}\nleave it out, or correct the cause")
            continue
        seconds[run.variant] = time.perf_counter() - strategy.run.round.started
        served, all_of_them = len(strategy.federation.nodes), config.clients - config.unseen_clients
        refused = "; ".join(strategy.run.round.lines())
        who = f"all {served}" if served >= all_of_them else f"{served} of {all_of_them}"
        execute.tell(f"{run.variant} serves {who} clients{refused and f' ({refused})'}")
    if problems:
        raise ConfigError("\n".join(problems))
    needed = [STARTING + max(run.settings.rounds, 1) * seconds[run.variant] for run in missing]
    if needed:
        left = max(sum(needed) / execute.at_once, *needed)
        numbers = [f"{counted(len(tuned), 'run')} for tuning"] * bool(tuned) + [counted(len(reported), "run")]
        done = len(tuned) + len(reported) - len(missing)
        completed = f" ({done} of them completed before)" if done else ""
        execute.tell(
            f"plan: {' and '.join(numbers)} to report{completed}, {execute.at_once} at a time: about "
            f"{format_seconds(left)}, by a round of each method"
        )
