"""InclusiveFL, server side: last blocks learn from the momentum of deeper clients (Liu et al., KDD 2022).

Clients of depth d have a last block and exit of their own, W_d, and for these learn from the momentum m_d of the next
deeper clients e:

    g_d       = W_d(t-1) - sum_{i: d_i = d} n_i W_i(t) / n_d
    W_d(t)[a] = W_d(t-1)[a] - (1 - b) g_d[a] - b m_d(t-1)[a]     for arrays a of block d, else W_d(t-1)[a] - g_d[a]
    W(t)[a]   = sum_d n_d W_d(t)[a] / sum_d n_d                  over the depths d beyond the block of a
    m_d(t)[a] = mean of g_e over the arrays of blocks d to e that are like a

where b is `momentum`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
from torch import nn

from fedhet.errors import FedhetError
from fedhet.graphs import PermutationGroups
from fedhet.graphs.exits import EXITS
from fedhet.matching import understand
from fedhet.methods import inclusivefl
from fedhet.rows import grouped
from fedhet.server import ArraysBy, average_shared
from fedhet.sharing import is_statistic
from fedhet.wire import Arrays, Payload, Reply, cast

from .depthfl import ByDepth, DepthState  # noqa: TID251 - this folder is fedhet.strategies


@dataclass
class InclusiveFLState(DepthState):
    """The state by depth.

    Attributes:
        last: the last block, with its exit, of clients that have not all blocks.
        momentum: what these learn from deeper clients, for arrays of the last block.
    """

    last: ArraysBy = field(default_factory=dict)
    momentum: ArraysBy = field(default_factory=dict)


class InclusiveFL(ByDepth[inclusivefl.InclusiveFLParameters, InclusiveFLState]):
    """Averages the clients of each depth, then what several depths share."""

    method = inclusivefl.method
    state_class = InclusiveFLState

    def admit(self, reply: Reply) -> None:
        """Keep the description of the network, if its blocks can learn from each other."""
        if not self.state.blocks:
            check_alike(understand(reply.report.groups))
        super().admit(reply)

    def payload_for(self, client: str) -> Payload:
        """Return the client's part, with the last block that clients of its depth have."""
        payload, state = super().payload_for(client), self.state
        if not state.last:
            return payload
        last = state.last.get(str(_depth(self.federation.specs[client], blocks_of(state.blocks))), {})
        return Payload({"model": payload.arrays["model"] | cast(last, self.config.wire_dtype)})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the arrays of earlier blocks over all depths, and last blocks within each."""
        blocks = blocks_of(self.state.blocks)
        whole = max(blocks.values())
        depths = {client: _depth(reply.arrays["model"], blocks) for client, reply in replies.items()}
        changes: dict[int, Arrays] = {}
        shared, last, weights = dict[str, Arrays](), dict[str, Arrays](), dict[str, float]()
        for depth in sorted({*depths.values()}):
            group = {client: reply for client, reply in replies.items() if depths[client] == depth}
            models, changes[depth] = self._of_depth(depth, group)
            weights[str(depth)] = float(sum(reply.examples for reply in group.values()))
            own = {name for name in models if blocks[name] == depth < whole}
            shared[str(depth)] = {name: array for name, array in models.items() if name not in own}
            last[str(depth)] = {name: models[name] for name in own}
        specs = {name: {n: (a.shape, str(a.dtype)) for n, a in arrays.items()} for name, arrays in shared.items()}
        state = self.state
        state.model = state.model | average_shared(shared, weights, specs)
        state.last = state.last | {name: arrays for name, arrays in last.items() if arrays}
        for name, arrays in state.last.items():
            if deeper := min((each for each in changes if each > int(name)), default=0):
                state.momentum = state.momentum | {name: momentum(arrays, int(name), changes[deeper], blocks)}
        return {}

    def _of_depth(self, depth: int, replies: Mapping[str, Reply]) -> tuple[Arrays, Arrays]:
        """Return W_d(t) of the clients of one depth, and g_d."""
        share = self.parameters.momentum
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        weights = {client: float(reply.examples) for client, reply in replies.items()}
        before = self.state.model | self.state.last.get(str(depth), {})
        after = self.aggregator.average(models, weights, before=before, parts={client: {} for client in models})
        change = {name: before[name] - after[name] for name in after if not is_statistic(name)}
        for name, learnt in self.state.momentum.get(str(depth), {}).items():
            after[name] = before[name] - (1 - share) * change[name] - share * learnt
        return after, change

    def global_model(self) -> nn.Module | None:
        """Return the whole network without exits, since nobody trains all exits of one network."""
        model = self.with_exits()
        return model.network if model else None


@lru_cache(maxsize=1)
def blocks_of(description: str) -> dict[str, int]:
    """Return the number of each array's block, from 1, by a description of the network."""
    return {name: block for name, (_, block) in understand(description).needs.items()}


def _depth(names: Iterable[str], blocks: Mapping[str, int]) -> int:
    return max(blocks[name] for name in names)


def alike(shapes: Mapping[str, tuple[int, ...]]) -> Iterable[list[str]]:
    """Group arrays of repeated layers: equal names but for the first number in them, and equal shapes; no exits."""
    inside = (name for name in shapes if not (is_statistic(name) or name.startswith(f"{EXITS}.")))
    return grouped(((re.sub(r"\d+", "", name, count=1), shapes[name]), name) for name in inside).values()


def momentum(last: Arrays, depth: int, change: Arrays, blocks: Mapping[str, int]) -> Arrays:
    """Return the mean change of the arrays that are like each of a last block, in this block and later ones.

    Args:
        last: the last block of clients of a depth.
        depth: this depth.
        change: the change of deeper clients' arrays.
        blocks: the number of each array's block.
    """
    means: Arrays = {}
    for names in alike({name: array.shape for name, array in change.items() if blocks[name] >= depth}):
        if any(blocks[name] > depth for name in names):
            mean = np.mean([change[name] for name in names], axis=0)
            means |= {name: mean for name in names if name in last}
    return means


def check_alike(groups: PermutationGroups) -> None:
    """Check that each block has weights like those of the block after it; raises a FedhetError."""
    weights = {name: shape for name, shape in groups.shapes(groups.widths).items() if len(shape) > 1}
    found = [{groups.needs[name][1] for name in names} for names in alike(weights)]
    for pair in pairwise(range(1, groups[0].width + 1)):
        if not any(each.issuperset(pair) for each in found):
            raise FedhetError(
                "inclusivefl needs blocks of repeated layers, whose weights have equal shapes, and "
                f"equal names but for a number; blocks {pair[0]} and {pair[1]} of its network have none such: name "
                "other modules that end blocks (inclusivefl.blocks)"
            )
