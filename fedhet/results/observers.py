"""Observers of a run, and the values that they receive."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedhet.methods.method import Traits
from fedhet.results.state import State
from fedhet.utils.statistics import ClientRow


@dataclass
class RoundReport:
    """A round for observers: its line of `history.jsonl` and its rows of `clients.csv`."""

    row: dict[str, Any]
    clients: list[ClientRow]


@dataclass(frozen=True)
class RunInfo:
    """A run for observers.

    Attributes:
        method: the method's name.
        traits: the method's traits.
        state: the current state.
        metric: name of the task's metric.
        own_data: whether clients have data of their own, not the configured data set.
        devices: the different devices that clients compute on.
        test_on: the test sets in use (`Config.test_on`), known after the handshake; empty before.
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
    """Base class of observers of a run. Subclasses override the methods that they need."""

    def started(self, run: RunInfo, first: int, last: int) -> None:
        """Called before rounds `first` to `last`."""

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Called after each round, which is in the state."""

    def finished(self, run: RunInfo) -> None:
        """Called after the last round and the evaluation at the end."""

    def failed(self, run: RunInfo, error: BaseException) -> None:
        """Called if the run fails."""
