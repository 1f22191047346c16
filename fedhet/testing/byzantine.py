"""Byzantine replies: those of a recorded run, changed at random, for a server half that talks with nobody.

A `Recording` holds what the clients of an ordinary run answered. A server half gets these answers again, one of them
changed, and goes through greeting, opening, checking and aggregation without anybody training.
"""

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedhet import population
from fedhet.engines.grid import FIRST_NODE, LocalGrid
from fedhet.errors import FedhetError
from fedhet.flower import STYPE, decode_arrays, encode_arrays, read_request
from fedhet.flower.insides import copy_of, fields_of, identify
from fedhet.server import FederatedStrategy, State
from fedhet.testing.faults import where
from fedhet.testing.ordinary import differing
from fedhet.testing.runs import PARTIAL, Case, Run
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
        place = (*where(message), read_request(message.content)[0].question, client)
        try:
            content = self._answer(place)
            self._changes.get(place, bool)(content)
            reply = Message(content, reply_to=message)
        except LookupError as error:
            reply = Message(Error(2, str(error)), reply_to=message)
        identify(reply, self._ids)
        return reply

    def _answer(self, place: Place) -> RecordDict:
        """The recorded reply; the first weights are the same of all, and were asked of one."""
        if place in self._answers or place[2] != FIRST:
            return _copied(self._answers[place])
        other = next(each for each in self._answers if each[2] == FIRST)
        content, own = _copied(self._answers[other]), self._answers[0, "query", GREET, place[3]]
        content["report"], content["metrics"] = ConfigRecord({"client": place[3]}), own["metrics"]
        return content


def _copied(content: RecordDict) -> RecordDict:
    copied = RecordDict()
    for name, record in content.items():
        copied[name] = copy_of(record)
    return copied


@dataclass
class Recording:
    """The recorded replies of a run's clients, and the server's side as it was before each round.

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
            client = str(reply.content["report"]["client"])
            answers[round, kind, read_request(sent)[0].question, client] = reply.content
        config = case.config(PARTIAL)
        strategy = case.server(config, shared=population.shared_pool(config))
        recording = cls(answers, config.clients)
        for _ in run.rows:
            recording.before.append(strategy)
            strategy = recording.after(len(recording.before) - 1, {})
        return recording

    @property
    def names(self) -> set[str]:
        """Of the clients."""
        return {client for *_, client in self.answers}

    def after(self, round: int, changes: Mapping[Place, Change], start: Strategy | None = None) -> Strategy:
        """The server half after a round in which some answers were changed.

        Args:
            round: its number.
            changes: of answers in it.
            start: the server half before it; as it was recorded, if left out.
        """
        strategy = copy.copy(start or self.before[round])
        strategy.state, strategy.roster = strategy.state.aside(), copy.copy(strategy.roster)
        strategy.state.clients = {name: copy.copy(record) for name, record in strategy.state.clients.items()}
        for name, value in vars(strategy.roster).items():
            setattr(strategy.roster, name, copy.copy(value))
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

TEXTS = (
    *("", "x", "0", "1", "..", "a/b", "../../up", "\0", "true", "{}", "[]", "null", "x" * 10_000),
    *("nan", "float32,-1", "float32,99999999999999", "complex64,2", '{"groups": 1}'),
)
WHOLE = (0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**62, -(2**62))
REAL = (0.0, -1.0, 0.5, 1.5, 1e30, 1e308, -1e308, math.nan, math.inf, -math.inf)
LISTS: tuple[list[Any], ...] = (
    [],
    [1],
    [2, 1],
    [2**62, -1],
    [0.5],
    [0.5, 1.5],
    [math.nan, math.inf],
    ["x"],
    ["", "a/b"],
)
DTYPES = (
    *("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64", "object"),
    *(">f4", "<f4", "O", "V8", "U3", "datetime64[s]", "no such", "float32,float32"),
)
SHAPES = ((), (0,), (1,), (-1,), (2, 10), (2**20,), (2**40,), (2**63,), (0, 2**40), (2**32, 2**32), (1,) * 40)
STYPES = (STYPE, "numpy.ndarray", "", "pickle")
VALUES = (math.nan, math.inf, -math.inf, 0, 1, -1, 12, 100, 1e4, -1e6, 1e8, 1e15, 1e30, 1e38)
RECORDS = (None, ConfigRecord({"x": 1}), MetricRecord({"x": 1}), ArrayRecord({"x": Array(np.ones(2))}))


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
            fields_of(group)[key] = change(group[key], value) if key in group else Array(np.zeros(2))


def _filled(array: Array, value: float) -> Array:
    found = decode_arrays(ArrayRecord({"a": array}))["a"].copy()
    with np.errstate(all="ignore"):
        found.flat[: max(1, found.size // 2)] = np.array(value).astype(found.dtype)
    return encode_arrays({"a": found})["a"]


def _cast(array: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        return encode_arrays({"a": decode_arrays(ArrayRecord({"a": array}))["a"].astype(dtype)})["a"]


def _renamed(value: Any, pick: int, content: RecordDict) -> None:
    groups = [name for name in sorted(content) if isinstance(content[name], ArrayRecord)]
    if groups:
        group: Any = content[groups[pick % len(groups)]]
        taken = group.pop(_one(group, pick // 3), None)
        if value and taken is not None:
            group[value] = taken


def _shaped(array: Array, shape: tuple[int, ...]) -> Array:
    return Array(np.resize(decode_arrays(ArrayRecord({"a": array}))["a"], shape))


_KINDS: tuple[tuple[Callable[[Any, int, RecordDict], None], tuple[Any, ...]], ...] = (
    (partial(_field, ConfigRecord), (None, *TEXTS, *WHOLE, *REAL, True, b"x", *LISTS)),
    (partial(_field, MetricRecord), (None, *WHOLE, *REAL, *LISTS[:7])),
    (_record, RECORDS),
    (partial(_array, lambda a, v: Array(v, a.shape, a.stype, a.data)), DTYPES),
    (partial(_array, _cast), DTYPES[:8]),
    (partial(_array, lambda a, v: Array(a.dtype, v, a.stype, a.data)), SHAPES),
    (partial(_array, lambda a, v: Array(a.dtype, v, a.stype, b"")), SHAPES),
    (partial(_array, lambda a, v: Array(a.dtype, a.shape, v, a.data)), STYPES),
    (partial(_array, lambda a, v: Array(a.dtype, a.shape, a.stype, a.data[:v])), WHOLE),
    (partial(_array, _shaped), ((0,), (1,), (2, 3), (64, 10), (1, 64), ())),
    (partial(_array, _filled), VALUES),
    (_renamed, (None, *TEXTS)),
)
_CHANGES = st.one_of(*(st.sampled_from([partial(kind, value) for value in values]) for kind, values in _KINDS))
_ONE = st.tuples(_CHANGES, st.integers(0, 999))
_ONE_OR_TWO = st.tuples(_ONE, st.none() | _ONE)  # a list of them takes hypothesis twice as long


def changes() -> st.SearchStrategy[Change]:
    """One change of an answer, or two; what Flower's own records refuse is left as it is."""
    return _ONE_OR_TWO.map(lambda chosen: applied([partial(one, pick) for one, pick in filter(None, chosen)]))


def applied(chosen: Sequence[Change]) -> Change:
    """Several changes as one; what Flower's own records refuse is left as it is."""

    def change(content: RecordDict) -> None:
        for one in chosen:
            with contextlib.suppress(TypeError, ValueError, OverflowError, FedhetError):
                one(content)

    return change


# ---- the attack


def attack(recording: Recording, examples: int, *, repeat: bool = True) -> Counter[str]:
    """Change one answer after the other; no change may end the run, and a refusal comes to the same as silence.

    Args:
        recording: of a run.
        examples: how many changes are tried.
        repeat: whether they are the same in every call.

    Returns:
        How many answers were `refused`, and how many `taken`.
    """
    found, places = Counter[str](), list(recording.answers)

    @reproducible(examples, repeat=repeat)
    @given(st.sampled_from(places), changes())
    def one(place: Place, change: Change) -> None:
        strategy = recording.after(place[0], {place: change})
        strategy.matrices()
        admitted = not place[0] and place[3] in strategy.state.clients  # and perhaps refused later in the same round
        if any(strategy.roster.refused.values()):  # it goes by the name of another, who is refused with it
            found["refused"] += 1
        elif admitted or all(client != place[3] and client in recording.names for client in strategy.failed):
            found["taken"] += 1
            assert not infinite(strategy.state)
        else:
            found["refused"] += 1
            assert differing(recording.without(place), strategy.state) == []

    one()
    return found


def two_changes(rounds: int) -> Callable[[Callable[[dict[int, Change]], None]], Callable[[], None]]:
    """A test of changes in two of the rounds, which is called five times."""
    numbers = st.integers(1, rounds)
    drawn = st.dictionaries(numbers, changes(), min_size=2, max_size=2)
    return lambda test: reproducible(5, repeat=False)(given(drawn)(test))


def reproducible(examples: int, *, repeat: bool) -> settings:
    """So many examples, the same in every call if they are to `repeat`."""
    return settings(
        max_examples=examples,
        derandomize=repeat,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def infinite(state: State) -> list[str]:
    """The places of a state that hold NaN or infinity."""
    groups = {name: value for name, value in vars(state).items() if isinstance(value, dict)}
    arrays = {f"{name}/{key}": array for name, group in groups.items() for key, array in flat(group)}
    return [place for place, array in arrays.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]


def flat(group: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """All arrays of nested groups."""
    for key, value in group.items():
        if isinstance(value, np.ndarray):
            yield key, value
        elif isinstance(value, dict):
            yield from ((f"{key}/{inner}", array) for inner, array in flat(value))
