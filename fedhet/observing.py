"""Who watches a run, and what is told of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from fedhet.method import Traits
from fedhet.rows import ClientRow


@dataclass
class RoundReport:
    """What observers are told of a round.

    Attributes:
        row: the object that is a line of `history.jsonl`.
        clients: the rows of `clients.csv`.
    """

    row: dict[str, Any]
    clients: list[ClientRow]


class Saved(Protocol):
    """The part of a strategy's state that observers look at."""

    @property
    def round(self) -> int:
        """The last round that is complete."""

    @property
    def run(self) -> str:
        """The run's own name, where clients keep their state in folders that serve several runs."""

    @property
    def pool_size(self) -> int:
        """Examples in the shared pool, 0 without one."""

    @property
    def stopped(self) -> int:
        """The round after which early stopping ended training, 0 if it did not."""

    @property
    def clients(self) -> Mapping[str, Any]:
        """What is known of each client, by name."""

    @property
    def model(self) -> Mapping[str, Any]:
        """What is shared, by shared key."""

    def save(self, path: Path) -> None:
        """Write the state to a file, whole or not at all."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""


class Watched(Protocol):
    """A strategy, as observers see it."""

    metric: str
    own_data: bool
    devices: list[str]

    @property
    def name(self) -> str:
        """The method's name."""

    @property
    def traits(self) -> Traits:
        """The method's answers to the contract's questions."""

    @property
    def state(self) -> Saved:
        """All that outlives a round."""

    def matrices(self) -> dict[str, Any]:
        """Named matrices for the report."""


class Observer:
    """Watches a run: writes its files, shows its progress. Subclasses override what they need."""

    def started(self, strategy: Watched, first: int, last: int) -> None:
        """The rounds from `first` to `last` are about to run."""

    def round(self, strategy: Watched, report: RoundReport) -> None:
        """A round is complete and in the strategy's state."""

    def finished(self, strategy: Watched) -> None:
        """All rounds and the evaluation at the end are complete."""

    def failed(self, strategy: Watched, error: BaseException) -> None:
        """The run ended before its end."""
