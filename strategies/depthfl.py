"""DepthFL and InclusiveFL, server side: each array is averaged over clients whose network is deep enough to have it.

A client of depth d has the first d blocks of the network and an exit (classifier) after each.

DepthFL (Kim et al., ICLR 2023): with the arrays A_i of client i,

    W(t)[a] = sum_{i: a in A_i} n_i W_i(t)[a] / sum_{i: a in A_i} n_i

The global model's scores are the mean of the scores of all exits.

InclusiveFL (Liu et al., KDD 2022): clients of depth d share their last block and exit, W_d, only with each other. W_d
learns from the momentum m_d of the next deeper clients of the last round, whose depth is e:

    g_d       = W_d(t-1) - sum_{i: d_i = d} n_i W_i(t) / n_d
    W_d(t)[a] = W_d(t-1)[a] - (1 - b) g_d[a] - b m_d(t-1)[a]     for arrays a of m_d, else W_d(t-1)[a] - g_d[a]
    W(t)[a]   = sum_i n_i W_i(t)[a] / sum_i n_i                  over the clients i deeper than the block of a
    m_d(t)[a] = mean of g_e over the arrays of blocks d to e that are like a, for arrays a of block d

where b is `momentum`, and g_d the mean by the configured `aggregation`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
from torch import nn

from fedhet.algorithms.graphs import PermutationGroups
from fedhet.algorithms.graphs.blocks import EXITS, Exits
from fedhet.errors import FedhetError
from fedhet.messages import Arrays, Payload, Reply, cast, load_into
from fedhet.methods.included.submodels import DepthFLOptions, DepthOptions, InclusiveFLOptions, depthfl, inclusivefl
from fedhet.server import ArraysBy
from fedhet.server.submodel import SubmodelState, SubmodelStrategy, read_network
from fedhet.utils.statistics import grouped, in_order

D = TypeVar("D", bound=DepthOptions)
T = TypeVar("T", bound=SubmodelState)


class ByDepth(SubmodelStrategy[D, T]):
    """Averages like FedAvg, but each array over the clients whose network is deep enough to have it."""

    def global_model(self) -> nn.Module | None:
        """Return the whole network with its exits; None before training or with local BatchNorm statistics."""
        if not self.has_global_model:
            return None
        groups = read_network(self.state.network)
        model = Exits(self.run.network_like(in_order(self.state.clients)[0]), groups[0].width)
        model.add_exits(groups)
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model


class DepthFL(ByDepth[DepthFLOptions, SubmodelState]):
    """Averages each array over the clients that have it; the global model is the whole network with its exits."""

    method = depthfl


@dataclass
class InclusiveFLState(SubmodelState):
    """The state of InclusiveFL, for each depth of clients except the full depth.

    `last` has the last block and exit of these clients, and `momentum` the update of deeper clients for this block.
    """

    last: ArraysBy = field(default_factory=dict)
    momentum: ArraysBy = field(default_factory=dict)


class InclusiveFL(ByDepth[InclusiveFLOptions, InclusiveFLState]):
    """Averages last blocks over clients of equal depth, and earlier blocks over all clients that have them."""

    method = inclusivefl
    state_class = InclusiveFLState

    def admit(self, reply: Reply) -> None:
        if not self.state.network:
            check_alike(read_network(reply.report.groups))
        super().admit(reply)

    def payload_for(self, client: str) -> Payload:
        """Return the client's blocks, where the last block is the one that clients of the same depth share."""
        payload, state = super().payload_for(client), self.state
        if not state.last:
            return payload
        last = state.last.get(str(_depth(self.federation.specs[client], blocks_of(state.network))), {})
        return Payload({"model": payload.arrays["model"] | cast(last, self.config.wire_dtype)})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average last blocks within each depth, and the arrays of earlier blocks over all clients that have them."""
        state, share, blocks = self.state, self.options.momentum, blocks_of(self.state.network)
        whole, constants = max(blocks.values()), read_network(self.state.network).kinds
        state.last = dict(state.last)
        for depth in sorted(
            {_depth(spec, blocks) for spec in self.federation.specs.values()} - {whole, *map(int, state.last)}
        ):
            state.last[str(depth)] = {name: array for name, array in state.model.items() if blocks[name] == depth}
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        weights = {client: float(reply.examples) for client, reply in replies.items()}
        depths = {client: _depth(model, blocks) for client, model in models.items()}
        changes: dict[int, Arrays] = {}
        for depth in sorted({*depths.values()}):
            group = {client: model for client, model in models.items() if depths[client] == depth}
            before, learnt = state.model | state.last.get(str(depth), {}), state.momentum.get(str(depth), {})
            after = self.aggregator.average(group, weights, before=before)
            change = {name: np.asarray(before[name] - array) for name, array in after.items() if name not in constants}
            after |= {
                name: np.asarray(before[name] - (1 - share) * change[name] - share * m) for name, m in learnt.items()
            }
            changes[depth] = change
            if depth < whole:
                state.last[str(depth)] = {name: array for name, array in after.items() if blocks[name] == depth}
        for client, depth in depths.items():
            models[client] = {n: a for n, a in models[client].items() if not blocks[n] == depth < whole}
        state.model = state.model | self.aggregator.average(models, weights)
        state.momentum = {}
        for name, last in state.last.items():
            if deeper := [each for each in changes if each > int(name)]:
                state.momentum[name] = momentum(last, int(name), changes[min(deeper)], blocks)
        return {}

    def global_model(self) -> nn.Module | None:
        """Return the whole network without exits, since no client trains all exits."""
        model = super().global_model()
        return model.network if isinstance(model, Exits) else None


@lru_cache(maxsize=1)
def blocks_of(description: str) -> dict[str, int]:
    """Return the number of each array's block, from 1; `description` has the network's permutation groups as JSON."""
    return {name: block for name, (_, block) in read_network(description).needs.items()}


def _depth(names: Iterable[str], blocks: Mapping[str, int]) -> int:
    return max(blocks[name] for name in names)


def alike(shapes: Mapping[str, tuple[int, ...]]) -> Iterable[list[str]]:
    """Group arrays of repeated layers, without exits: equal shapes, and names that differ only in the first number."""
    inside = (name for name in shapes if not name.startswith(f"{EXITS}."))
    return grouped(((re.sub(r"\d+", "", name, count=1), shapes[name]), name) for name in inside).values()


def momentum(last: Arrays, depth: int, change: Arrays, blocks: Mapping[str, int]) -> Arrays:
    """Return the mean `change`, over blocks from `depth` on, of the arrays that are `alike` to each array in `last`."""
    means: Arrays = {}
    for names in alike({name: array.shape for name, array in change.items() if blocks[name] >= depth}):
        if any(blocks[name] > depth for name in names):
            mean = np.mean([change[name] for name in names], axis=0)
            means |= {name: mean for name in names if name in last}
    return means


def check_alike(groups: PermutationGroups) -> None:
    """Raise a FedhetError unless each block has weights that correspond to weights of the next block (see `alike`)."""
    shapes = groups.shapes(groups.widths)
    weights = {name: shape for name, shape in shapes.items() if len(shape) > 1 and name not in groups.kinds}
    found = [{groups.needs[name][1] for name in names} for names in alike(weights)]
    for pair in pairwise(range(1, groups[0].width + 1)):
        if not any(each.issuperset(pair) for each in found):
            raise FedhetError(
                "inclusivefl needs blocks of repeated layers, whose weights have equal shapes, and names that differ "
                f"in one number only; blocks {pair[0]} and {pair[1]} of the client's network have no such weights: "
                "name other modules as the ends of blocks (blocks)"
            )
