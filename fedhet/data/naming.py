"""Names of classes and columns in the forms of data that users have.

`names_of` returns them, and `named_labels` also the class numbers of labels that are names.
"""

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torch.utils.data.dataloader import default_collate

from fedhet.data.names import CLASSES, COLUMNS, LABEL_COLUMNS, Names, alike, check_distinct, unlike
from fedhet.data.reading import LABELS, pair_of
from fedhet.errors import DataError
from fedhet.utils.statistics import grouped

WORD = "(ix?|id|idx|index|int|num|number|name|str|class|label)"
WHOSE = rf"((my|all|unique|target)_?|{WORD}_?(2|to_?))"
NAMING = rf"_*{WHOSE}?((class|label|categor)(e?s|y|ies)?_?)+(names?|indices|list|map(ping)?|dict|(2|to_?){WORD})?$"
NAMING += "|.*(classes|categories|(class|category|label)_?names)$"  # but `patient_labels` may be of patients
FEW = 8  # number of rows that are compared with those of a table
MOST_CORRELATED = 1000  # number of columns whose correlations are computed: memory grows with its square
COMPARED = 256  # number of rows, at most, whose labels are compared to find out whether a dataset changes them


def names_of(value: Any) -> Names:
    """Return the names of classes and columns in examples `value`, in a form that users have."""
    given = value
    if isinstance(value, Mapping) and value.keys() & {*LABELS}:
        value = pair_of(value, whole=True)
    inputs, labels = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
    parts = inputs if isinstance(inputs, Mapping) and inputs else {"": inputs}
    tables = {f"{COLUMNS}.{part}" if len(parts) > 1 else COLUMNS: table for part, table in parts.items()}
    if len(getattr(labels, "columns", ())) > 1:
        tables[LABEL_COLUMNS] = labels
    columns = {kind: names for kind, table in tables.items() if (names := _printable(_columns(table)))}
    for listed in columns.values():
        check_distinct("column", listed)
    if type(given) is dict:  # with entries as the attributes of scikit-learn's data sets
        given = SimpleNamespace(**{k: given[k] for k in given if k in ("feature_names", "target_names", "classes")})
    features = getattr(given, "feature_names", None)  # of scikit-learn's data sets
    if features is not None and not isinstance(given, Dataset) and np.shape(inputs)[1:] == (len(features),):
        columns.setdefault(COLUMNS, _printable(features))
    classes = named_labels(labels)[0] or _classes(given)
    return columns | ({CLASSES: classes} if classes else {})


def _columns(table: Any) -> Iterable[Any]:
    """Return the names of the columns of a data frame, a table of pyarrow, or an array of xarray with coordinates."""
    if hasattr(table, "to_numpy") and hasattr(table, "columns"):
        return table.columns
    if hasattr(table, "column_names") and hasattr(table, "__array__"):
        return table.column_names
    if hasattr(table, "coords") and np.ndim(table) == 2 and table.dims[1] in table.coords:
        return table.coords[table.dims[1]].values
    return _columns_of_rows(table)


def _columns_of_rows(dataset: Any) -> Iterable[Any]:
    """Return the names of the columns of a dataset's or list's inputs, which are the rows of a table; () if unknown.

    A row is a pandas Series, or is read from the one table that is an attribute of a user's own dataset, or the dataset
    has a list of names, such as `feature_names` or `columns`.
    """
    if isinstance(dataset, Subset | DataLoader):
        return _columns_of_rows(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        members = {_printable(_columns_of_rows(member)) for member in dataset.datasets}
        if len(members - {()}) > 1:
            raise DataError("the members of the ConcatDataset have unlike columns: give all of them the same, in order")
        return members.pop() if len(members) == 1 else ()
    attributes = vars(dataset) if isinstance(dataset, Dataset) and hasattr(dataset, "__len__") else {}
    tables = [table for table in attributes.values() if hasattr(table, "to_numpy") and hasattr(table, "columns")]
    lists = {name: value for name, value in attributes.items() if re.search("col|feat", name) and _is_list(value)}
    if not (tables or lists or isinstance(dataset, list)) or not len(dataset):
        return ()
    rows = [_input(dataset[row]) for row in range(min(len(dataset), FEW))]
    indices = [row.index for row in rows if hasattr(row, "to_numpy") and hasattr(row, "index") and np.ndim(row) == 1]
    if len(indices) == len(rows):  # those of time series can be times, which differ
        return indices[0] if all(index.equals(indices[0]) for index in indices) else ()
    features = {tuple(value) for value in lists.values() if np.shape(rows[0]) == (len(value),)}
    if len(features) == 1 or "feature_names" in lists or len(tables) != 1:
        return features.pop() if len(features) == 1 else ()
    columns = [name for name in tables[0].columns if name not in LABELS]
    orders = [names for names in (columns, columns[:-1], columns[1:]) if np.shape(rows[0]) == (len(names),)]
    if orders:
        rows += [_input(dataset[row]) for row in range(len(rows), min(len(dataset), COMPARED))]
    read = [names for names in orders if _equal(rows, tables[0], names)]
    return read[0] if len(read) == 1 else ()


def _is_list(value: Any) -> bool:
    """Return whether an attribute is a list of names, each once."""
    names = value if isinstance(value, list | tuple) else []
    if getattr(getattr(value, "dtype", None), "kind", "") in ("O", "U", "T") and np.ndim(value) == 1:
        names = value.tolist()
    return bool(names) and all(isinstance(name, str) for name in names) and len({*names}) == len(names)


def _input(row: Any) -> Any:
    try:
        return pair_of(row)[0]
    except DataError:
        return None


def _equal(rows: Sequence[Any], table: Any, names: Sequence[Any]) -> bool:
    """Return whether a table's first rows have the values `rows` in the columns `names`, each column other ones.

    The values may be scaled by column: then each column is known by its correlation with the table's.
    """
    try:
        values = np.stack([np.asarray(row, dtype=np.float64) for row in rows])
        expected = np.asarray(table[[*names]][: len(rows)].to_numpy(), dtype=np.float64)
        told_apart = len(np.unique(expected, axis=1).T) == len(names)  # else their order is unknown
        if values.shape != expected.shape or not told_apart or np.allclose(values, expected):
            return told_apart and values.shape == expected.shape
        if len(rows) < FEW or not 1 < len(names) <= MOST_CORRELATED:
            return False
        with np.errstate(all="ignore"):  # columns may be constant
            correlated = np.corrcoef(expected, values, rowvar=False)[: len(names), len(names) :] > 1 - 1e-5
        return np.array_equal(correlated, np.eye(len(names)))
    except (RuntimeError, TypeError, ValueError):  # texts, no vectors, or values with gradients
        return False


def _printable(names: Iterable[Any]) -> tuple[str, ...]:
    texts = map(str, names)
    return tuple(text if text.isprintable() else repr(text)[1:-1] for text in texts)  # for logs and messages


def named_labels(labels: Any) -> tuple[tuple[str, ...], Any]:
    """Return the names of the classes of a column of labels by number, () without names, and the labels as numbers.

    Labels without names are unchanged. Raises a DataError for texts of which some are missing, or which are numbers.
    """
    columns = [*_columns(labels)] if hasattr(labels, "columns") else []
    labels = labels[columns[0]] if len(columns) == 1 else labels
    if hasattr(labels, "column_name") and hasattr(labels, "source"):  # of a Hugging Face dataset
        feature = (getattr(labels.source, "features", None) or {}).get(labels.column_name)
        if names := _names_of_feature(feature):
            return names, labels
    listed = getattr(getattr(labels, "dtype", None), "categories", ())  # of pandas, or of an `Enum` of polars
    categories = [*listed] if isinstance(listed, Iterable) else []
    if categories and not any(isinstance(category, str) for category in categories):
        return (), labels  # they are the classes themselves
    codes = getattr(labels, "cat", labels)  # a column of pandas has them in its attribute `cat`
    if categories and hasattr(codes, "codes"):
        return _printable(categories), codes.codes
    texts = _texts(labels)
    if texts is None:
        return (), labels
    order = categories or np.unique(texts).tolist()
    places = {name: place for place, name in enumerate(order)}
    return _printable(order), np.array([places[text] for text in texts.tolist()])


def _texts(labels: Any) -> Any:
    """Return labels that are texts as an array (n,), or None for others; raise a DataError if some are missing."""
    listed = isinstance(labels, list | tuple) and len(labels) > 0 and isinstance(labels[0], str | np.str_)
    column = hasattr(labels, "__array__") and not isinstance(labels, Tensor) and np.ndim(labels) == 1
    values = np.asarray(labels if listed or column else ())
    if values.dtype.kind == "S":  # as files of HDF5 have them
        values = np.char.decode(values)
    texts = [value for value in values.tolist() if isinstance(value, str)] if values.dtype.kind in "OUT" else []
    if not texts:
        return None
    if len(texts) < len(values):
        raise DataError("the labels are texts, but some are missing or numbers: remove such rows")
    if all(map(_is_number, {*texts})):
        raise DataError(f"the labels are texts of numbers, such as {texts[0]!r}: convert them, such as by int(label)")
    return np.array(texts)


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def _names_of_feature(feature: Any) -> tuple[str, ...]:
    """Return the names of a `ClassLabel` of Hugging Face's datasets, or of a sequence of such, as of tokens."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return _printable(getattr(feature, "names", None) or ())


def check_index(inputs: Any, labels: Any) -> None:
    """Raise a DataError if pandas tables of inputs and labels have an index in different orders, or of other rows."""
    tables = [*(inputs.values() if isinstance(inputs, Mapping) else [inputs]), labels]
    indices = [table.index for table in tables if hasattr(table, "to_numpy") and hasattr(table, "index")]
    for other in [index for index in indices[1:] if not index.equals(indices[0])]:
        ours, theirs = {*indices[0]}, {*other}
        # A table that was made anew, such as by a scaler, has the default index.
        default = any([*index] == [*range(len(index))] for index in (indices[0], other))
        if ours == theirs or (ours & theirs and not default):
            raise DataError(
                "the index of the labels differs from that of the inputs in its order or rows: give both alike, as "
                "labels.loc[inputs.index], or labels.to_numpy() if they have the order of the inputs' rows"
            )


def _classes(dataset: Any, outer: Sequence[Any] = ()) -> tuple[str, ...]:
    """Return the names of a dataset's classes by number; raise a DataError if its members number them differently.

    Names are unknown, (), if the dataset numbers the classes of what it reads anew. `outer` are the datasets that read
    this one.
    """
    if _reads_as(dataset, Subset):
        return _classes(dataset.dataset, outer)
    if _reads_as(dataset, ConcatDataset):
        members = [_classes(member, outer) for member in dataset.datasets]
        most = max(members, key=len)
        for names in members:
            if not alike(CLASSES, names, most):
                whose = unlike("the classes of a member of the ConcatDataset", names, most)
                raise DataError(f"{whose}: give its members the same numbers, for example by target_transform")
        return most
    if isinstance(dataset, DataLoader):
        rows: Any = dataset.dataset
        names = _classes(rows, outer)
        if names and (collate := dataset.collate_fn) is not default_collate:
            pairs = _pairs(lambda row: (None, pair_of(collate([rows[row]]), whole=True)[1][0]), rows, range(len(rows)))
            names = () if _renumbered(pairs) else names
        return names
    names = _listed_classes(dataset)
    return (() if _numbers_anew(dataset, names, outer) else names) if names else _wrapped_classes(dataset, outer)


def _reads_as(dataset: Any, kind: Any) -> bool:
    """Return whether a dataset is of a `kind` of torch, and reads its rows as this kind does."""
    return isinstance(dataset, kind) and type(dataset).__getitem__ is kind.__getitem__


def _listed_classes(dataset: Any) -> tuple[str, ...]:
    """Return the names of classes by number in a dataset's attributes."""
    if isinstance(features := getattr(dataset, "features", None), Mapping):  # of a Hugging Face dataset
        labels = [features[name] for name in LABELS if name in features]
        return _names_of_feature(labels[0]) if len(labels) == 1 else ()
    if getattr(dataset, "target_transform", None) is not None:  # which can change the numbers
        return ()
    numbers = getattr(dataset, "class_to_idx", None)
    classes = getattr(dataset, "classes", getattr(dataset, "target_names", ()))  # the second of scikit-learn's
    # An array without axes has no length.
    listed = isinstance(classes, Sized) and getattr(classes, "shape", None) != () and len(classes) > 0
    if numbers is None and not listed and isinstance(dataset, Dataset) and isinstance(dataset, Sized):
        classes = _named_classes(dataset)
    if numbers is None and isinstance(classes, Mapping):
        numbers = classes if all(isinstance(name, str) for name in classes) else {n: k for k, n in classes.items()}
    if isinstance(numbers, Mapping):
        names = grouped((number, name) for name, number in numbers.items())
        if {*names} != {*range(len(names))}:  # the user's own numbering, which has gaps
            return ()
        # Several names of one class, such as those of ImageNet's, are one name.
        by_number = [names[number] for number in range(len(names))]
        classes = [same[0] if len(same) == 1 else " or ".join(sorted(map(str, same))) for same in by_number]
    if hasattr(classes, "tolist"):  # an array, such as scikit-learn's `LabelEncoder.classes_`, or a pandas Index
        classes = classes.tolist()
    if not isinstance(classes, list | tuple) or not all(isinstance(name, str | tuple) for name in classes):
        return ()
    return _printable(classes)


def _named_classes(dataset: Any) -> Any:
    """Return the one list of names of classes, or mapping of names and numbers, among a user's dataset's attributes."""
    found = []
    for name, value in vars(dataset).items():
        listed = getattr(value, "classes_", value)  # of scikit-learn's `LabelEncoder`
        if not re.match(NAMING if listed is value else ".*(class|label|target)|_*enc", name.lower()):
            continue
        if isinstance(listed, Mapping):
            pairs = (sorted(pair, key=lambda each: isinstance(each, str)) for pair in listed.items())
            named = all(isinstance(number, int | np.integer) and isinstance(text, str) for number, text in pairs)
            named = named and len({*listed.values()}) == len(listed)  # else it may have the labels of files
        else:
            named = _is_list(listed)
        if named and 1 < len(listed) != len(dataset):
            found.append(listed)
    return found[0] if len(found) == 1 else ()


def _numbers_anew(dataset: Any, names: Sequence[str], outer: Sequence[Any]) -> bool:
    """Return whether a dataset numbers classes in another way than what its `names` are from."""
    known = getattr(dataset, "__dict__", {}).get("targets")  # a property may be slow, or raise
    if any(kind.__name__ == "DatasetFolder" for kind in type(dataset).__mro__):  # of torchvision
        known = [label for _, label, *_ in dataset.samples]
        for path, label, *_ in dataset.samples[:: 1 + len(known) // COMPARED]:
            folder = os.path.relpath(path, dataset.root).split(os.sep)[0]
            if dataset.class_to_idx.get(folder, label) != label:
                return True
    sources = [(whole, _orders(dataset, whole)) for whole, theirs, _ in _inner(dataset, outer) if theirs == names]
    if hasattr(dataset, "with_format") and dataset.format["type"] == "custom":
        sources.append((dataset.with_format(None), [range(len(dataset))]))  # without the user's transform
    if isinstance(known, list | Tensor) and not type(dataset).__getitem__.__module__.startswith("torchvision."):
        sources.append(([(None, label) for label in known], [range(len(known))]))
    for whole, orders in sources:
        pairs = [_pairs(lambda row: dataset[row], whole, order) for order in orders]
        if any(map(_renumbered, pairs)) and not any(map(_equal_labels, pairs)):
            return True
    return False


def _wrapped_classes(dataset: Any, outer: Sequence[Any]) -> tuple[str, ...]:
    """Return the classes of the one dataset that a user's own dataset reads, if it has all of its labels or a part."""
    within = [(whole, names, error) for whole, names, error in _inner(dataset, outer) if names or error]
    if len(within) != 1:
        return ()
    ((whole, names, error),) = within
    read = any(_equal_labels(_pairs(lambda row: dataset[row], whole, order)) for order in _orders(dataset, whole))
    if read and error:
        raise error
    return names if read else ()


def _inner(dataset: Any, outer: Sequence[Any]) -> list[tuple[Any, tuple[str, ...], DataError | None]]:
    """Return the datasets that a user's own dataset reads, with the names of their classes, or why they have none."""
    values = [*vars(dataset).values()] if isinstance(dataset, Dataset) and isinstance(dataset, Sized) else []
    outer = [*outer, dataset]  # a dataset that it reads may refer to it
    inner: list[tuple[Any, tuple[str, ...], DataError | None]] = []
    for value in values:
        if isinstance(value, Sized) and hasattr(value, "__getitem__") and not any(value is other for other in outer):
            try:
                inner.append((value, _classes(value, outer), None))
            except DataError as error:  # its members number their classes in unlike ways
                inner.append((value, (), error))
    return inner


def _orders(dataset: Any, whole: Any) -> list[Any]:
    """Return the orders in which a user's own dataset may read the rows of another one."""
    kinds: Any = list | range | np.ndarray | Tensor
    lists = [each for each in vars(dataset).values() if isinstance(each, kinds) and getattr(each, "shape", None) != ()]
    return [order for order in [range(len(whole)), *lists] if len(order) == len(dataset)]


def _pairs(read: Callable[[int], Any], other: Any, order: Any) -> list[tuple[str, str]]:
    """Return labels of up to `COMPARED` rows of another dataset, with those that `read` gives; [] without such."""
    try:
        rows = range(0, len(order), 1 + len(order) // COMPARED)
        return [(_label(other[operator.index(order[row])]), _label(read(row))) for row in rows]
    except Exception:  # the numbers in `order` need not be rows, for which the user's code may raise anything
        return []


def _label(row: Any) -> str:
    labels = [row[name] for name in LABELS if name in row] if isinstance(row, Mapping) else []
    return str(np.asarray(labels[0] if len(labels) == 1 else pair_of(row)[1]).tolist())


def _equal_labels(pairs: Sequence[tuple[str, str]]) -> bool:
    return bool(pairs) and all(first == second for first, second in pairs)


def _renumbered(pairs: Sequence[tuple[str, str]]) -> bool:
    """Return whether each first label has one second label, and not always the same one."""
    return len(dict(pairs)) == len({*pairs}) and not _equal_labels(pairs) and bool(pairs)
