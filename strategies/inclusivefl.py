"""InclusiveFL (Liu et al., KDD 2022): clients have the first d blocks of a network, and an exit (classifier).

Clients of depth d share their last block and exit, W_d, only with each other (at the largest depth: with all), and
other arrays, W, with all clients. W_d also learns from the update of the next deeper clients, of depth e ("momentum
distillation", with the key `momentum` as b). Client i returns W_i(t) and has n_i examples; n_d is the sum of n_i over
the clients of depth d:

    g_d[a]    = (a as sent to clients) - sum_{i: d_i = d} n_i W_i(t)[a] / n_d
    W_d(t)[a] = W_d(t-1)[a] - (1 - b) g_d[a] - b m_d(t-1)[a]     if m_d(t-1) has a, else W_d(t-1)[a] - g_d[a]
    W(t)[a]   = sum_i n_i W_i(t)[a] / sum_i n_i                  over the clients i that share a with all
    m_d(t)[a] = mean of g_e over a and the arrays of blocks d + 1 to e that have a's name with another block number
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from torch import nn

from fedhet.algorithms.graphs import PermutationGroups
from fedhet.algorithms.graphs.blocks import EXITS, Exits
from fedhet.errors import FedhetError
from fedhet.server import Arrays, ArraysBy, Payload, Reply, average_shared, method, option
from fedhet.utils.statistics import grouped

from .families.submodels import PARTS, ByDepth, DepthKeys, SubmodelState, read_network


@dataclass(frozen=True)
class Keys(DepthKeys):
    momentum: float = option(0.2, "beta, the share of deeper clients' update in the last block", at_least=0, below=1)


@dataclass
class LastBlocks(SubmodelState):
    """The state of InclusiveFL, by client depth: the last block and classifier (`last`), and their `momentum`."""

    last: ArraysBy = field(default_factory=dict)
    momentum: ArraysBy = field(default_factory=dict)


@method(
    "inclusivefl",
    replace(PARTS, predicts="the exit at the client's depth"),
    Keys,
    client="fedhet.client_apps.inclusivefl:InclusiveFL",
    own={"inclusivefl.depths": "2,1"},
)
class InclusiveFL(ByDepth[Keys, LastBlocks]):
    """InclusiveFL: averages last blocks over clients of equal depth, and earlier blocks over clients that have them."""

    def admit(self, reply: Reply) -> None:
        if not self.state.network:
            check_alike(read_network(reply.report.groups))
        super().admit(reply)

    def payload_for(self, client: str) -> Payload:
        payload = super().payload_for(client)
        state = self.state
        if not state.last:
            return payload
        last = state.last.get(str(_depth(self.federation.specs[client], blocks_of(state.network))), {})
        return Payload({"model": payload.arrays["model"] | last})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        state = self.state
        share = self.options.momentum
        blocks = blocks_of(state.network)
        whole = max(blocks.values())
        constants = read_network(state.network).kinds
        state.last = dict(state.last)
        present = {_depth(spec, blocks) for spec in self.federation.specs.values()}
        for depth in sorted(present - {whole, *map(int, state.last)}):
            state.last[str(depth)] = {name: array for name, array in state.model.items() if blocks[name] == depth}
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        weights = self.aggregator.weights(replies)
        depths = {client: _depth(model, blocks) for client, model in models.items()}
        starts = {depth: state.model | state.last.get(str(depth), {}) for depth in sorted({*depths.values()})}
        models = {**self.aggregator.clipped(models, {client: starts[depth] for client, depth in depths.items()})}
        rule = self.config.aggregation, self.config.byzantine
        changes: dict[int, Arrays] = {}
        for depth, before in starts.items():
            group = {client: model for client, model in models.items() if depths[client] == depth}
            learnt = state.momentum.get(str(depth), {})
            after = average_shared(group, weights, *rule)
            change = {name: np.asarray(before[name] - array) for name, array in after.items() if name not in constants}
            rest = {name: (1 - share) * change[name] for name in learnt}
            after |= {name: np.asarray(before[name] - rest[name] - share * m) for name, m in learnt.items()}
            changes[depth] = change
            if depth < whole:
                state.last[str(depth)] = {name: array for name, array in after.items() if blocks[name] == depth}
        for client, depth in depths.items():
            models[client] = {n: a for n, a in models[client].items() if not blocks[n] == depth < whole}
        state.model = state.model | average_shared(models, weights, *rule)
        state.momentum = {}
        for name, last in state.last.items():
            if deeper := [depth for depth in changes if depth > int(name)]:
                state.momentum[name] = momentum(last, int(name), changes[min(deeper)], blocks)
        return {}

    def global_model(self) -> nn.Module | None:
        model = super().global_model()
        return model.network if isinstance(model, Exits) else None


@lru_cache(maxsize=1)
def blocks_of(description: str) -> dict[str, int]:
    """Return the number (from 1) of each array's block in a network, by name; `description` is the network as JSON."""
    return {name: block for name, (_, block) in read_network(description).needs.items()}


def _depth(names: Iterable[str], blocks: Mapping[str, int]) -> int:
    return max(blocks[name] for name in names)


def alike(shapes: Mapping[str, tuple[int, ...]]) -> Iterable[list[str]]:
    """Group arrays of equal shape whose names differ only in the first number, the block; leave out exits' heads."""
    inside = (name for name in shapes if not name.startswith(f"{EXITS}."))
    return grouped(((re.sub(r"\d+", "", name, count=1), shapes[name]), name) for name in inside).values()


def momentum(last: Arrays, depth: int, change: Arrays, blocks: Mapping[str, int]) -> Arrays:
    """Return InclusiveFL's momentum of the arrays in `last`, the last block of clients with `depth` blocks, by name.

    An array's momentum is the mean of its `change` and those of its counterparts in deeper blocks (equal shape, and
    equal name except for the block's number); arrays without one are left out. `change` has values before a round minus
    those after it, for clients of the smallest depth above `depth`; `blocks` has the number of each array's block.
    """
    means: Arrays = {}
    for names in alike({name: array.shape for name, array in change.items() if blocks[name] >= depth}):
        if any(blocks[name] > depth for name in names):
            mean = np.mean([change[name] for name in names], axis=0)
            means |= {name: mean for name in names if name in last}
    return means


def check_alike(groups: PermutationGroups) -> None:
    """Raise a FedhetError unless successive blocks have weights of equal shape, with names that differ in one number.

    `groups` has a single group, whose units are the network's blocks.
    """
    shapes = groups.shapes(groups.widths)
    weights = {name: shape for name, shape in shapes.items() if len(shape) > 1 and name not in groups.kinds}
    blocks = [{groups.needs[name][1] for name in names} for names in alike(weights)]
    for pair in pairwise(range(1, groups[0].width + 1)):
        if not any(numbers.issuperset(pair) for numbers in blocks):
            raise FedhetError(
                "inclusivefl needs repeated blocks with weights of equal shapes, whose names differ in one number only "
                f"(as in layers.0, layers.1); blocks {pair[0]} and {pair[1]} of the client's network have no such "
                "weights: set inclusivefl.blocks to the names of the modules that end repeated blocks, such as layers.0"
            )
