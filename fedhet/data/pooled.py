"""A user's examples of all clients together, which the configuration splits among clients like those of a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from fedhet.data.examples import DataSet, Examples, Indices, Owners
from fedhet.data.names import CLASSES, COLUMNS, Names, check_distinct
from fedhet.data.naming import names_of
from fedhet.data.own import aligned, examples_of
from fedhet.data.partitions import proportional_sample, size_of_part, with_drawn_test_set
from fedhet.data.reading import IDENTIFIERS, LABELS, LazyInputs, check_finite
from fedhet.errors import DataError, check_list
from fedhet.tasks import Task
from fedhet.utils.files import plain_name
from fedhet.utils.randomness import numpy_generator

TEST_SHARE = 0.2
"""Fraction of test examples if the user gives none and `test-share` is not set."""


@dataclass(frozen=True, eq=False)
class Pooled:
    """Examples of all clients together.

    Attributes:
        train: the examples, without those in `test`.
        test: the test examples; None to draw them from `train`.
        names: the names of classes and columns, if known.
        clients: the names of the clients, if each example belongs to one of them.
        owners: (n,) the number of the client, in `clients`, to which each of the n examples belongs.
        test_owners: the same for the examples in `test`.
        note: what was aligned by name (see `fedhet.data.own.aligned`).
    """

    train: Examples
    test: Examples | None = None
    names: Names = field(default_factory=dict)
    clients: tuple[str, ...] = ()
    owners: Indices | None = None
    test_owners: Indices | None = None
    note: str = ""

    def check_finite(self, owner: int | None = None) -> None:
        """Raise a `DataError` that names the row if examples in memory, or an owner's, have NaN or infinity."""
        columns = self.names.get(COLUMNS, ())
        for name, part, owners in (("", self.train, self.owners), ("test ", self.test, self.test_owners)):
            if part is None:
                continue
            rows: Sequence[int] = range(len(part))
            if owner is not None and owners is not None:
                rows = np.flatnonzero(owners == owner).tolist()
                part = part.subset(owners == owner)
            for kind, values in (("inputs", part.inputs), ("labels", part.labels)):
                if not isinstance(values, LazyInputs):
                    check_finite(values, f"{name}{kind}", rows, columns if kind == "inputs" else ())


@lru_cache(maxsize=4)
def as_dataset(pool: Pooled, seed: int | None, share: float) -> DataSet:
    """Return the examples as a data set, whose test examples are drawn by `seed`; None draws none that are given.

    `share` is the fraction of test examples among those of each client (without owners, among all); 0 stands for the
    number of those given, or for `TEST_SHARE`.
    """
    labels = pool.train.labels
    classes = len(pool.names.get(CLASSES, ()))
    if labels.ndim == 1:
        both = [labels] if pool.test is None else [labels, pool.test.labels]
        classes = max(classes, *(int(part.max()) + 1 for part in both))

    def dataset(train: Examples, test: Examples, groups: Owners | None = None) -> DataSet:
        # Each client infers the task, and its network has the inputs as they are.
        return DataSet("the data", train, test, classes, Task(), (), lambda inputs: inputs, groups=groups)

    if pool.test is not None:
        owners = None
        if pool.owners is not None and pool.test_owners is not None:
            owners = Owners(pool.owners, pool.test_owners)
        given = dataset(pool.train, pool.test, owners)
        return given if seed is None else with_drawn_test_set(given, seed, share, all_labelled=False)
    owned = np.zeros(len(labels), np.int64) if pool.owners is None else pool.owners
    if alone := [name for name, rows in zip(pool.clients, np.bincount(owned), strict=False) if rows < 2]:
        raise DataError(
            f"by_column: client {alone[0]!r} has one row, but needs one to train and one to test: remove it"
        )
    rng = numpy_generator(seed or 0, "test part")
    tested = np.zeros(len(labels), dtype=bool)
    labelled = pool.train.labelled.numpy()
    if not len(labelled):
        raise DataError("data has no labels, so no test examples can be drawn: pass a dict of train and labelled test")
    for owner in range(int(owned.max()) + 1):
        rows = labelled[owned[labelled] == owner]
        size = size_of_part(rows, share or TEST_SHARE)
        tested[rows[proportional_sample(labels[rows], size, rng)]] = True
    groups = None if pool.owners is None else Owners(owned[~tested], owned[tested])
    return dataset(pool.train.subset(~tested), pool.train.subset(tested), groups)


def as_pooled(value: Any) -> Pooled:
    """Convert examples that a user passes in place of a data function; raise a `DataError` if their form is unknown.

    They have a form that a data function may return for a part (see `fedhet.data.own`), except for a `DataLoader`, or
    are a mapping with `train` and `test` of such forms, or of two tables of `by_column`.
    """
    if isinstance(value, Pooled):
        return value
    parts = {"train": value}
    if isinstance(value, Mapping) and value.keys() == {"train", "test"}:
        parts = dict(value)
    if any(isinstance(part, Pooled) for part in parts.values()):
        return _with_test_table(**parts)
    examples: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, DataLoader):
            raise DataError(
                "data is a DataLoader, whose batches cannot be split among clients: pass its dataset, with rows "
                "padded to one length if its collate_fn pads, or a function that returns each client's DataLoader"
            )
        try:
            examples[name] = examples_of(part)
        except TypeError as error:  # numbers, which have no rows
            raise DataError(f"a {type(part).__name__} is no pair (inputs, labels) and no dataset") from error
        if len(examples[name]) < 2:
            raise DataError(f"data has {len(examples[name])} examples, which cannot be split among clients: give more")
    names, note = aligned(examples, {name: names_of(part) for name, part in parts.items()})
    return Pooled(**examples, names=names, note=note)


def _with_test_table(train: Any, test: Any) -> Pooled:
    """Return the rows of two tables of `by_column`, of training and of test examples."""
    if not (isinstance(train, Pooled) and isinstance(test, Pooled)):
        raise DataError("one of train and test is a fedhet.by_column: give both so, with the same column of clients")
    if others := sorted({*train.clients} ^ {*test.clients}):
        raise DataError(f"train and test must have rows of the same clients, but one of them has none of {others[0]!r}")
    examples = {"train": train.train, "test": test.train}
    names, note = aligned(examples, {"train": train.names, "test": test.names})
    return replace(
        train, train=examples["train"], test=examples["test"], names=names, test_owners=test.owners, note=note
    )


def by_column(frame: Any, column: str, *, label: str | Sequence[str] = "") -> Pooled:
    """Return the rows of a table for the argument `data` of `fedhet.run`: each value of a column is a client.

    Args:
        frame: a pandas data frame, whose other columns are inputs and must be numbers, without identifiers.
        column: the name of the column with the client of each row; its values are the names of the clients.
        label: the name of the column with labels, whose texts are names of classes, or of several columns of numbers;
            by default the one column named `label`, `labels`, `target`, `targets` or `y`.

    Raises:
        DataError: a column is missing, cannot be read or identifies rows.
    """
    columns = [*getattr(frame, "columns", ())]
    if isinstance(frame, Mapping):
        raise DataError("by_column needs one table: for two, pass {'train': by_column(...), 'test': by_column(...)}")
    if not hasattr(frame, "to_numpy"):
        raise DataError(f"by_column needs a data frame, as of pandas, not a {type(frame).__name__}")
    check_distinct("column", columns)
    likely = [name for name in columns if name in LABELS]
    if not isinstance(label, str):
        check_list("label", label, object, "['systolic', 'diastolic']")
    labels = ([label] if isinstance(label, str) else [*label]) if label else likely
    if not label and len(likely) != 1:
        raise DataError(f"by_column: it is unclear which column of {_shown(columns)} is the label: pass label=...")
    if missing := [name for name in (column, *labels) if name not in columns]:
        raise DataError(f"by_column: the table has no column {missing[0]!r}: its columns are {_shown(columns)}")
    inputs = [name for name in columns if name not in (column, *labels)]
    kinds = {name: frame[name].to_numpy().dtype.kind for name in (*inputs, *(labels if len(labels) > 1 else ()))}
    if others := [name for name, kind in kinds.items() if kind not in "biuf"]:
        raise DataError(f"by_column: the columns {_shown(others)} are no numbers: encode or remove them")
    for name in inputs:
        if kinds[name] in "iu" and _identifies(name, frame[name].to_numpy()):
            raise DataError(
                f"by_column: column {name!r} identifies rows: leave it out, or give it as floats if it is an input"
            )
    owners, clients = _owners_of(frame[column].to_numpy(), column)
    # One by one, since missing values of a whole table of pandas have no number.
    values = np.array([frame[name].to_numpy() for name in inputs], dtype=np.float64)
    pair = values.reshape(len(inputs), len(frame)).T, frame[labels if len(labels) > 1 else labels[0]]
    names = {**names_of(pair), COLUMNS: tuple(map(str, inputs))}
    return Pooled(examples_of(pair), names=names, clients=clients, owners=owners)


def _identifies(name: Any, values: Indices) -> bool:
    """Return whether a column of whole numbers has the name of an identifier, or numbers the rows one by one."""
    numbered_rows = len(values) > 1 and len(np.unique(values)) == len(values) == int(np.ptp(values)) + 1
    return numbered_rows or str(name).lower().split("_")[-1] in IDENTIFIERS


def _owners_of(values: Any, column: str) -> tuple[Indices, tuple[str, ...]]:
    if any(value is None or value != value for value in values):
        raise DataError(f"by_column: column {column!r} has missing values: remove these rows, or name their client")
    names, owners = np.unique(values.astype(str), return_inverse=True)
    for name in names.tolist():
        if not plain_name(name):
            raise DataError(f"by_column: {name!r} in column {column!r} cannot name a client's file: rename it")
    return owners.astype(np.int64), tuple(names.tolist())


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(str, names))
