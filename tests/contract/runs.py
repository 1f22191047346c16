"""Faults, nodes that join and leave, and recorded runs, for the contract's tests."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.client.app import make_client_app
from fedhet.config import configuration
from fedhet.flower import Array, ClientApp, Message, RecordDict
from fedhet.flower.grid import LocalGrid
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.methods import registry
from fedhet.methods.options import Value
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.server import FederatedStrategy, State
from fedhet.server.app import serve
from fedhet.setup import client_setup
from fedhet.testing import PARTIAL, Case, Run, RunCache, Tampering, run


def strategy_of(case: Case) -> type[FederatedStrategy[Any, Any]]:
    """The server side of a case's method."""
    return registry.strategy(case.method.name)


def where(message: Message) -> tuple[int, str]:
    """Round and type of a message."""
    return int(message.metadata.group_id), message.metadata.message_type


# ---- replies that are spoilt


def _each(change: Callable[[str, Any], tuple[str, Any]]) -> Callable[[RecordDict], None]:
    """A fault that changes the name and the content of every array of a reply."""

    def fault(content: RecordDict) -> None:
        for name, group in content.array_records.items():
            content[name] = encode_arrays(dict(change(key, array) for key, array in decode_arrays(group).items()))

    return fault


def _without(content: RecordDict) -> None:
    for name in list(content.array_records):
        del content[name]


def _unreadable(content: RecordDict) -> None:
    for group in content.array_records.values():
        for key, array in group.items():
            group[key] = Array(array.dtype, array.shape, array.stype, b"")


REPLIES: dict[str, Callable[[RecordDict], None]] = {
    "nan": _each(lambda key, array: (key, np.full_like(array, np.nan) if array.dtype.kind == "f" else array)),
    "shape": _each(lambda key, array: (key, np.concatenate([array, array[:1]]) if array.ndim else array[None])),
    "names": _each(lambda key, array: (f"{key}-", array)),
    "dtype": _each(lambda key, array: (key, array.astype(np.int32 if array.dtype.kind == "f" else np.float32))),
    "missing": _without,
    "unreadable": _unreadable,
}
"""Ways to spoil a reply, in place."""


# ---- runs that are stopped, nodes that come and go


class Stop(Observer):
    """An observer that stops the run after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Stop, if it was that round."""
        if report.row["round"] == self.after:
            raise KeyboardInterrupt


class Nodes(LocalGrid, Observer):
    """A grid with nodes that join or leave in some round; it observes the rounds.

    Args:
        app: handles the messages.
        partitions: the partition of each node.
        between: first and last round in which a node is there, by its index; always, if left out.
    """

    def __init__(
        self, app: ClientApp, partitions: Sequence[int], *, between: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        super().__init__(app, len(partitions))
        self.between, self.complete = between or {}, -1
        for context, partition in zip(self._contexts.values(), partitions, strict=True):
            context.node_config.update({"partition-id": partition, "num-partitions": len(set(partitions))})

    def get_node_ids(self) -> Iterator[int]:
        """The nodes that are there in the round that is next."""
        for index, node in enumerate(super().get_node_ids()):
            first, last = self.between.get(index, (0, 99))
            if first <= self.complete + 1 <= last:
                yield node

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """A round is complete."""
        self.complete = report.row["round"]


def run_on(
    folder: Path,
    settings: Mapping[str, Value],
    partitions: Sequence[int],
    *,
    between: Mapping[int, tuple[int, int]] | None = None,
) -> Run:
    """Run settings on nodes that join and leave (see `Nodes`)."""
    config = configuration.resolve({key: value for key, value in settings.items() if key != "clients"})
    config = config.replace(state_dir=str(folder / "state"), clients=len(set(partitions)))
    grid = Nodes(make_client_app(), partitions, between=between)
    serve(config, grid, folder, engine="local", public=client_setup.public_dataset(config), observers=[grid])
    return Run(folder)


# ---- recorded runs


@dataclass
class RecordedRun(Run):
    """A run with every request and its reply, and the last state."""

    exchanges: list[tuple[RecordDict, Message]] = field(default_factory=list)
    state: Any = None


class Remembering(Observer):
    """An observer that keeps a copy of the state after the last round."""

    state: Any = None

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Copy the state that is saved now."""
        if not report.row.get("final"):
            self.state = copy.deepcopy(run.state)


class RecordedRuns(RunCache):
    """A cache whose normal runs are recorded."""

    def normal(self, folder: Path) -> RecordedRun:
        exchanges: list[tuple[RecordDict, Message]] = []
        app = Tampering(after=lambda message, client, reply: exchanges.append((message.content, reply)))
        remembering = Remembering()
        run(folder, self.case.settings(PARTIAL), app=app, observers=[remembering])
        return RecordedRun(folder, exchanges, remembering.state)


def differing(one: Any, other: Any, place: str = "state") -> list[str]:
    """The places in which two values differ; arrays are equal if they have one dtype, shape and content."""
    if is_dataclass(one) and type(one) is type(other):
        names = [each.name for each in fields(one)]
        return [at for name in names for at in differing(getattr(one, name), getattr(other, name), f"{place}.{name}")]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [at for key in one for at in differing(one[key], other[key], f"{place}[{key!r}]")]
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        equal = one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    else:
        equal = type(one) is type(other) and one == other
    return [] if equal else [place]


def infinite(value: Any, place: str = "state") -> list[str]:
    """The places of a state that hold NaN or infinity."""
    if isinstance(value, np.ndarray):
        return [] if value.dtype.kind != "f" or np.isfinite(value).all() else [place]
    inner = vars(value) if isinstance(value, State) else value if isinstance(value, dict) else {}
    return [at for key, each in inner.items() for at in infinite(each, f"{place}/{key}")]
