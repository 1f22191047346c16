"""Matching of whole networks, one group of hidden units after the other (FedMA: Wang et al., ICLR 2020, algorithm 1).

The units of a group are interchangeable. A *state* has a client's arrays by name, with the units of earlier groups in
the order of the global model. Units are matched by the parameters in their group's `PermutationGroup.rows`; the
group's other parameters (`completes`) are averaged for matched units. `states` and `assignments` are by client.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedhet.algorithms import graphs
from fedhet.algorithms.matching.bbp_map import LayerMatch, estimate_variances, match_layer

Array = npt.NDArray[Any]
State = Mapping[str, Array]  # a client's arrays by name
Assignments = Mapping[int, Array]  # group -> the global unit of each of a client's units, (L_j,) ints

BIAS_MEAN = 0.1


@dataclass(frozen=True)
class Matching:
    """The rule by which a group of interchangeable hidden units is matched among clients; subclasses can override it.

    Attributes:
        gamma: mass of the beta process; a larger mass leads to more global units.
        average: `map` for posterior or `mean` for plain means, which embeddings and recurrent layers always have.
        variances: of weights around global weights, and of global weights around the prior: `fixed` (1) or `estimated`.
        max_growth: largest number of global units, as a multiple of the widest client's; 0 for no limit.
    """

    gamma: float = 7.0
    average: str = "map"
    variances: str = "fixed"
    max_growth: float = 0.0

    def match(
        self,
        matrices: Sequence[Array],
        group: graphs.PermutationGroup,
        prior: npt.NDArray[np.float64],
        random: np.random.RandomState,
    ) -> LayerMatch:
        """Match the units of `group` among clients; `random` draws the order in which clients are matched.

        `matrices` has the weights (L_j, D) of each client's L_j units, and `prior` (D,) their prior mean.
        """
        limit = int(self.max_growth * max(map(len, matrices))) if self.max_growth else None
        options: dict[str, Any] = {"gamma": self.gamma, "prior_mean": prior, "max_rows": limit}
        if self.variances == "estimated":
            options |= estimate_variances(matrices, **options)
        plain = any(slot.axis or slot.role.startswith("weight_ih") for slot in group.rows)  # an embedding, or recurrent
        return match_layer(matrices, **options, seed=random, average="mean" if plain else self.average)

    def prior_mean(
        self, states: Sequence[State], matrices: Sequence[Array], groups: graphs.PermutationGroups, index: int
    ) -> npt.NDArray[np.float64]:
        """Return the prior mean (D,) of the D weights of a unit in group `index` of interchangeable units.

        `matrices` has the weights (L_j, D) of each client j's L_j units, and `states` clients' arrays by name. The mean
        is 0.1 for biases, the mean over all units for scales of normalisation layers, and 0 for other weights.
        """
        slots = graphs.columns(states[0], groups, index)
        prior = np.array([BIAS_MEAN if slot.role.startswith("bias") else 0.0 for slot in slots])
        scales = ("weight", graphs.VALUE)
        scale = np.array([slot.role in scales and states[0][slot.parameter].ndim == 1 for slot in slots])
        if scale.any():
            prior[scale] = np.concatenate([matrix[:, scale] for matrix in matrices]).mean(0)
        return prior


class GroupMatch(NamedTuple):
    """The `match` of a set of hidden units and, in `carried`, averages of its `PermutationGroup.completes` by name."""

    match: LayerMatch
    carried: dict[str, Array]


def match_group(
    states: Sequence[State],
    groups: graphs.PermutationGroups,
    index: int,
    assignments: Sequence[Assignments],
    sizes: Sequence[int],
    how: Matching,
    random: np.random.RandomState,
) -> GroupMatch:
    """Match the units of `groups[index]` among clients by the rule `how`; average its parameters that are not matched.

    `states` has each client's arrays. For each group before `index`, `assignments` has the indices of a client's units
    in the global model, and `sizes` the global number of units. A unit's weights are averaged over clients that have
    it, as `how.average` says; recurrent W_hh and b_hh have the plain mean of all clients. `random` orders the clients.
    """
    matrices = [graphs.rows(state, groups, index) for state in states]
    match = how.match(matrices, groups[index], how.prior_mean(states, matrices, groups, index), random)
    constant = [slot.parameter in groups.kinds for slot in graphs.columns(states[0], groups, index)]
    if any(constant):  # columns of untrained arrays have plain means
        total = np.zeros_like(match.weights)
        for matrix, assignment in zip(matrices, match.assignments, strict=True):
            total[assignment] += matrix
        match.weights[:, constant] = (total / match.counts[:, None])[:, constant]
    carried: dict[str, Array] = {}
    sizes = [*sizes, len(match.counts)]
    size = {index: len(match.counts)}
    for slot in groups[index].completes:
        if groups.kinds.get(name := slot.parameter) == "statistic":
            continue
        total, counts = np.zeros(()), np.zeros(())
        for state, others, units in zip(states, assignments, match.assignments, strict=True):
            total = total + graphs.expand({name: state[name]}, groups, {index: units}, size)[name].astype(np.float64)
            counts = counts + _present(groups, name, slot.axis, {**others, index: units}, sizes)
        counts = np.reshape(counts, [-1 if axis == slot.axis else 1 for axis in range(total.ndim)])
        if slot.role.startswith(("weight_hh", "bias_hh")):
            carried[name] = total / len(states)
        elif how.average == "map" and name not in groups.kinds:
            carried[name] = total / match.sigma2 / (counts / match.sigma2 + 1 / match.sigma0_2)
        else:
            carried[name] = total / np.maximum(counts, 1)
    return GroupMatch(match, carried)


def match_networks(
    states: Sequence[State], groups: graphs.PermutationGroups, how: Matching, random: np.random.RandomState
) -> tuple[list[GroupMatch], list[dict[str, Array]]]:
    """Match whole networks by the rule `how` without training in between (PFNM: Yurochkin et al., ICML 2019).

    Return the match of each group, and the clients' states with units in the global order, and zeros for missing units.
    """
    settled: list[GroupMatch] = []
    moved = [dict(state) for state in states]
    assignments: list[dict[int, Array]] = [{} for _ in states]
    for group in groups:
        sizes = [len(layer.match.counts) for layer in settled]
        matched = match_group(moved, groups, group.index, assignments, sizes, how, random)
        settled.append(matched)
        size = {group.index: len(matched.match.counts)}
        for j, assignment in enumerate(matched.match.assignments):
            assignments[j][group.index] = assignment
            moved[j] = graphs.expand(moved[j], groups, {group.index: assignment}, size)
    return settled, moved


def patch(
    state: State, groups: graphs.PermutationGroups, index: int, assignment: Array, settled: Array, carried: State
) -> dict[str, Array]:
    """Return a client's state with its L units of group `index` replaced by the L' units of the global model.

    `assignment` (L,) has the index of each unit in the global model, `settled` (L', D) the global units' weights by
    which they are matched (see `graphs.rows`), and `carried` the averages of the group's other parameters by name.
    Later layers have zero weights for units that the client did not have.
    """
    moved = graphs.expand(state, groups, {index: assignment}, {index: len(settled)})
    moved = graphs.set_rows(moved, groups, index, settled)
    moved |= {name: array.astype(moved[name].dtype) for name, array in carried.items()}
    return graphs.tie(moved, groups)


def assemble(
    groups: graphs.PermutationGroups, dtypes: Mapping[str, str], settled: Sequence[tuple[Array, State]], rest: State
) -> dict[str, Array]:
    """Return the state dict of the global model, whose hidden units were matched in `groups` of interchangeable units.

    `settled` has, for each group, the D weights (L', D) of each of its L' global units (see `graphs.rows`), and means
    of its `PermutationGroup.completes`. `rest` has arrays without units of a group, and `dtypes` all dtypes, by name.
    """
    shapes = groups.shapes([len(matrix) for matrix, _ in settled])
    state: dict[str, Array] = {
        name: np.full(shape, float(name.endswith("running_var")), dtypes[name]) for name, shape in shapes.items()
    }
    for index, (matrix, carried) in enumerate(settled):
        state = graphs.set_rows(state, groups, index, matrix)
        state |= {name: array.astype(dtypes[name]) for name, array in carried.items()}
    return graphs.tie(state | {name: array.astype(dtypes[name]) for name, array in rest.items()}, groups)


def average_rest(
    states: Sequence[State],
    groups: graphs.PermutationGroups,
    *,
    examples: Sequence[float],
    class_counts: npt.ArrayLike | None = None,
    assignments: Sequence[Assignments],
    sizes: Sequence[int],
    statistics: bool = True,
) -> dict[str, Array]:
    """Return averages, by name, of arrays that are not matched, such as the output layer and BatchNorm's statistics.

    `states` has clients' arrays, with units in the order of the global model. `assignments` has the global indices of
    each client's units by group, and `sizes` the global numbers of units by group. Clients have equal weights, but rows
    of output layers are weighted by `class_counts` (clients, classes), if given (FedMA, section 3), and BatchNorm's
    statistics of a unit by numbers of `examples`, over clients with the unit; without `statistics`, they are left out.
    """
    result: dict[str, Array] = {}
    weights = np.asarray(examples, dtype=np.float64)
    for name in due(groups, len(groups), statistics=statistics):
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
    return {name: np.asarray(array) for name, array in result.items()}  # a mean of scalars is not an array


def _shares(amounts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    total = amounts.sum(0)
    return np.divide(amounts, total, out=np.zeros_like(amounts), where=total > 0)


def _present(
    groups: graphs.PermutationGroups, name: str, axis: int, assignment: Assignments, sizes: Sequence[int]
) -> npt.NDArray[np.float64]:
    # 1 for each entry along an axis of a global array whose unit a client has, else 0.
    parts = []
    for segment in groups.axes[name][axis]:
        units = np.ones(segment.width if segment.group is None else sizes[segment.group])
        if segment.group is not None and segment.group in assignment:
            units[:] = 0
            units[assignment[segment.group]] = 1
        parts.append(np.repeat(units, segment.block))
    return np.concatenate(parts)


def due(groups: graphs.PermutationGroups, step: int, *, statistics: bool) -> tuple[str, ...]:
    """Return the names of the arrays that a client sends in a step of FedMA.

    Step i has the arrays of the i-th group of hidden units, and the last step those of no group; if `statistics`, the
    last step has BatchNorm's running statistics, too.
    """
    running = {name for name, kind in groups.kinds.items() if kind == "statistic"}
    settled = [
        dict.fromkeys(slot.parameter for slot in group.rows + group.completes if slot.parameter not in running)
        for group in groups
    ]
    if step < len(groups):
        return tuple(settled[step])
    others = set(groups.tied).union(*settled) if statistics else running.union(groups.tied, *settled)
    return tuple(name for name in groups.axes if name not in others)


def groups_to_json(groups: graphs.PermutationGroups) -> str:
    """Return a network's groups of interchangeable hidden units as JSON, for a server that does not have the model."""
    return json.dumps(asdict(groups))


def groups_from_json(text: str) -> graphs.PermutationGroups:
    """Return the groups of hidden units in a text from `groups_to_json`; raise a ValueError for any other text."""
    try:
        description = json.loads(text)
        axes = {
            name: tuple(tuple(graphs.Segment(**segment) for segment in axis) for axis in axes)
            for name, axes in description["axes"].items()
        }
        needs = {name: (int(group), int(least)) for name, (group, least) in description["needs"].items()}
        groups = tuple(map(_group, description["groups"]))
        fixed = tuple(description["fixed"])
        return graphs.PermutationGroups(groups, axes, fixed, description["tied"], needs, dict(description["kinds"]))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the text is not JSON from groups_to_json ({error!r}): use one version of fedhet") from error


def _group(description: dict[str, Any]) -> graphs.PermutationGroup:
    slots = {key: tuple(graphs.Slot(**slot) for slot in description[key]) for key in ("rows", "completes")}
    return graphs.PermutationGroup(**{**description, **slots})
