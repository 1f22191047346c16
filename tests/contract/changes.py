"""Changes of a client's answer, drawn at random: of any record, and of what a handshake says."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fedhet.errors import FedhetError
from fedhet.flower import (
    STYPE,
    Array,
    ArrayRecord,
    ConfigRecord,
    MetricRecord,
    RecordDict,
    decode_arrays,
    encode_arrays,
)

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


# ---- of what a handshake says: it adds fields, names arrays that nobody has, and claims the names of others

NAMES = (
    *("public", "Models", ".hidden", "global", "..", "con", "a/b", "a b", " a", "é" * 100, "é" * 101, "x" * 200),
    *("\u202ekrow", "\x1b[2J", "\ud800", "$^$", "=1+1", "0", "1", "2", "3", "٣", "²"),
)
"""Names of clients, of which some are those of others."""

KEYS = (
    *("zz", "", "\ud800", "\x1b[31m", "x" * 3000, "a/b", "__metadata__", "head.weight", "body.1.weight"),
    *("embedding.steps.0.x", "embedding.zz", "latents.weight.zz", "tiles.tile", "heads.zz.weight.base", "heads"),
    *("heads.l.weight.bias", "heads.l.weight.dense", "heads.l.weight.left", "heads.l.weight.zz", "num_batches_tracked"),
)
"""Names of arrays that are shared."""

SENT_SHAPES = (
    *("", ",", ",0", ",1000000000,0", ",0,1000000000", ",-1", ",1e3", ",²", ",1.5", ",00", ",1", ",7", ",3,3"),
    *(",1,1,1", ",2000000,100000", f",{2**62},{2**62}", f",{10**30}", ",1" * 32, ",1" * 33, ",2,3,4,5,6"),
)
SENT_DTYPES = ("float32", "float16", "float64", "int64", "bool", "bfloat16", "complex64", "object", "")
"""Shapes and dtypes as they travel."""

FIELDS: dict[str, tuple[Any, ...]] = {
    "client": (*NAMES, None, 1, b"x", ["0"], 2.5),
    "metric": ("auc", "r2", "loss", "", "\x1b", "x" * 201, None, 3),
    "labels": (0, -1, 2, 65536, 65537, 2**62, True, 1.0, "1", None),
    "architecture": (*NAMES, "mlp", "cnn-1-1", "torchvision/resnet18", "torchvision/nosuch", "os:system", "x" * 201, 7),
    "partition": ([0, 1], [0, 0], [7, 10**15], [99, 100], [1, 0], [-1, 3], [0.5, 1.5], [1], [], "0,1", [0] * 10_000),
    "own-data": (True, 1, "true", None),
    "public": (*NAMES, "0" * 64, None, 5),
    "public dataset-size": (0, 1, 7, -1, 2**62, 1.5, "8", None),
    "device": ("\x1b]0;x\x07", "x" * 201, "gpu\n", "a device", 1),
    "note": ("\x1b[2J", "a\nb", "a note", "x" * 201, b"x"),
    "lost-state": (0, 3, -7, 2**62, "x", True),
    "refusal": ("no", "", "x" * 10_000, "\x1b[2J", 7),
    "lost": (True, "true"),
}
"""The fields of a report, and what each is set to; None takes it away."""

OWN_VALUES: tuple[Any, ...] = (
    *(None, True, False, b"x", 0.5, [b"x"], [True, False], ["\x1b"], ["x"] * 3, list(range(300)), [0] * 70_000),
    *("[" * 10_000, '{"groups": [], "axes": {}, "fixed": ["x"], "tied": {}}', "x" * 2**20),
    *(*TEXTS, *WHOLE, *REAL, *LISTS),
)
"""A method's own value."""


def _named(kind: type[Any], name: str, choice: tuple[str, Any], pick: int, content: RecordDict) -> None:
    """Set or take away a field of the record of this name, which is made if need be; one that is there for ''."""
    if not isinstance(content.get(name), kind):
        content[name] = kind()
    record, (key, value) = content[name], choice
    _set(record, key or _one(record, pick), value)


def shared(content: RecordDict) -> list[str]:
    """The names of the fields by which a report says which arrays are shared, sorted."""
    report = content.get("report")
    return sorted(key for key in report if key.startswith("spec.")) if isinstance(report, ConfigRecord) else []


def _specified(choice: tuple[str | None, str, str], pick: int, content: RecordDict) -> None:
    """Dtype and shape of an array that is shared; for None of one that is there."""
    key, dtype, shape = choice
    field = _one(shared(content), pick) if key is None else f"spec.{key}"
    _named(ConfigRecord, "report", (field, dtype + shape), pick, content)


def _fewer(part: float, pick: int, content: RecordDict) -> None:
    keys = shared(content)
    for key in keys[math.floor(part * len(keys)) :]:
        del content["report"][key]


def _many(count: int, pick: int, content: RecordDict) -> None:
    if shared(content):  # Flower looks at each field for a thousand times as long
        fields_of(content["report"]).update({f"spec.tiny.{number}": "float32" for number in range(count)})


def _added(choice: tuple[str, str, tuple[int, ...], str, float], pick: int, content: RecordDict) -> None:
    name, key, shape, dtype, value = choice
    content[name] = encode_arrays({key: np.full(shape, value, dtype)})


_WHAT = ("", "types", "edges", "unknown", "slots", "groups", "classes", "width", "reference", "blocks", "chosen")
_MEASURED = (
    *("num-examples", "test-examples", "validation-examples", "train-loss", "steps", "received-metric", "zz-metric"),
)
_ARRAYS = (
    ("model", "probe", "alignment", "zz", "values"),
    ("values", "exponent", "angles", "divergences", "zz"),
    ((), (0,), (1,), (1, 1), (256, 3)),
    ("float16", "float32", "int8", "int16"),
    (0.0, 1.0, -1.0, 100.0),
)
_HANDSHAKE: tuple[Kind, ...] = (
    *((_specified, product(keys, ["float32"], SENT_SHAPES)) for keys in (KEYS, [None])),
    *((_specified, product(keys, SENT_DTYPES, SENT_SHAPES)) for keys in (KEYS, [None])),
    (partial(_named, ConfigRecord, "report"), [(key, value) for key, values in FIELDS.items() for value in values]),
    (_fewer, (0.0, 0.5, 0.9)),
    (_many, (1, 500, 2**15 + 1)),
    (partial(_named, ConfigRecord, "values"), product(_WHAT, OWN_VALUES)),
    (partial(_named, MetricRecord, "metrics"), product(_MEASURED, (*WHOLE, *REAL, *NUMBERS))),
    (_added, product(*_ARRAYS)),
)
_OF_HANDSHAKE = st.one_of(_drawn(_HANDSHAKE), changes())


def handshakes() -> st.SearchStrategy[Change]:
    """One change of a handshake, or up to three."""
    return st.lists(_OF_HANDSHAKE, min_size=1, max_size=3).map(_applied)
