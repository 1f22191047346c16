"""Random changes of a client's answer."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fedhet.errors import FedhetError
from fedhet.flower import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from fedhet.flower.messages import STYPE, decode_arrays, encode_arrays

Change = Callable[[RecordDict], None]
Kind = tuple[Callable[[Any, int, RecordDict], None], Iterable[Any]]
"""A change by a value, and a number that picks a place where there are several; and the values that are tried."""

TEXTS = (
    *("", "x", "0", "1", "..", "a/b", "../../up", "\0", "true", "{}", "[]", "null", "x" * 10_000),
    *("nan", "float32,-1", "float32,99999999999999", "complex64,2", '{"groups": 1}'),
)
WHOLE = (0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**62, -(2**62))
REAL = (0.0, -1.0, 0.5, 1.5, 1e30, 1e308, -1e308, math.nan, math.inf, -math.inf)
NUMBERS: tuple[list[Any], ...] = ([], [1], [2, 1], [2**62, -1], [0.5], [0.5, 1.5], [math.nan, math.inf])
LISTS: tuple[list[Any], ...] = (*NUMBERS, ["x"], ["", "a/b"])
DTYPES = (
    *("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64", "object"),
    *(">f4", "<f4", "O", "V8", "U3", "datetime64[s]", "no such", "float32,float32"),
)
SHAPES = ((), (0,), (1,), (-1,), (2, 10), (2**20,), (2**40,), (2**63,), (0, 2**40), (2**32, 2**32), (1,) * 40)
STYPES = (STYPE, "numpy.ndarray", "", "pickle")
VALUES = (math.nan, math.inf, -math.inf, 0, 1, -1, 12, 100, 1e4, -1e6, 1e8, 1e15, 1e30, 1e38)
RECORDS = (None, ConfigRecord({"x": 1}), MetricRecord({"x": 1}), ArrayRecord({"x": Array(np.ones(2))}))


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a record, to be changed without Flower looking at each."""
    return record.__dict__["_data"]


def _one(names: Iterable[str], pick: int) -> str:
    known = sorted(names)
    return known[pick % len(known)] if known else "x"


def _set(record: Any, key: str, value: Any) -> None:
    """Set, add or (for None) take away a field."""
    if value is None:
        record.pop(key, None)
    else:
        record[key] = value


def _of(kind: type[Any], pick: int, content: RecordDict) -> Any:
    """One of the records of a kind; an empty one that is not in the content where there is none."""
    names = [name for name, record in content.items() if isinstance(record, kind)]
    return content[_one(names, pick)] if names else kind()


def _field(kind: type[Any], value: Any, pick: int, content: RecordDict) -> None:
    record = _of(kind, pick, content)
    _set(record, _one(record, pick // 7), value)


def _record(value: Any, pick: int, content: RecordDict) -> None:
    """Take a whole record away, or put another kind in its place."""
    name = _one(content, pick)
    content.pop(name, None)
    _set(content, name, value)


def _array(change: Callable[[Array, Any], Array], value: Any, pick: int, content: RecordDict) -> None:
    group = _of(ArrayRecord, pick, content)
    key = _one(group, pick // 3)
    fields_of(group)[key] = change(group[key], value) if key in group else Array(np.zeros(2))


def _content(array: Array) -> np.ndarray[Any, Any]:
    return decode_arrays(ArrayRecord({"a": array}))["a"]


def _filled(array: Array, value: float) -> Array:
    found = _content(array).copy()
    with np.errstate(all="ignore"):
        found.flat[: max(1, found.size // 2)] = np.array(value).astype(found.dtype)
    return encode_arrays({"a": found})["a"]


def _cast(array: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        return encode_arrays({"a": _content(array).astype(dtype)})["a"]


def _renamed(value: Any, pick: int, content: RecordDict) -> None:
    group = _of(ArrayRecord, pick, content)
    taken = group.pop(_one(group, pick // 3), None)
    if value and taken is not None:
        group[value] = taken


_ANY: tuple[Kind, ...] = (
    (partial(_field, ConfigRecord), (None, *TEXTS, *WHOLE, *REAL, True, b"x", *LISTS)),
    (partial(_field, MetricRecord), (None, *WHOLE, *REAL, *NUMBERS)),
    (_record, RECORDS),
    (partial(_array, lambda a, v: Array(v, a.shape, a.stype, a.data)), DTYPES),
    (partial(_array, _cast), DTYPES[:8]),
    (partial(_array, lambda a, v: Array(a.dtype, v, a.stype, a.data)), SHAPES),
    (partial(_array, lambda a, v: Array(a.dtype, v, a.stype, b"")), SHAPES),
    (partial(_array, lambda a, v: Array(a.dtype, a.shape, v, a.data)), STYPES),
    (partial(_array, lambda a, v: Array(a.dtype, a.shape, a.stype, a.data[:v])), WHOLE),
    (partial(_array, lambda a, v: Array(np.resize(_content(a), v))), ((0,), (1,), (2, 3), (64, 10), (1, 64), ())),
    (partial(_array, _filled), VALUES),
    (_renamed, (None, *TEXTS)),
)


def _drawn(kinds: Sequence[Kind]) -> st.SearchStrategy[Change]:
    changed = (st.sampled_from([partial(kind, value) for value in values]) for kind, values in kinds)
    return st.tuples(st.one_of(*changed), st.integers(0, 999)).map(lambda drawn: partial(drawn[0], drawn[1]))


_ONE = _drawn(_ANY)


def changes() -> st.SearchStrategy[Change]:
    """One change of an answer, or two; what Flower's own records refuse is left as it is."""
    # A list of one or two takes hypothesis twice as long.
    return st.tuples(_ONE, st.none() | _ONE).map(lambda chosen: _applied([one for one in chosen if one]))


def _applied(chosen: Sequence[Change]) -> Change:
    """Several changes as one; what Flower's own records refuse is left as it is."""

    def change(content: RecordDict) -> None:
        for one in chosen:
            with contextlib.suppress(TypeError, ValueError, OverflowError, FedhetError):
                one(content)

    return change
