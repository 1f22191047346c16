"""Scales of inputs, by which a client's parts, the clients of a run, and a run and new data are compared."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedhet.data.names import COLUMNS, LABEL_COLUMNS, Names
from fedhet.data.own import as_input
from fedhet.data.reading import LazyInputs
from fedhet.errors import DataError
from fedhet.utils.inputs import parts_of

BYTES, UNIT, SIGNED, BEYOND = "bytes", "values in [0, 1]", "values of which many are below 0", "values beyond [0, 1]"
COLUMN, TARGET = "a column", "a target"

Scales = Mapping[str, tuple[str, float]]
"""By the name of a tensor of the inputs: its kind (`BYTES`, ..., `BEYOND`), and the root mean square of its values.

Bytes are divided by 255. The root mean square is 0 if it is not known, and for other whole numbers, such as tokens.
Of a table with named columns, also by `column NAME`: `COLUMN`, and the median size of the column's values other than
0, which neither the rare ones of an encoded text nor a few large values change. So are numbers to predict, by
`target NAME`, with `TARGET`.
"""

MANY = 0.1
"""Fraction of negative values above which inputs are `SIGNED`, as normalised images are."""

LARGEST_RATIO = 20.0
"""Ratio of two root mean squares above which inputs are taken to have different units."""

ROWS = 1024
"""Largest number of examples from which a root mean square is computed."""

LONGEST_NAMES = 2**14
"""Largest number of characters in the names of columns that are compared one by one."""


def scales_of(inputs: Tensor | LazyInputs, names: Names, labels: Tensor | None = None, *, least: int = 1) -> Scales:
    """Return the scales of raw inputs (n, ...); of those that are read on demand, of the first, or of a table's rows.

    `names` has the names of a table's columns. `labels`, if they are numbers (n, ...), are described, too. No number is
    of fewer than `least` examples.
    """
    columns = names.get(COLUMNS)
    most = max(ROWS, 2 * least)
    if isinstance(inputs, LazyInputs):
        inputs = inputs[:: len(inputs) // most + 1] if columns else inputs[: max(8, least)]
    scales: dict[str, tuple[str, float]] = {}
    for name, part in parts_of(inputs).items():
        if not part.numel() or part.is_complex():
            continue
        rows = part[:: len(part) // most + 1]
        kind = BYTES if part.dtype == torch.uint8 else UNIT
        values = part if part.is_floating_point() else rows.long()  # as some whole numbers have no minimum in torch
        if kind == UNIT and ((values < 0) | (values > 1)).any():
            kind = SIGNED if (values < 0).float().mean() > MANY else BEYOND
        size = 0.0
        if part.is_floating_point() or kind == BYTES:
            size = float(rows.float().square().mean().sqrt()) / (255 if kind == BYTES else 1)
        scales[name] = kind, size if math.isfinite(size) else 0.0
    if isinstance(inputs, Tensor) and columns:
        scales |= _medians("column", COLUMN, as_input(inputs), columns, least)
    if labels is not None and labels.is_floating_point() and labels.ndim > 1:
        targets = labels.flatten(1)
        numbers = tuple(map(str, range(targets.shape[1])))
        scales |= _medians("target", TARGET, targets, names.get(LABEL_COLUMNS, numbers), least)
    return scales


def _medians(word: str, kind: str, table: Tensor, names: Sequence[str], least: int) -> Scales:
    """Return the median size of values other than 0 by named column of a table, or 0 if they are fewer than `least`."""
    if table.shape[1:] != (len(names),) or sum(map(len, names)) + 32 * len(names) > LONGEST_NAMES:
        return {}
    columns = table[:: len(table) // ROWS + 1].double().abs().unbind(1)
    present = {f"{word} {name}": column[column > 0] for name, column in zip(names, columns, strict=True)}
    return {name: (kind, float(values.median()) if len(values) >= least else 0.0) for name, values in present.items()}


def check_scales(scales: Mapping[str, Scales]) -> str:
    """Return a sentence that names two of `scales` in different units, or an empty string if there are none.

    The keys are words such as `the test`, before `inputs` or `targets`. Raises a `DataError` if some inputs are bytes,
    which are scaled to [0, 1], and others are values beyond [0, 1], which are not.
    """
    sentences = []
    for name in dict.fromkeys(name for tensors in scales.values() for name in tensors):
        known = {words: tensors[name] for words, tensors in scales.items() if name in tensors}
        first = {kind: words for words, (kind, _) in reversed(known.items())}
        others = SIGNED if SIGNED in first else BEYOND
        remedy = "give both in the same type and scale"
        if BYTES in first and others in first:
            raise DataError(
                f"{first[BYTES]} inputs are bytes, which are scaled to [0, 1], but {first[others]} inputs are "
                f"{others}, which are not scaled: {remedy}"
            )
        if UNIT in first and SIGNED in first:
            sentences.append(f"{first[UNIT]} inputs are {UNIT}, but {first[SIGNED]} inputs are {SIGNED}: {remedy}")
            continue
        sizes = sorted((size, words) for words, (_, size) in known.items() if size)
        if sizes and sizes[-1][0] > LARGEST_RATIO * sizes[0][0]:
            small, small_words = sizes[0]
            large, large_words = sizes[-1]
            measure = "root mean squares"
            if COLUMN in first or TARGET in first:
                large_words = f"{name}: {large_words}"
                measure = "medians"
            what = "targets" if TARGET in first else "inputs"
            sentences.append(
                f"{large_words} {what} are {large / small:.3g} times as large as {small_words} {what} ({measure} "
                f"{large:.3g} and {small:.3g}): if their units differ, give both in the same"
            )
    return sentences[-1] if sentences else ""  # columns follow the whole table
