"""Hostile replies: those of a recorded run, changed at random, for a server half that talks with nobody.

A `Recording` holds what the clients of an ordinary run answered. A server half gets these answers again, one of them
changed, and goes through greeting, opening, checking and aggregation without anybody training.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import strategies as st

from fedhet import population
from fedhet.engines.local import FIRST_NODE, LocalGrid
from fedhet.server import FederatedStrategy, State
from fedhet.testing.faults import where
from fedhet.testing.runs import PARTIAL, Case, Run
from fedhet.wire import STYPE, Request, decode_arrays, encode_arrays
from fedhet.wire.protocol import FIRST, GREET

Place = tuple[int, str, str, str]
"""Round, kind, question and client of an answer."""
Change = Callable[[RecordDict], None]
Strategy = FederatedStrategy[Any, Any]


def silence(content: RecordDict) -> None:
    """The change of an answer to none at all."""
    raise LookupError("says nothing")


class Replayed(LocalGrid):
    """A grid whose nodes answer as those of a recorded run did, but for some changes."""

    def __init__(self, answers: Mapping[Place, RecordDict], clients: int, changes: Mapping[Place, Change]) -> None:
        super().__init__(ClientApp(), clients)
        self._answers, self._changes = answers, changes

    def _handle(self, message: Message) -> Message:
        client = str(message.metadata.dst_node_id - FIRST_NODE)
        place = (*where(message), Request.read(message.content)[0].question, client)
        try:
            content = self._answer(place)
            self._changes.get(place, bool)(content)
            reply = Message(content, reply_to=message)
        except LookupError as error:
            reply = Message(Error(2, str(error)), reply_to=message)
        self._identify(reply)
        return reply

    def _answer(self, place: Place) -> RecordDict:
        """What was recorded; the first weights are the same of all, and were asked of one."""
        round, kind, question, client = place
        if place in self._answers or question != FIRST:
            return _copied(self._answers[place])
        other = next(each for each in self._answers if each[2] == FIRST)
        content, own = _copied(self._answers[other]), self._answers[0, "query", GREET, client]
        content["report"], content["metrics"] = ConfigRecord({"client": client}), own["metrics"]
        return content


def _copied(content: RecordDict) -> RecordDict:
    copied = RecordDict()
    for name, record in content.items():
        copied[name] = copy.copy(record)
        copied[name].__dict__["_data"] = dict(record.items())
    return copied


@dataclass
class Recording:
    """What the clients of a run answered, and the server half as it was before each round.

    Attributes:
        answers: by place.
        clients: how many there are.
        before: the server half before each round, from 0, the greeting; the last one is the evaluation at the end.
    """

    answers: Mapping[Place, RecordDict]
    clients: int
    before: list[Strategy] = field(default_factory=list)
    _silent: dict[Place, State] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, run: Run) -> "Recording":
        """That of an ordinary run (`PARTIAL`), whose server's part is gone through once more."""
        answers = {}
        for sent, reply in run.exchanges:
            round, kind = where(reply)
            client = str(reply.content["report"]["client"])  # type: ignore[call-overload,index]
            answers[round, kind, Request.read(sent)[0].question, client] = reply.content
        config = case.config(PARTIAL)
        strategy = case.server(config, shared=population.shared_pool(config))
        recording = cls(answers, config.clients)
        for _ in run.rows:
            recording.before.append(strategy)
            strategy = recording.after(len(recording.before) - 1, {})
        return recording

    def after(self, round: int, changes: Mapping[Place, Change]) -> Strategy:
        """The server half after a round in which some answers were changed."""
        strategy = copy.copy(self.before[round])
        strategy.state, strategy.roster = copy.deepcopy(strategy.state), copy.deepcopy(strategy.roster)
        grid = Replayed(self.answers, self.clients, changes)
        strategy.go(grid, round)
        return strategy

    def without(self, place: Place) -> State:
        """The state after a round in which there was no answer at a place."""
        if place not in self._silent:
            self._silent[place] = self.after(place[0], {place: silence}).state
        found: State = self._silent[place]
        return found


# ---- changes

TEXTS = st.sampled_from(
    [*"x01", "", "..", "a/b", "../../up", "\0", "nan", "float32,-1", "float32,99999999999999", "complex64,2"]
    + ["x" * 10_000, "true", "{}", "[]", "null", '{"groups": 1}']
)
WHOLE = st.sampled_from([0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**62, -(2**62)])
REAL = st.sampled_from([0.0, -1.0, 0.5, 1.5, 1e30, 1e308, -1e308, float("nan"), float("inf"), -float("inf")])
SCALARS = st.one_of(TEXTS, WHOLE, REAL, st.booleans(), st.binary(max_size=4))
FIELDS = st.one_of(SCALARS, st.lists(WHOLE, max_size=4), st.lists(REAL, max_size=4), st.lists(TEXTS, max_size=4))
NUMBERS = st.one_of(WHOLE, REAL, st.lists(WHOLE, max_size=4), st.lists(REAL, max_size=4))
DTYPES = st.sampled_from(
    ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", ">f4", "<f4", "complex64", "object"]
    + ["O", "V8", "U3", "datetime64[s]", "no such", "float32,float32"]
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 10, -1, 2**20, 2**40, 2**63]), max_size=5).map(tuple)
STYPES = st.sampled_from([STYPE, "numpy.ndarray", "", "pickle"])
VALUES = st.sampled_from([np.nan, np.inf, -np.inf, 0, 1, -1, 1e4, -1e6, 1e8, 1e15, 1e30, 1e38])


def _one(record: Any, pick: int) -> str:
    names = sorted(record)
    return str(names[pick % len(names)]) if names else "x"


def _field(kind: type[Any], value: Any, pick: int, content: RecordDict) -> None:
    """Set, add or (for None) take away a field of a record of text or numbers."""
    names = [name for name in sorted(content) if isinstance(content[name], kind)]
    if names:
        record: Any = content[names[pick % len(names)]]
        key = _one(record, pick // 7)
        if value is None:
            record.pop(key, None)
        else:
            record[key] = value


def _record(value: Any, pick: int, content: RecordDict) -> None:
    """Take a whole record away, or put another kind in its place."""
    name = _one(content, pick)
    content.pop(name, None)
    if value is not None:
        content[name] = value


def _array(change: Callable[[Array, Any], Array], value: Any, pick: int, content: RecordDict) -> None:
    groups = [name for name in sorted(content) if isinstance(content[name], ArrayRecord)]
    if groups:
        group: Any = content[groups[pick % len(groups)]]
        if key := _one(group, pick // 3):
            group.__dict__["_data"][key] = change(group[key], value) if key in group else Array(np.zeros(2))


def _filled(array: Array, value: float) -> Array:
    found = decode_arrays(ArrayRecord({"a": array}))["a"].copy()
    with np.errstate(all="ignore"):
        found.flat[: max(1, found.size // 2)] = np.array(value).astype(found.dtype)
    return encode_arrays({"a": found})["a"]


def _renamed(value: Any, pick: int, content: RecordDict) -> None:
    groups = [name for name in sorted(content) if isinstance(content[name], ArrayRecord)]
    if groups:
        group: Any = content[groups[pick % len(groups)]]
        taken = group.pop(_one(group, pick // 3), None)
        if value and taken is not None:
            group[value] = taken


_CHANGES = st.one_of(
    st.tuples(st.just(partial(_field, ConfigRecord)), st.one_of(st.none(), FIELDS)),
    st.tuples(st.just(partial(_field, MetricRecord)), st.one_of(st.none(), NUMBERS)),
    st.tuples(
        st.just(_record),
        st.sampled_from([None, ConfigRecord({"x": 1}), MetricRecord({"x": 1}), ArrayRecord({"x": Array(np.ones(2))})]),
    ),
    st.tuples(st.just(partial(_array, lambda a, v: Array(v, a.shape, a.stype, a.data))), DTYPES),
    st.tuples(st.just(partial(_array, lambda a, v: Array(a.dtype, v, a.stype, a.data))), SHAPES),
    st.tuples(st.just(partial(_array, lambda a, v: Array(a.dtype, v, a.stype, b""))), SHAPES),
    st.tuples(st.just(partial(_array, lambda a, v: Array(a.dtype, a.shape, v, a.data))), STYPES),
    st.tuples(st.just(partial(_array, lambda a, v: Array(a.dtype, a.shape, a.stype, a.data[:v]))), WHOLE),
    st.tuples(
        st.just(partial(_array, lambda a, v: Array(np.resize(decode_arrays(ArrayRecord({"a": a}))["a"], v)))),
        st.sampled_from([(0,), (1,), (2, 3), (64, 10), (1, 64), ()]),
    ),
    st.tuples(st.just(partial(_array, _filled)), VALUES),
    st.tuples(st.just(_renamed), st.one_of(st.none(), TEXTS)),
)


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """One change of an answer, or two; what Flower's own records refuse is left as it is."""
    chosen = draw(st.lists(st.tuples(_CHANGES, st.integers(0, 10**4)), min_size=1, max_size=2))

    def change(content: RecordDict) -> None:
        for (kind, value), pick in chosen:
            try:
                kind(value, pick, content)
            except (TypeError, ValueError, OverflowError):
                continue

    return change
