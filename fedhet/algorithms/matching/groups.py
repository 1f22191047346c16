"""Matching whole networks, one permutation group after the other (FedMA: Wang et al., ICLR 2020, algorithm 1).

A *state* has a client's arrays by name, at least those that a group needs, with earlier groups in the global order. A
group *settles* the parameters whose rows are matched and those that are averaged in the order found (an LSTM's W_hh, a
residual block's last layer). The *rest* remains when all groups are settled: the output layer, and BatchNorm's
statistics.

`states` and `assignments` have one entry for each client. `assignments` and `sizes` (global widths) cover all earlier
groups.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedhet.algorithms.graphs import (
    VALUE,
    PermutationGroup,
    PermutationGroups,
    Segment,
    Slot,
    columns,
    expand,
    rows,
    set_rows,
    tie,
)
from fedhet.algorithms.matching.layer import LayerMatch, attach, estimate_variances, match_layer

Array = npt.NDArray[Any]
State = Mapping[str, Array]  # a client's arrays by name
Assignments = Mapping[int, Array]  # group -> the global unit of each of a client's units, (L_j,) ints

BIAS_MEAN = 0.1


@dataclass(frozen=True)
class Matching:
    """Matching of the units of a group; controls override its methods.

    Attributes:
        gamma: mass of the beta process.
        average: `map` for posterior means or `mean` for plain means. Embeddings and recurrent layers always have plain
            means, as in the authors' code.
        variances: `fixed` for 1, or `estimated` for each group.
        max_growth: largest global width of a group, in widths of the widest client; 0 for no limit.
    """

    gamma: float = 7.0
    average: str = "map"
    variances: str = "fixed"
    max_growth: float = 0.0

    def match(
        self,
        matrices: Sequence[Array],
        group: PermutationGroup,
        prior: npt.NDArray[np.float64],
        random: np.random.RandomState,
    ) -> LayerMatch:
        """Match the rows (L_j, D) of all clients, with a prior mean (D,)."""
        limit = int(self.max_growth * max(map(len, matrices))) if self.max_growth else None
        options: dict[str, Any] = {"gamma": self.gamma, "prior_mean": prior, "max_rows": limit}
        if self.variances == "estimated":
            options |= estimate_variances(matrices, **options)
        return match_layer(matrices, **options, seed=random, average=self._average_of(group))

    def attach(
        self,
        matrix: Array,
        group: PermutationGroup,
        match: LayerMatch,
        prior: npt.ArrayLike,
        random: np.random.RandomState,
    ) -> Array:
        """Assign the rows (L, D) of a late client to a match; raises a ValueError if there are too many."""
        return attach(matrix, match, prior_mean=prior, average=self._average_of(group))

    def prior_mean(
        self, states: Sequence[State], matrices: Sequence[Array], groups: PermutationGroups, index: int
    ) -> npt.NDArray[np.float64]:
        """Return the prior mean (D,) of a group's rows: 0.1 for biases, the mean of a norm's scales, else 0."""
        slots = columns(states[0], groups, index)
        prior = np.array([BIAS_MEAN if slot.role.startswith("bias") else 0.0 for slot in slots])
        scale = np.array([slot.role in ("weight", VALUE) and states[0][slot.parameter].ndim == 1 for slot in slots])
        if scale.any():
            prior[scale] = np.concatenate([matrix[:, scale] for matrix in matrices]).mean(0)
        return prior

    def _average_of(self, group: PermutationGroup) -> str:
        plain = any(slot.axis or slot.role.startswith("weight_ih") for slot in group.rows)  # an embedding, or recurrent
        return "mean" if plain else self.average


@dataclass(frozen=True)
class GroupMatch:
    """A settled group: its match, the prior mean (D,), and its averaged parameters besides the rows."""

    match: LayerMatch
    prior_mean: npt.NDArray[np.float64]
    carried: dict[str, Array]


def match_group(
    states: Sequence[State],
    groups: PermutationGroups,
    index: int,
    assignments: Sequence[Assignments],
    sizes: Sequence[int],
    how: Matching,
    random: np.random.RandomState,
) -> GroupMatch:
    """Match one group among clients, and average the other parameters that it settles."""
    matrices = [rows(state, groups, index) for state in states]
    prior = how.prior_mean(states, matrices, groups, index)
    match = how.match(matrices, groups[index], prior, random)
    _keep_constants(match, matrices, [slot.parameter in groups.kinds for slot in columns(states[0], groups, index)])
    placed = [{**assignment, index: units} for assignment, units in zip(assignments, match.assignments, strict=True)]
    carried = average_carried(states, groups, index, placed, [*sizes, len(match.counts)], match, average=how.average)
    return GroupMatch(match, prior, carried)


def _keep_constants(match: LayerMatch, matrices: Sequence[Array], constant: Sequence[bool]) -> None:
    """Replace columns of arrays that are not trained by plain means of the rows assigned."""
    if not any(constant):
        return
    total = np.zeros_like(match.weights)
    for matrix, assignment in zip(matrices, match.assignments, strict=True):
        total[assignment] += matrix
    match.weights[:, constant] = (total / match.counts[:, None])[:, constant]


def match_networks(
    states: Sequence[State], groups: PermutationGroups, how: Matching, random: np.random.RandomState
) -> tuple[list[GroupMatch], list[dict[str, Array]]]:
    """Match whole networks without training in between (PFNM: Yurochkin et al., ICML 2019).

    Returns the match of each group, and the clients' states in the global order, with zeros for units of other clients.
    """
    settled: list[GroupMatch] = []
    moved = [dict(state) for state in states]
    assignments: list[dict[int, Array]] = [{} for _ in states]
    for group in groups:
        sizes = [len(each.match.counts) for each in settled]
        matched = match_group(moved, groups, group.index, assignments, sizes, how, random)
        settled.append(matched)
        size = {group.index: len(matched.match.counts)}
        for j, assignment in enumerate(matched.match.assignments):
            assignments[j][group.index] = assignment
            moved[j] = expand(moved[j], groups, {group.index: assignment}, size)
    return settled, moved


def patch(
    state: State, groups: PermutationGroups, index: int, assignment: Array, settled: Array, carried: State
) -> dict[str, Array]:
    """Return a client's whole state with one more group in the global order.

    Its rows are replaced by the `settled` ones (L', D), its other parameters by the `carried` ones. Inputs of later
    layers from units of other clients are zeros. `assignment` (L,) has the global row of each of the client's units.
    """
    moved = expand(state, groups, {index: assignment}, {index: len(settled)})
    moved = set_rows(moved, groups, index, settled)
    moved |= {name: array.astype(moved[name].dtype) for name, array in carried.items()}
    return tie(moved, groups)


def assemble(
    groups: PermutationGroups, dtypes: Mapping[str, str], settled: Sequence[tuple[Array, State]], rest: State
) -> dict[str, Array]:
    """Return the global model from each group's global rows (L', D) and other parameters, and from the rest.

    Statistics that the rest lacks are those of a new BatchNorm. `dtypes` are those of the model's arrays.
    """
    shapes = groups.shapes([len(matrix) for matrix, _ in settled])
    state: dict[str, Array] = {
        name: np.full(shape, float(name.endswith("running_var")), dtypes[name]) for name, shape in shapes.items()
    }
    for index, (matrix, carried) in enumerate(settled):
        state = set_rows(state, groups, index, matrix)
        state |= {name: array.astype(dtypes[name]) for name, array in carried.items()}
    return tie(state | {name: array.astype(dtypes[name]) for name, array in rest.items()}, groups)


# ---- averages of arrays that are not matched


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
            absent = shares.sum(0) == 0
            result[variance] = np.where(absent, 1.0, np.maximum((shares * squares).sum(0) - result[name] ** 2, 0))
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


# ---- which arrays a group settles, and groups as text


def parameters_of(groups: PermutationGroups, index: int) -> tuple[str, ...]:
    """Return the names of the parameters that a group settles: those of its rows, then those that it completes."""
    slots = groups[index].rows + groups[index].completes
    return tuple(dict.fromkeys(slot.parameter for slot in slots if groups.kinds.get(slot.parameter) != "statistic"))


def rest_of(groups: PermutationGroups, *, statistics: bool = True) -> tuple[str, ...]:
    """Return the arrays that no group settles: output layers and buffers, with or without BatchNorm's statistics."""
    settled = {name for group in groups for name in parameters_of(groups, group.index)}
    return tuple(
        name
        for name in groups.axes
        if name not in settled and name not in groups.tied and (statistics or groups.kinds.get(name) != "statistic")
    )


def due(groups: PermutationGroups, done: int, step: int, *, statistics: bool) -> list[str]:
    """Return the names of the arrays that a client with `done` settled groups sends in a step of FedMA."""
    names = [name for index in range(done, min(step + 1, len(groups))) for name in parameters_of(groups, index)]
    return list(dict.fromkeys([*names, *(rest_of(groups, statistics=statistics) if step == len(groups) else ())]))


def groups_to_json(groups: PermutationGroups) -> str:
    """Return permutation groups as JSON, for a server that does not have the model."""
    return json.dumps(asdict(groups))


def groups_from_json(text: str) -> PermutationGroups:
    """Return permutation groups from the result of `groups_to_json`; raises a ValueError for any other text."""
    try:
        description = json.loads(text)
        axes = {
            name: tuple(tuple(Segment(**segment) for segment in axis) for axis in axes)
            for name, axes in description["axes"].items()
        }
        needs = {name: (int(group), int(least)) for name, (group, least) in description["needs"].items()}
        groups, fixed = tuple(map(_group, description["groups"])), tuple(description["fixed"])
        return PermutationGroups(groups, axes, fixed, description["tied"], needs, dict(description["kinds"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no description of permutation groups: {error!r}") from error


def _group(description: dict[str, Any]) -> PermutationGroup:
    slots = {key: tuple(Slot(**slot) for slot in description[key]) for key in ("rows", "completes")}
    return PermutationGroup(**{**description, **slots})
