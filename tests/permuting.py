"""Networks with their hidden units in another order."""

from fedhet.algorithms.graphs import PermutationGroups, expand, widths_of
from fedhet.algorithms.graphs.states import Array, Assignments, State


def permute(state: State, groups: PermutationGroups, permutations: Assignments) -> dict[str, Array]:
    """Return the state with interchangeable units reordered: unit l of group i moves to ``permutations[i][l]``."""
    local = widths_of({name: tuple(value.shape) for name, value in state.items()}, groups)
    return expand(state, groups, permutations, {index: local[index] for index in permutations})
