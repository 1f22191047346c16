"""Faults: clients that crash, replies that are spoilt or lost, runs that are stopped, nodes that come and go."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedhet.client.app import make_client_app
from fedhet.flower import Array, ClientApp, Context, Message, RecordDict, decode_arrays, encode_arrays
from fedhet.flower.grid import LocalGrid
from fedhet.observing import Observer, RoundReport, RunInfo

Before = Callable[[Message, str], None]
After = Callable[[Message, str, Message], None]
Hit = Callable[[Message, str], bool]


def where(message: Message) -> tuple[int, str]:
    """Round and kind of a message."""
    return int(message.metadata.group_id), message.metadata.message_type


class Tampering(ClientApp):
    """A ClientApp around fedhet's: `before` and `after` may raise, or change message and reply."""

    def __init__(self, before: Before | None = None, after: After | None = None) -> None:
        super().__init__()
        self.before, self.after, self.app = before, after, make_client_app()

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle a message."""
        client = str(context.node_config["partition-id"])
        if self.before:
            self.before(message, client)
        reply = self.app(message, context)
        if self.after:
            self.after(message, client, reply)
        return reply


def at(rounds: Iterable[int], client: str, kind: str = "train") -> Hit:
    """Whether a message is that one."""
    hits = [(number, kind) for number in rounds]
    return lambda message, name: name == client and where(message) in hits


def raising(hit: Hit, error: BaseException) -> Before:
    """A fault before a message is handled."""

    def fault(message: Message, client: str) -> None:
        if hit(message, client):
            raise error

    return fault


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


def _lost(content: RecordDict) -> None:
    raise LookupError("the answer is lost")


REPLIES: dict[str, Callable[[RecordDict], None]] = {
    "nan": _each(lambda key, array: (key, np.full_like(array, np.nan) if array.dtype.kind == "f" else array)),
    "shape": _each(lambda key, array: (key, np.concatenate([array, array[:1]]) if array.ndim else array[None])),
    "names": _each(lambda key, array: (f"{key}-", array)),
    "dtype": _each(lambda key, array: (key, array.astype(np.int32 if array.dtype.kind == "f" else np.float32))),
    "missing": _without,
    "unreadable": _unreadable,
    "lost": _lost,
}
"""Ways to spoil what a reply says, in place, or to lose it after the client has trained."""


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
