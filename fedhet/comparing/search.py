"""A variant's search for its settings: the configurations tried, the best one, and those that are not clear of it."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedhet.comparing.measures import paired_difference
from fedhet.comparing.settings import distinct
from fedhet.options import Value
from fedhet.results.history import RunFiles

Choice = dict[str, Value]
"""Keys and values that are tried together."""


@dataclass
class Tried:
    """A configuration that was tried: by seed its validation accuracy or the reason for none, and its costs.

    Attributes:
        steps: gradient steps of all its runs.
        seconds: of the longest run.
        round_bytes: the most that one client sent and received in one round.
    """

    variant: str
    choice: Choice
    by_seed: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    round_bytes: int = 0

    def note(self, seed: int, run: RunFiles | None, reason: str | None) -> None:
        """Note the outcome of a run, or the reason for none."""
        accuracy = validation_accuracy(run) if run else None
        if run is None or accuracy is None:
            self.failed[seed] = reason or "there is no validation accuracy"
            return
        self.by_seed[seed] = float(accuracy)
        summary = run.summary or {}
        self.steps += int((summary.get("work") or {}).get("steps") or 0)
        self.seconds = max(self.seconds, float(summary.get("seconds") or 0))
        self.round_bytes = max(self.round_bytes, round_bytes(run))

    @property
    def accuracy(self) -> float | None:
        """The mean over its seeds; None unless all of them have one."""
        return None if self.failed or not self.by_seed else statistics.fmean(self.by_seed.values())

    @property
    def words(self) -> str:
        """Its keys and values in words."""
        return ", ".join(f"{key} = {value}" for key, value in self.choice.items()) or "nothing to choose"

    def clearly_below(self, other: "Tried") -> bool:
        """Whether the interval of the paired difference over common seeds lies below 0."""
        difference = paired_difference(self.by_seed, other.by_seed)
        return difference is not None and difference.high is not None and difference.high < 0


def validation_accuracy(run: RunFiles) -> float | None:
    """The run's accuracy on validation examples, to which a client that failed when it was measured adds 0.

    A configuration with which all clients but one diverge has not that one's accuracy.
    """
    accuracy = run.accuracy("validation")
    clients, failed = run.measured("validation")
    return accuracy * clients / (clients + len(failed)) if accuracy and failed else accuracy


def round_bytes(run: RunFiles) -> int:
    """The most that one client sent and received in one round of training."""
    training = {row["round"] for row in run.rows if row["round"] and not row.get("final")}
    return max((row.bytes_up + row.bytes_down for row in run.clients if row.round in training), default=0)


@dataclass
class Search:
    """The tuning of one variant: its configurations, how many its grid holds, and the keys whose best is at an edge."""

    variant: str
    grid: int
    tried: list[Tried]
    edges: list[str] = field(default_factory=list)

    @property
    def completed(self) -> list[Tried]:
        """The configurations that completed with all their seeds, best first; those with the most seeds come first."""
        done = [each for each in self.tried if each.accuracy is not None]
        return sorted(done, key=lambda each: (-len(each.by_seed), -(each.accuracy or 0.0)))

    @property
    def best(self) -> Tried:
        """The configuration with the highest mean among those with the most seeds; the first one of equals."""
        return self.completed[0]

    @property
    def ties(self) -> list[Tried]:
        """The others with as many seeds as the best that are not clearly below it, best first."""
        return [each for each in self._unclear if len(each.by_seed) == len(self.best.by_seed)]

    @property
    def dropped(self) -> list[Tried]:
        """Those that were left behind by their mean over fewer seeds, by which they are not clearly below the best."""
        return [each for each in self._unclear if len(each.by_seed) < len(self.best.by_seed)]

    @property
    def _unclear(self) -> list[Tried]:
        return [each for each in self.completed[1:] if not each.clearly_below(self.best)]

    @property
    def reasons(self) -> str:
        """Why none completed, if none did."""
        reasons = dict.fromkeys(reason for tried in self.tried for reason in tried.failed.values())
        return f"no configuration of {self.variant} completed with all tuning seeds: {'; '.join(reasons)}"

    @property
    def text(self) -> str:
        """The choice in words, with its nearest tie, how many were dropped, and the edges at which it lies."""
        more = len(self.tried) - min(self.grid, len(self.tried))
        tried = f"{len(self.tried)} tried" + (f", {more} beyond its grid" if more else f" of {self.grid}")
        words = [f"{self.variant}: {self.best.words} (validation {self.best.accuracy:.3f}, {tried})"]
        if self.ties:
            first, others = self.ties[0], len(self.ties) - 1
            rest = f" and {others} other{'s' * (others > 1)}" if others else ""
            words.append(f"not clear of {first.words} ({first.accuracy:.3f}){rest}")
        if self.dropped:
            words.append(f"{len(self.dropped)} dropped after fewer seeds")
        words += [f"{key} at the edge of the values tried" for key in self.edges]
        return "; ".join(words)


def record(search: Search) -> dict[str, Any]:
    """Return a search as JSON values."""

    def result(tried: Tried) -> dict[str, Any]:
        return {"settings": tried.choice, "validation_accuracy": tried.accuracy}

    return {
        "grid": search.grid,
        "chosen": search.best.choice,
        "validation_accuracy": search.best.accuracy,
        "ties": [result(each) for each in search.ties],
        "dropped": [result(each) for each in search.dropped],
        "edges": search.edges,
        "steps": sum(each.steps for each in search.tried),
        "tried": [result(t) | {"by_seed": t.by_seed, "failed": t.failed, "steps": t.steps} for t in search.tried],
    }


def rows(searches: Sequence[Search]) -> Iterator[Sequence[object]]:
    """Yield a heading, and a row for each configuration of each variant."""
    keys = distinct(key for each in searches for tried in each.tried for key in tried.choice)
    seeds = sorted({seed for each in searches for tried in each.tried for seed in tried.by_seed})
    yield ["method", *keys, *(f"seed {seed}" for seed in seeds), "validation_accuracy", "result", "steps"]
    for search in searches:
        words = {id(search.best): "chosen"}
        words |= {id(each): word for word, of in (("tie", search.ties), ("dropped", search.dropped)) for each in of}
        for tried in search.tried:
            values = [tried.choice.get(key) for key in keys]
            accuracies = [tried.by_seed.get(seed) for seed in seeds]
            yield [search.variant, *values, *accuracies, tried.accuracy, words.get(id(tried), ""), tried.steps]
