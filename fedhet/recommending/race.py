"""A race of methods within a time budget: all try as many configurations, and the better half continues.

Every method tries its first configuration with one seed, then its second one, while there is time. Then the better half
of the methods, with the better half of their configurations, goes on with another seed, and so on (successive halving;
Jamieson and Talwalkar, AISTATS 2016). Methods whose clients exchange nothing stay to the end. A seed that not all could
complete within the budget counts for nobody. Nothing reads the results on test parts.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from fedhet.comparing.runs import why_incomplete
from fedhet.comparing.search import Choice, Search, Tried
from fedhet.comparing.settings import PlannedRun, distinct
from fedhet.comparing.tuning import RATE, Tuner, Tuning
from fedhet.results.tables import format_bytes, format_seconds, format_value

SEEDS = (1000, 1001, 1002, 1003)
TRIES = 6
"""Configurations of a method at most."""
FINALISTS = 2
"""Methods that exchange something and are compared at the end."""
WIDE = 0.6
"""Part of the race's time for first tries."""
OVERHEAD = 3.0
"""Seconds that a run takes beside its own."""

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
class Race:
    """A race under way.

    Attributes:
        tuner: carries out the runs, until the deadline of its execution.
        choices: the configurations of each method, in the order in which they are tried.
        alone: methods that stay to the end.
        max_bytes: the most that a client may send and receive in a round.
        searches: what was tried, by method.
        left: methods that left the race, and why.
        notes: what there was no time for.
    """

    tuner: Tuner
    choices: Mapping[str, Sequence[Choice]]
    alone: Collection[str]
    max_bytes: float = math.inf
    searches: dict[str, Search] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Know beforehand how long a run will take, from those before."""
        self.execute = replace(self.tuner.execute, expected=self.expected, brief=True)
        self.tuner = replace(self.tuner, execute=self.execute)

    def run(self) -> None:
        """Run the race."""
        self._first_tries()
        for number, seed in enumerate(SEEDS[1:], start=1):
            asked = self._better_halves(number)
            if not asked or not self._whole(asked, seed, "race"):
                for tried in asked:
                    tried.by_seed.pop(seed, None)
                    tried.failed.pop(seed, None)
                self.notes += [f"The race ended after {number} of {len(SEEDS)} seeds."] * bool(asked)
                break
            if number == 1:
                tuning = Tuning({}, SEEDS[:2])
                replace(self.tuner, tuning=tuning).widen([self.searches[name] for name in self.racing(2)])

    @property
    def finalists(self) -> list[str]:
        """The methods that stay to the end, and the best of the others, best first."""
        best = self.racing()
        return [*(name for name in best if name in self.alone), *self._others(best)[:FINALISTS]]

    def by_turns(self) -> list[str]:
        """The finalists in the order of comparison; methods with and without exchange alternate."""
        alone = [name for name in self.finalists if name in self.alone]
        others = [name for name in self.finalists if name not in self.alone]
        rest = sorted(alone[1:], key=lambda name: -_accuracy(self.searches[name].best))
        return [*alone[:1], *(name for pair in zip_longest(others, rest) for name in pair if name)]

    def racing(self, seeds: int = 0) -> dict[str, list[Tried]]:
        """The methods in the race, and their configurations that completed with so many seeds at least, best first."""
        here = {name: search for name, search in self.searches.items() if name not in self.left}
        alive = {name: [each for each in here[name].completed if len(each.by_seed) >= seeds] for name in here}
        return {name: completed for name, completed in alive.items() if completed}

    def expected(self, run: PlannedRun) -> float:
        """The seconds that a run will take by the longest one of its method; 0 for the first one."""
        search = self.searches.get(run.variant)
        seconds = max((each.seconds for each in search.tried), default=0.0) if search else 0.0
        return seconds + OVERHEAD if seconds else 0.0

    def fits(self, runs: Sequence[PlannedRun], until: float) -> bool:
        """Whether the runs that are not completed yet will end by then."""
        seconds = sum(self.expected(run) for run in runs if why_incomplete(run) is not None)
        return time.monotonic() + seconds / self.execute.at_once <= until

    def standing(self) -> Iterator[Sequence[str]]:
        """Yield a heading, and a line for each method, the best first: how far it came, and its best settings."""
        yield ["method", "tried", "seeds", "validation", "settings"]
        best = {name: search.best for name, search in self.searches.items() if search.completed}
        for name in sorted(self.searches, key=lambda name: -_accuracy(best.get(name))):
            tried = best.get(name)
            seeds, accuracy = (len(tried.by_seed), tried.accuracy) if tried else (0, None)
            words = tried.words if tried else "none completed"
            yield [name, str(len(self.searches[name].tried)), str(seeds), format_value(accuracy), words]

    def _first_tries(self) -> None:
        began = time.monotonic()
        until = began + WIDE * (self.execute.deadline - began)
        most = max(map(len, self.choices.values()))
        for number in range(most):
            asked = [
                Tried(name, choices[number])
                for name, choices in self.choices.items()
                if number < len(choices) and name not in self.left
            ]
            planned = [self.tuner.plan(tried, SEEDS[0], self.tuner.held_out) for tried in asked]
            doing = f"configuration {number + 1} of {most}"
            if number and not (self.fits(planned, until) and self._whole(asked, SEEDS[0], doing)):
                self.notes.append(f"Each method tried at most {number} of {most} configurations.")
                break
            if not number:
                self._whole(asked, SEEDS[0], doing)
            for tried in asked:
                search = Search(tried.variant, len(self.choices[tried.variant]), [])
                self.searches.setdefault(tried.variant, search).tried.append(tried)
            self._dismiss()
        for name, search in self.searches.items():
            if name not in self.left and not search.completed:
                self.left[name] = search.reasons

    def _dismiss(self) -> None:
        """Send methods away that were never tried, or whose rounds cost too much."""
        for name, search in self.searches.items():
            most = max(each.round_bytes for each in search.tried)
            if not any(each.by_seed or each.failed for each in search.tried):
                self.left.setdefault(name, "there was no time to try it within the budget")
            elif most > self.max_bytes:
                limit = format_bytes(self.max_bytes)
                self.left[name] = f"a round costs a client {format_bytes(most)}, above the limit of {limit} (max-bytes)"

    def _better_halves(self, seeds: int) -> list[Tried]:
        """The better half of the methods, with the better half of their configurations; the others leave."""
        racing = self.racing(seeds)
        for name, search in self.searches.items():
            if name not in racing and name not in self.left:
                self.left[name] = search.reasons
        others = self._others(racing)
        for name in others[max(FINALISTS, math.ceil(len(others) / 2)) :]:
            best, first = racing[name][0].accuracy, racing[others[0]][0].accuracy
            plural = "s" * (seeds > 1)
            self.left[name] = (
                f"its best was {format_value(best)} with {seeds} seed{plural}, {others[0]}'s {format_value(first)}"
            )
        going_on = {name: tried for name, tried in racing.items() if name not in self.left}
        return [each for tried in going_on.values() for each in tried[: math.ceil(TRIES / 2**seeds)]]

    def _whole(self, asked: Sequence[Tried], seed: int, doing: str) -> bool:
        """Say what is done, and run configurations with another seed; return whether there was time for all of them."""
        names, left = ", ".join(distinct(each.variant for each in asked)), self.execute.deadline - time.monotonic()
        self.execute.tell(
            f"{doing}, seed {seed}, {len(asked)} runs: {names}; {format_seconds(max(left, 0.0))} left for the race"
        )
        self.tuner.run(asked, [seed])
        return all(seed in each.by_seed or seed in each.failed for each in asked)

    def _others(self, racing: Mapping[str, Sequence[Tried]]) -> list[str]:
        """The methods that exchange something, best first."""
        others = [name for name in racing if name not in self.alone]
        return sorted(others, key=lambda name: -_accuracy(racing[name][0]))


def _accuracy(tried: Tried | None) -> float:
    return -math.inf if tried is None or tried.accuracy is None else tried.accuracy
