"""Trials: every method tries as many configurations as there is time for, on validation parts with one seed."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedhet.comparing.runs import Execution, why_incomplete
from fedhet.comparing.settings import PlannedRun
from fedhet.comparing.tuning import RATE, Choice, Search, Trial, Tuner
from fedhet.recommending.serving import CONTROL
from fedhet.results.tables import format_bytes, format_seconds, format_value

SEED = 1000
TRIES = 6
"""Configurations of a method at most."""
FINALISTS = 2
"""Methods that exchange something and are compared at the end."""
OVERHEAD = 3.0
"""Seconds that a run takes in addition to those in its summary."""

_RATES = {"sgd": (0.1, 0.3, 0.03), "adam": (0.003, 0.01, 0.001)}


def configurations(choices: Sequence[Choice], optimizer: str, rate: float) -> list[Choice]:
    """Combine a method's choices, in turn, with the given optimiser and rate and with further ones.

    The other optimiser is Adam for SGD, and SGD for others; each has three rates.
    """
    other = "adam" if optimizer == "sgd" else "sgd"
    here: list[Choice] = [{"optimizer": optimizer, RATE: float(f"{factor * rate:.3g}")} for factor in (1, 3, 1 / 3)]
    there: list[Choice] = [{"optimizer": other, RATE: each} for each in _RATES[other]]
    training = [here[0], *there[:2], here[1], here[2], there[2]]
    return [{**each, **choices[number % len(choices)]} for number, each in enumerate(training[:TRIES])]


@dataclass
class Trials:
    """The trials of all methods.

    Attributes:
        tuner: carries out the runs, until the deadline of its execution.
        choices: the configurations of each method, in the order in which they are tried.
        max_bytes: the most that a client may send and receive in a round.
        searches: what was tried, by method.
        left: methods that are out, and why.
    """

    tuner: Tuner
    choices: Mapping[str, Sequence[Choice]]
    max_bytes: float = math.inf
    searches: dict[str, Search] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let the execution skip runs that would not end before its deadline."""
        self.tuner = replace(self.tuner, execute=replace(self.tuner.execute, expected=self.expected, brief=True))

    def run(self) -> None:
        """Try the configurations in turn, each with all methods, while there is time for all of them."""
        execute, most = self.tuner.execute, max(map(len, self.choices.values()))
        for number in range(most):
            asked = [Trial(name, each[number]) for name, each in self.choices.items() if number < len(each)]
            asked = [each for each in asked if each.variant not in self.left]
            if number and not self.fits([self.tuner.plan(each, SEED, self.tuner.held_out) for each in asked], execute):
                execute.tell(f"each method tried at most {number} of {most} configurations")
                break
            left = format_seconds(max(execute.deadline - time.monotonic(), 0.0))
            execute.tell(f"configuration {number + 1} of {most}: {len(asked)} methods; {left} left for trials")
            self.tuner.run(asked, [SEED])
            for tried in asked:
                search = Search(tried.variant, len(self.choices[tried.variant]), [])
                if tried.by_seed or tried.failed:
                    self.searches.setdefault(tried.variant, search).tried.append(tried)
            self._dismiss()
        for name in self.choices.keys() - self.searches.keys():
            self.left[name] = "there was no time to try it within the budget"
        for name, search in self.searches.items():
            if not search.completed:
                self.left[name] = search.reasons

    def _dismiss(self) -> None:
        for name, search in self.searches.items():
            if (most := max(each.round_bytes for each in search.tried)) > self.max_bytes:
                limit = format_bytes(self.max_bytes)
                self.left[name] = f"a round costs a client {format_bytes(most)}, above the limit of {limit} (max-bytes)"

    def finalists(self, alone: Collection[str]) -> list[str]:
        """Return the methods to compare: `alone`, with the control first, and the best of the others, best first."""
        best = [name for name in self._ranked() if name not in self.left]
        others = [name for name in best if name not in alone][:FINALISTS]
        chosen = [name for name in best if name in alone or name in others]
        return sorted(chosen, key=lambda name: name != CONTROL)

    def expected(self, run: PlannedRun) -> float:
        """Return the seconds of the longest run of the method so far; 0 before the first one."""
        tried = self.searches[run.variant].tried if run.variant in self.searches else []
        seconds = max((each.seconds for each in tried), default=0.0)
        return seconds + OVERHEAD if seconds else 0.0

    def fits(self, runs: Sequence[PlannedRun], execute: Execution) -> bool:
        """Whether the runs that are not complete yet will end before the deadline."""
        seconds = sum(self.expected(run) for run in runs if why_incomplete(run) is not None)
        return time.monotonic() + seconds / execute.at_once <= execute.deadline

    def standing(self) -> Iterator[Sequence[str]]:
        """Yield a heading, and a line for each method, best first, with its best settings."""
        yield ["method", "tried", "validation", "settings"]
        for name in self._ranked():
            search = self.searches[name]
            best = search.best if search.completed else None
            words = best.words if best else "none completed"
            yield [name, str(len(search.tried)), format_value(best and best.accuracy), words]

    def _ranked(self) -> list[str]:
        def accuracy(search: Search) -> float:
            return search.best.accuracy or 0.0 if search.completed else -1.0

        return sorted(self.searches, key=lambda name: -accuracy(self.searches[name]))
