"""Moving the axes of arrays to the order of a matched layer and back.

An axis that a layer of L units moves is read as (groups, L, block), row-major: `block` neighbours belong to one unit
(the H * W positions of a channel behind a flatten), and the units are repeated `groups` times (the gates of an LSTM).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def scatter(
    array: npt.ArrayLike, axis: int, assignment: npt.ArrayLike, size: int, block: int = 1, groups: int = 1
) -> Array:
    """Moves one axis of a client's array to the global order, with zeros where the client has no unit.

    Args:
        array: Any array whose `axis` has groups * L * block entries.
        axis: The axis to move.
        assignment: (L,) ints, the global index of each local unit, none twice.
        size: The number of global units L'.
        block: Entries of the axis for each unit (H * W behind a flatten).
        groups: How often the units are repeated along the axis (4 for the gates of an LSTM).

    Returns:
        A new array of the same dtype whose `axis` has groups * L' * block entries.

    Raises:
        ValueError: The axis does not have groups * L * block entries, or the assignment has an index outside of
            0..L'-1 or the same index twice.
    """
    units = np.asarray(assignment)
    if units.size and not 0 <= units.min() <= units.max() < size:
        raise ValueError(f"assignment has indices {units.min()}..{units.max()}, but there are {size} global units")
    if len(np.unique(units)) != len(units):
        raise ValueError("assignment has two local units on the same global one")
    local = _split(np.asarray(array), axis, len(units), block, groups)
    axis = axis % np.ndim(array)
    moved = np.zeros((*local.shape[: axis + 1], size, *local.shape[axis + 2 :]), dtype=local.dtype)
    moved[(slice(None),) * (axis + 1) + (units,)] = local
    return _join(moved, axis)


def gather(array: npt.ArrayLike, axis: int, assignment: npt.ArrayLike, block: int = 1, groups: int = 1) -> Array:
    """Cuts a client's units out of one axis of a global array: the inverse of `scatter`.

    Args:
        array: Any array whose `axis` has groups * L' * block entries.
        axis: The axis to cut.
        assignment: (L,) ints, the global index of each local unit.
        block: Entries of the axis for each unit.
        groups: How often the units are repeated along the axis.

    Returns:
        A new array whose `axis` has groups * L * block entries.

    Raises:
        ValueError: The axis is not a multiple of groups * block.
        IndexError: An index lies outside of the global units.
    """
    length = np.shape(array)[axis]
    split = _split(np.asarray(array), axis, length // (groups * block), block, groups)
    axis = axis % np.ndim(array)
    return _join(np.take(split, np.asarray(assignment), axis=axis + 1), axis)


def stack_gates(array: npt.ArrayLike, gates: int = 4) -> Array:
    """Puts the gates of each hidden unit side by side, so that a unit is a row.

    Args:
        array: (gates * H, E) weights or (gates * H,) biases, one gate after the other (PyTorch's layout).
        gates: The number of gates, 4 for an LSTM.

    Returns:
        (H, gates * E), or (H, gates) for biases.

    Raises:
        ValueError: The first axis is not a multiple of the gates.
    """
    values = np.asarray(array)
    hidden = len(values) // gates
    return _split(values, 0, hidden, 1, gates).swapaxes(0, 1).reshape(hidden, -1)


def unstack_gates(rows: npt.ArrayLike, gates: int = 4) -> Array:
    """Puts the gates of all hidden units one after the other: the inverse of `stack_gates`.

    Args:
        rows: (H, gates * E).
        gates: The number of gates.

    Returns:
        (gates * H, E). Biases (H, gates) come back as (gates * H, 1).

    Raises:
        ValueError: The columns are not a multiple of the gates.
    """
    values = np.asarray(rows)
    hidden, columns = values.shape
    return _split(values, 1, columns // gates, 1, gates)[..., 0].swapaxes(0, 1).reshape(gates * hidden, -1)


def _split(array: Array, axis: int, units: int, block: int, groups: int) -> Array:
    axis = axis % array.ndim
    if array.shape[axis] != groups * units * block:
        raise ValueError(
            f"axis {axis} of an array of shape {array.shape} has {array.shape[axis]} entries, "
            f"not {groups} groups of {units} units of {block}"
        )
    return array.reshape(*array.shape[:axis], groups, units, block, *array.shape[axis + 1 :])


def _join(array: Array, axis: int) -> Array:
    groups, units, block = array.shape[axis : axis + 3]
    return array.reshape(*array.shape[:axis], groups * units * block, *array.shape[axis + 3 :])
