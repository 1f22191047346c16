"""Byzantine handshakes: what one client says of itself in its greeting, changed at random, among honest clients.

Unlike a reply to training, which is checked against the greeting, a greeting is checked against nothing but itself and
those of the others: it adds fields, names arrays that nobody has, and claims the names of others.
"""

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedhet.errors import FedhetError
from fedhet.flower import encode_arrays
from fedhet.flower.insides import fields_of
from fedhet.testing.byzantine import (
    LISTS,
    REAL,
    TEXTS,
    WHOLE,
    Change,
    Place,
    Recording,
    Strategy,
    applied,
    changes,
    infinite,
    reproducible,
)
from fedhet.wire.protocol import GREET

NAMES = (
    *("pools", "Models", ".hidden", "global", "..", "con", "a/b", "a b", " a", "é" * 100, "é" * 101, "x" * 200),
    *("\u202ekrow", "\x1b[2J", "\ud800", "$^$", "=1+1", "0", "1", "2", "3", "٣", "²"),
)
"""Names of clients, of which some are those of others."""

KEYS = (
    *("zz", "", "\ud800", "\x1b[31m", "x" * 3000, "a/b", "__metadata__", "head.weight", "body.1.weight"),
    *("embedding.steps.0.x", "embedding.zz", "latents.weight.zz", "tiles.tile", "heads.zz.weight.base", "heads"),
    *("heads.l.weight.bias", "heads.l.weight.dense", "heads.l.weight.left", "heads.l.weight.zz", "num_batches_tracked"),
)
"""Names of arrays that are shared."""

SHAPES = (
    *(
        "",
        ",",
        ",0",
        ",1000000000,0",
        ",0,1000000000",
        ",-1",
        ",1e3",
        ",²",
        ",1.5",
        ",00",
        ",1",
        ",7",
        ",3,3",
        ",1,1,1",
    ),
    *(",2000000,100000", f",{2**62},{2**62}", f",{10**30}", ",1" * 32, ",1" * 33, ",2,3,4,5,6"),
)
"""Shapes as they travel."""

DTYPES = ("float32", "float16", "float64", "int64", "bool", "bfloat16", "complex64", "object", "")

VALUES: tuple[Any, ...] = (
    *(None, True, False, b"x", 0.5, [b"x"], [True, False], ["\x1b"], ["x"] * 3, list(range(300)), [0] * 70_000),
    *(
        "[" * 10_000,
        '{"groups": [], "axes": {}, "fixed": ["x"], "tied": {}}',
        "x" * 2**20,
        *TEXTS,
        *WHOLE,
        *REAL,
        *LISTS,
    ),
)
"""What a field may hold; None takes it away."""

FIELDS: dict[str, tuple[Any, ...]] = {
    "client": (*NAMES, None, 1, b"x", ["0"], 2.5),
    "metric": ("auc", "r2", "loss", "", "\x1b", "x" * 201, None, 3),
    "labels": (0, -1, 2, 65536, 65537, 2**62, True, 1.0, "1", None),
    "architecture": (*NAMES, "mlp", "cnn-1-1", "torchvision/resnet18", "torchvision/nosuch", "os:system", "x" * 201, 7),
    "partition": ([0, 1], [0, 0], [7, 10**15], [99, 100], [1, 0], [-1, 3], [0.5, 1.5], [1], [], "0,1", [0] * 10_000),
    "own-data": (True, 1, "true", None),
    "pool": (*NAMES, "0" * 64, None, 5),
    "pool-size": (0, 1, 7, -1, 2**62, 1.5, "8", None),
    "device": ("\x1b]0;x\x07", "x" * 201, "gpu\n", "a device", 1),
    "note": ("\x1b[2J", "a\nb", "a note", "x" * 201, b"x"),
    "lost-state": (0, 3, -7, 2**62, "x", True),
    "refusal": ("no", "", "x" * 10_000, "\x1b[2J", 7),
    "lost": (True, "true"),
}
"""The fields of a report, and what each is set to."""

MEASURED = (
    "num-examples",
    "test-examples",
    "validation-examples",
    "train-loss",
    "steps",
    "received-metric",
    "zz-metric",
)


def _said(content: RecordDict) -> ConfigRecord:
    report = content.get("report")
    return report if isinstance(report, ConfigRecord) else ConfigRecord()


def _set(record: Any, key: str, value: Any) -> None:
    if value is None:
        record.pop(key, None)
    else:
        record[key] = value


def _field(choice: tuple[str, Any]) -> Change:
    return lambda content: _set(_said(content), *choice)


def _specification(choice: tuple[str, str, str]) -> Change:
    key, dtype, shape = choice
    return lambda content: _set(_said(content), f"spec.{key}", dtype + shape)


def _other_shape(choice: tuple[int, str, str]) -> Change:
    pick, dtype, shape = choice

    def change(content: RecordDict) -> None:
        if keys := sorted(key for key in _said(content) if key.startswith("spec.")):
            _set(_said(content), keys[pick % len(keys)], dtype + shape)

    return change


def _fewer(part: float) -> Change:
    def change(content: RecordDict) -> None:
        keys = sorted(key for key in _said(content) if key.startswith("spec."))
        for key in keys[math.floor(part * len(keys)) :]:
            del content["report"][key]

    return change


def _many(count: int) -> Change:
    def change(content: RecordDict) -> None:
        if fields := fields_of(_said(content)):  # Flower looks at each field for a thousand times as long
            fields.update({f"spec.tiny.{number}": "float32" for number in range(count)})

    return change


def _value(choice: tuple[int, str, Any]) -> Change:
    """Another value of the method's own, or one that it does not ask for."""
    pick, name, value = choice

    def change(content: RecordDict) -> None:
        if not isinstance(content.get("values"), ConfigRecord):
            content["values"] = ConfigRecord({})
        known = sorted(content["values"])
        _set(content["values"], name or (known[pick % len(known)] if known else "x"), value)

    return change


def _measured(choice: tuple[str, Any]) -> Change:
    def change(content: RecordDict) -> None:
        if isinstance(metrics := content.get("metrics"), MetricRecord):
            _set(metrics, *choice)

    return change


def _arrays(choice: tuple[str, str, tuple[int, ...], str, float]) -> Change:
    name, key, shape, dtype, value = choice
    return lambda content: content.update({name: encode_arrays({key: np.full(shape, value, dtype)})})


_WHAT = ("", "types", "edges", "unknown", "slots", "groups", "classes", "width", "reference", "blocks", "chosen")
_CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.tuples(st.sampled_from(KEYS), st.just("float32"), st.sampled_from(SHAPES)).map(_specification),
    st.tuples(st.integers(0, 99), st.just("float32"), st.sampled_from(SHAPES)).map(_other_shape),
    st.sampled_from([(field, value) for field, values in FIELDS.items() for value in values]).map(_field),
    st.tuples(st.sampled_from(KEYS), st.sampled_from(DTYPES), st.sampled_from(SHAPES)).map(_specification),
    st.tuples(st.integers(0, 99), st.sampled_from(DTYPES), st.sampled_from(SHAPES)).map(_other_shape),
    st.sampled_from((0.0, 0.5, 0.9)).map(_fewer),
    st.sampled_from((1, 500, 2**15 + 1)).map(_many),
    st.tuples(st.integers(0, 9), st.sampled_from(_WHAT), st.sampled_from(VALUES)).map(_value),
    st.tuples(st.sampled_from(MEASURED), st.sampled_from((*WHOLE, *REAL, *LISTS[:7]))).map(_measured),
    st.tuples(
        st.sampled_from(("model", "probe", "alignment", "heat", "zz", "values")),
        st.sampled_from(("fine", "coarse", "steps", "exponent", "angles", "divergences", "zz")),
        st.sampled_from(((), (0,), (1,), (1, 1), (256, 3))),
        st.sampled_from(("float16", "float32", "int8", "int16")),
        st.sampled_from((0.0, 1.0, -1.0, 100.0)),
    ).map(_arrays),
    changes(),
)


def greetings() -> st.SearchStrategy[Change]:
    """One change of a greeting, or up to three."""
    return st.lists(_CHANGES, min_size=1, max_size=3).map(applied)


def attack_handshakes(recording: Recording, examples: int, *, repeat: bool = True) -> Counter[str]:
    """Change one client's greeting after the other; none ends the run, and honest clients are admitted.

    After each the first round is gone through with the answers that were recorded, and the state is saved as it is
    after every round.

    Args:
        recording: of a run.
        examples: how many changes are tried.
        repeat: whether they are the same in every call.

    Returns:
        How many clients were `refused`, and how many `admitted`.
    """
    found = Counter[str]()
    places = [place for place in recording.answers if place[:3] == (0, "query", GREET)]

    with tempfile.TemporaryDirectory() as folder:

        @reproducible(examples, repeat=repeat)
        @given(st.sampled_from(places), greetings())
        def one(place: Place, change: Change) -> None:
            strategy = recording.after(0, {place: change})
            _check_admitted(recording, strategy, place[3])
            found["admitted" if place[3] in strategy.roster.nodes else "refused"] += 1
            _check_saved(_round(recording, strategy), Path(folder) / "state.safetensors")

        one()
    return found


def _check_admitted(recording: Recording, strategy: Strategy, byzantine: str) -> None:
    """All others are there, but for those of whom nobody can tell whether they or the Byzantine one are right.

    That is one whose name it claims, and those who have an array that no other honest client has.
    """
    honest = recording.names - {byzantine}
    contested = {name for name in strategy.roster.refused.values() if name}
    keys = {name: _shared(recording.answers[0, "query", GREET, name]) for name in honest}
    owners = Counter(key for shared in keys.values() for key in shared)
    unsure = {name for name, shared in keys.items() if any(owners[key] == 1 for key in shared)}
    missing = honest - strategy.roster.nodes.keys()
    assert missing <= contested | unsure, strategy.failed


def _shared(content: RecordDict) -> set[str]:
    return {key for key in _said(content) if key.startswith("spec.")}


def _round(recording: Recording, strategy: Strategy) -> Strategy:
    """The server half after the first round; as it was, where no recorded answer is one to what is asked now."""
    try:
        return recording.after(1, {}, strategy)
    except FedhetError as error:
        if "no client did its part in the first round" not in str(error):
            raise
        return strategy


def _check_saved(strategy: Strategy, path: Path) -> None:
    """Check that the state can be written and is finite, and that the report's matrices are JSON."""
    assert infinite(strategy.state) == []
    json.dumps(strategy.matrices(), allow_nan=False).encode()
    strategy.state.save(path)
