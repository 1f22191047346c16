"""Names of classes and columns, by which parts and clients are aligned.

`Names` has tuples of names by kind: `classes`, by class number; `columns` of the inputs (`columns.PART` if inputs have
several tensors); `labels`, the columns of a table of labels. `fedhet.data.naming` finds them in a user's data.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedhet.errors import DataError

Names = Mapping[str, tuple[str, ...]]

CLASSES, COLUMNS, LABEL_COLUMNS = "classes", "columns", "labels"


def alike(kind: str, ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return whether names have the same order, or either are only numbers; some last classes may be missing."""
    few = min(len(ours), len(theirs)) if kind == CLASSES else None
    return ours[:few] == theirs[:few] or ({*ours} != {*theirs} and (plain(ours) or plain(theirs)))


def merged(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...]:
    """Return one of two tuples of names that are `alike`: the one that says more."""
    return max(ours, theirs, key=lambda names: (not plain(names), len(names)))


def permuted(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return whether two lists have the same names, each once, in different orders."""
    return ours != theirs and sorted(ours) == sorted(theirs) and len({*ours}) == len(ours)


def plain(names: Sequence[str]) -> bool:
    """Return whether names are only the numbers of places, which say nothing, or there are none."""
    return [*names] == [str(number) for number in range(len(names))]


def renumbering(ours: Sequence[str], theirs: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """Return a function that renumbers labels with the classes `ours` as `theirs`, which has all names of `ours`."""
    check_distinct("class", theirs)
    numbers = {name: number for number, name in enumerate(theirs)}
    places = torch.tensor([numbers[name] for name in ours])

    def change(labels: Tensor) -> Tensor:
        if not labels.numel():
            return labels
        # Labels with a column for each class have no numbers of classes, unlike those of tokens.
        if labels.is_floating_point() or labels.shape[1:] == places.shape or int(labels.max()) >= len(places):
            raise DataError(f"{unlike('its classes', ours, theirs)}, and its labels are not numbers of these classes")
        new = places.to(labels.device)[labels.long().clamp(min=0)]
        return torch.where(labels < 0, labels, new.to(labels.dtype))  # negative labels are ignored

    return change


def unlike(whose: str, ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return the beginning of a message that names differ."""
    return f"{whose} are {shown(ours, theirs)}, but the others' are {shown(theirs, ours)}"


def shown(names: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return names for a message; of many, some that `others` lacks."""
    text = ", ".join(names)
    if len(text) <= 80:
        return text
    return f"{len(names)} names, such as {', '.join([n for n in names if n not in {*others}] or names)[:60]}..."


def check_distinct(kind: str, names: Sequence[Any]) -> None:
    """Raise a DataError if several columns or classes (`kind`) have one name, by which they cannot be aligned."""
    repeated = [name for name, number in Counter(names).items() if number > 1]
    if repeated:
        raise DataError(f"more than one {kind} has the name {shown([*map(str, repeated)])}: rename or remove them")
