"""Averages of the arrays that are not matched, with units in the global order.

`states` and `assignments` have one entry for each client; `sizes` are the global widths of groups.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedhet.algorithms.graphs import PermutationGroups, expand
from fedhet.algorithms.matching.layer import LayerMatch
from fedhet.algorithms.matching.structure import Array, Assignments, State, rest_of


def average_carried(
    states: Sequence[State],
    groups: PermutationGroups,
    index: int,
    assignments: Sequence[Assignments],
    sizes: Sequence[int],
    match: LayerMatch,
    *,
    average: str,
) -> dict[str, Array]:
    """Average the parameters that a group completes by `map` or `mean`, like its rows.

    A unit's weights are averaged over the clients that have it, and recurrent weights over all clients, as in the
    authors' code. States have earlier groups in the global order; assignments and sizes cover all groups up to `index`.
    """
    averaged: dict[str, Array] = {}
    for slot in groups[index].completes:
        if groups.kinds.get(name := slot.parameter) == "statistic":
            continue
        moved = (
            expand({name: state[name]}, groups, {index: assignment[index]}, {index: sizes[index]})[name].astype(
                np.float64
            )
            for state, assignment in zip(states, assignments, strict=True)
        )
        total: Array = sum(moved, start=np.zeros(()))
        if slot.role.startswith(("weight_hh", "bias_hh")):
            averaged[name] = total / len(states)
            continue
        counts = sum(_present(groups, name, slot.axis, assignment, sizes) for assignment in assignments)
        counts = np.reshape(counts, [-1 if axis == slot.axis else 1 for axis in range(total.ndim)])
        if average == "map" and name not in groups.kinds:
            averaged[name] = total / match.sigma2 / (counts / match.sigma2 + 1 / match.sigma0_2)
        else:
            averaged[name] = total / np.maximum(counts, 1)
    return averaged


def average_rest(
    states: Sequence[State],
    groups: PermutationGroups,
    *,
    examples: Sequence[int],
    class_counts: npt.ArrayLike | None = None,
    assignments: Sequence[Assignments],
    sizes: Sequence[int],
    statistics: bool = True,
) -> dict[str, Array]:
    """Average the arrays that no group settles, with all groups in the global order.

    Args:
        states: each client's arrays.
        groups: the permutation groups.
        examples: each client's number of examples. BatchNorm's statistics are those of all examples together.
        class_counts: each client's examples of each class (J, C), which weight the rows of output layers (FedMA,
            section 3); None for equal weights.
        assignments: each client's units of the groups that it has in part; other units do not count in statistics.
        sizes: global widths of all groups.
        statistics: whether to average BatchNorm's statistics.
    """
    result: dict[str, Array] = {}
    weights = np.asarray(examples, dtype=np.float64)
    for name in rest_of(groups, statistics=statistics):
        stacked = np.stack([state[name] for state in states])
        if name in groups.fixed and class_counts is not None and stacked.shape[1:2] == np.shape(class_counts)[1:]:
            shares = _shares(np.asarray(class_counts, dtype=np.float64))
            result[name] = np.einsum("jc,jc...->c...", shares, stacked.astype(np.float64))
        elif stacked.dtype.kind != "f":
            result[name] = np.rint(stacked.mean(0))
        elif name.endswith("running_mean") and groups.kinds.get(name) == "statistic":
            there = np.stack([_present(groups, name, 0, assignment, sizes) for assignment in assignments])
            shares = _shares(there * weights[:, None])
            variance = name.removesuffix("mean") + "var"
            squares = np.stack([state[variance] for state in states]) + stacked.astype(np.float64) ** 2
            result[name] = (shares * stacked).sum(0)
            lone = shares.sum(0) == 0
            result[variance] = np.where(lone, 1.0, np.maximum((shares * squares).sum(0) - result[name] ** 2, 0))
        elif name not in result:
            result[name] = stacked.mean(0)
    return {name: np.asarray(array) for name, array in result.items()}  # a mean of scalars is no array


def _shares(amounts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return amounts (J, ...) divided by their sum over clients, or 0 where the sum is 0."""
    total = amounts.sum(0)
    return np.divide(amounts, total, out=np.zeros_like(amounts), where=total > 0)


def _present(
    groups: PermutationGroups, name: str, axis: int, assignment: Assignments, sizes: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return 1 for units that a client has, else 0, along an axis in global order; unassigned groups are whole."""
    parts = []
    for segment in groups.axes[name][axis]:
        units = np.ones(segment.width if segment.group is None else sizes[segment.group])
        if segment.group is not None and segment.group in assignment:
            units[:] = 0
            units[assignment[segment.group]] = 1
        parts.append(np.repeat(units, segment.block))
    return np.concatenate(parts)
