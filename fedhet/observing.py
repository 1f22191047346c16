"""Observers of a run, and the values that they are given."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedhet.method import Traits
from fedhet.rows import ClientRow
from fedhet.state import State


@dataclass
class RoundReport:
    """A round, as observers see it: its line of `history.jsonl`, and its rows of `clients.csv`."""

    row: dict[str, Any]
    clients: list[ClientRow]


@dataclass(frozen=True)
class RunInfo:
    """A run, as observers see it.

    Attributes:
        method: the method's name.
        traits: the method's answers to the six questions.
        state: all that outlives a round, as it is now.
        metric: name of the task's metric.
        own_data: whether clients have data that are not the configured data set's.
        devices: where the clients compute, in words, each once.
        test_on: which test sets count (`Config.test_on`), as the handshake settled it; empty before.
        matrices: named matrices for the report, as JSON values; empty before the run is finished.
        privacy: epsilon and delta under Flower's wrappers or mods for differential privacy; empty without one.
    """

    method: str
    traits: Traits
    state: State
    metric: str = "accuracy"
    own_data: bool = False
    devices: tuple[str, ...] = ()
    test_on: str = ""
    matrices: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)


class Observer:
    """Watches a run: writes its files, shows its progress. Subclasses override what they need."""

    def started(self, run: RunInfo, first: int, last: int) -> None:
        """The rounds from `first` to `last` are about to run."""

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """A round is complete and in the state."""

    def finished(self, run: RunInfo) -> None:
        """All rounds and the evaluation at the end are complete."""

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """The run ended before its end."""
