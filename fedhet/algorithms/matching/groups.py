"""Matching whole networks, one permutation group after the other (FedMA: Wang et al., ICLR 2020, algorithm 1).

A *state* has a client's arrays by name, at least those that a group needs, with earlier groups in the global order. A
group *settles* the parameters whose rows are matched and those that are averaged in the order found (an LSTM's W_hh, a
residual block's last layer). The *rest* remains when all groups are settled: the output layer, and BatchNorm's
statistics.

`states` and `assignments` have one entry for each client. `assignments` and `sizes` (global widths) cover all earlier
groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedhet.algorithms.graphs import VALUE, PermutationGroup, PermutationGroups, columns, expand, rows, set_rows, tie
from fedhet.algorithms.matching.averaging import average_carried
from fedhet.algorithms.matching.layer import LayerMatch, attach, estimate_variances, match_layer
from fedhet.algorithms.matching.structure import Array, Assignments, State

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
