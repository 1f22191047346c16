"""Functions on state dicts that reorder hidden units, widen or narrow a network, and extract the weights of units.

A group is a set of interchangeable hidden units (see `permutations`). An *assignment* of a group is an integer array
(L,): unit l of the smaller network's L units is unit ``assignment[l]`` of the wider one. Assignments and sizes are
dicts by index of the group; other groups do not change. Results have arrays, which are copies where values change.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedhet.algorithms.graphs.axes import Axis, entries
from fedhet.algorithms.graphs.permutations import PermutationGroups, Slot

Array = NDArray[Any]
State = Mapping[str, Array | Tensor]
Assignments = Mapping[int, ArrayLike]


def widths(state: State, groups: PermutationGroups) -> tuple[int, ...]:
    """Return the number of units of each of the `groups` in a network with this state dict (see `widths_of`)."""
    return widths_of({name: tuple(value.shape) for name, value in state.items()}, groups)


def widths_of(shapes: Mapping[str, tuple[int, ...]], groups: PermutationGroups) -> tuple[int, ...]:
    """Return the number of units of each group of interchangeable units in a network with arrays of these `shapes`.

    A group without arrays in `shapes` keeps its width in `groups`. If a group's units are blocks (`groups_by_depth`),
    they are counted up to the last with an array in `shapes`. Raises a ValueError for arrays of another architecture.
    """
    widths: dict[int, int] = {}
    for index, units in (groups.needs[name] for name in shapes if name in groups.needs):
        widths[index] = max(units, widths.get(index, 0))
    for name, shape in shapes.items():
        axes = groups.axes.get(name, ())
        misfit = ValueError(f"{name} of shape {shape} does not fit the other arrays of the network")
        if name not in groups.axes or len(axes) != len(shape):
            raise misfit
        for axis, size in zip(axes, shape, strict=True):
            group, *others = {segment.group for segment in axis}
            if group is not None and not others:
                units, rest = divmod(size, sum(segment.block for segment in axis))
                if rest or widths.setdefault(group, units) != units:
                    raise misfit
    return tuple(widths.get(group.index, group.width) for group in groups)


def expand(
    state: State, groups: PermutationGroups, assignments: Assignments, sizes: Mapping[int, int]
) -> dict[str, Array]:
    """Return the state of a wider network that has the units of `state` at the assigned indices, and zeros elsewhere.

    `assignments` has the new indices (L,) of the L units of a group, and `sizes` the group's new width, by index of the
    group. The wider network computes the same function unless it normalises over all units, as LayerNorm does.
    """
    local = enumerate(widths(state, groups))
    wide = groups.with_widths([sizes[index] if index in assignments else width for index, width in local])
    result = _arrays(state)
    for name, array in result.items():
        for number, axis in enumerate(wide.axes[name]):
            if (places := _entries(axis, assignments)) is not None:
                front = np.moveaxis(array, number, 0)
                scattered = np.zeros((entries(axis), *front.shape[1:]), array.dtype)
                scattered[places] = front
                array = np.ascontiguousarray(np.moveaxis(scattered, 0, number))
        result[name] = array
    return result


def cut_out(state: State, groups: PermutationGroups, assignments: Assignments) -> dict[str, Array]:
    """Return the state of a network with only the assigned units of a wider one, given by indices for each group."""
    whole = groups.with_widths(widths(state, groups))
    result = _arrays(state)
    for name, array in result.items():
        for number, axis in enumerate(whole.axes[name]):
            if (places := _entries(axis, assignments)) is not None:
                array = np.take(array, places, axis=number)
        result[name] = array
    return result


def entries_of(groups: PermutationGroups, units: Assignments) -> dict[str, tuple[NDArray[np.intp] | None, ...]]:
    """Return which entries of a network's arrays belong to the narrower network with only the given `units`.

    `units` has the kept units' indices by number of their group (set of interchangeable units). The result has, by name
    of an array, its kept indices along each axis (None for all), or () if it is removed; whole arrays are left out.
    """
    entries = {name: tuple(_entries(axis, units) for axis in axes) for name, axes in groups.axes.items()}
    units_of = {group: np.asarray(chosen).size for group, chosen in units.items()}
    lacking = [name for name, (group, least) in groups.needs.items() if least > units_of.get(group, least)]
    moved = {name: axes for name, axes in entries.items() if any(axis is not None for axis in axes)}
    return moved | dict.fromkeys(lacking, ())


def permute(state: State, groups: PermutationGroups, permutations: Assignments) -> dict[str, Array]:
    """Return the state with interchangeable units reordered: unit l of group i moves to ``permutations[i][l]``."""
    local = widths(state, groups)
    return expand(state, groups, permutations, {index: local[index] for index in permutations})


def rows(state: State, groups: PermutationGroups, index: int) -> NDArray[np.floating]:
    """Return the matrix (L, D) by which FedMA matches the L units of group `index` in a network's state dict.

    A row concatenates the weights of a unit in the parameters of ``groups[index].rows``: of all gates in an LSTM's
    W_ih, all channels in an attention head, and all filters (flattened channel-major) in a group of a convolution.
    """
    pieces = ((_front(state, slot)[places], len(places)) for slot, places in _row_places(state, groups, index))
    return np.hstack([piece.reshape(width, -1) for piece, width in pieces])


def columns(state: State, groups: PermutationGroups, index: int) -> list[Slot]:
    """Return the parameter, and its axis of units, that each column of `rows(state, groups, index)` is taken from."""
    places = _row_places(state, groups, index)
    return [slot for slot, each in places for _ in range(each.shape[1] * _front(state, slot)[0].size)]


def set_rows(state: State, groups: PermutationGroups, index: int, matrix: NDArray[np.floating]) -> dict[str, Array]:
    """Return the state with a group's weights replaced by `matrix` (L, D), with a row for each unit (see `rows`)."""
    result = _arrays(state)
    end = 0
    result |= {slot.parameter: result[slot.parameter].copy() for slot in groups[index].rows}
    for slot, places in _row_places(state, groups, index):
        front = _front(result, slot)
        start = end
        end = end + places.shape[1] * front[0].size
        front[places] = matrix[:, start:end].reshape(*places.shape, *front.shape[1:])
    return tie(result, groups)


def tie(state: dict[str, Array], groups: PermutationGroups) -> dict[str, Array]:
    """Return the state with arrays that have several names (`PermutationGroups.tied`) set to that of the first name."""
    return state | {name: state[first] for name, first in groups.tied.items() if name in state and first in state}


def _arrays(state: State) -> dict[str, Array]:
    return {name: _array(value) for name, value in state.items()}


def _array(value: Array | Tensor) -> Array:
    if isinstance(value, Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True).copy()
    return value


def _entries(axis: Axis, units: Assignments) -> NDArray[np.intp] | None:
    # Indices along an axis of the given units' entries, and of all entries of other groups.
    if not any(segment.group in units for segment in axis):
        return None
    start = 0
    parts = []
    for segment in axis:
        chosen = np.asarray(units.get(segment.group, np.arange(segment.width)))  # type: ignore[arg-type]
        parts.append(start + (chosen[:, None] * segment.block + np.arange(segment.block)).ravel())
        start += segment.size
    return np.concatenate(parts).astype(np.intp)


def _front(state: State, slot: Slot) -> Array:
    return np.moveaxis(_array(state[slot.parameter]), slot.axis, 0)


def _row_places(state: State, groups: PermutationGroups, index: int) -> Iterator[tuple[Slot, NDArray[np.intp]]]:
    # Each slot in a group's rows, with the indices (L, block) of its units' entries; once per segment.
    local = groups.with_widths(widths(state, groups))
    for slot in local[index].rows:
        start = 0
        for segment in local.axes[slot.parameter][slot.axis]:
            if segment.group == index:
                yield slot, start + np.arange(segment.size).reshape(segment.width, segment.block)
            start += segment.size
