"""Observers of a run, and the values that they receive."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedhet.methods.method import Traits
from fedhet.results.state import State
from fedhet.utils.statistics import ClientRow


@dataclass
class RoundReport:
    """The results of a round for observers: its row of `history.jsonl` and its rows of `clients.csv`."""

    row: dict[str, Any]
    clients: list[ClientRow]


@dataclass(frozen=True)
class RunInfo:
    """The description of a run that observers receive.

    Attributes:
        method: the method's name.
        traits: the method's traits.
        state: the current state.
        metric: name of the task's metric.
        own_data: whether clients have the user's data, not the configured data set.
        devices: the different devices on which clients compute.
        test_on: the test sets in use (`Config.test_on`); empty before the handshake.
        matrices: named matrices for the report, as JSON values; empty before the run is finished.
        privacy: epsilon and delta under Flower's wrappers or mods; empty without them.
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
    """Base class of observers of a run. Subclasses override the methods that they need."""

    def started(self, run: RunInfo, first: int, last: int) -> None:
        """Called before the first round; the rounds to run are `first` to `last`."""

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Called after each round, when `run.state` has been updated."""

    def finished(self, run: RunInfo) -> None:
        """Called when the run is complete, after the evaluation at the end."""

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Called if the run fails."""
