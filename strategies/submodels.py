"""Strategies of methods whose clients have parts of one network.

HeteroFL, FedRolex and FjORD: client i of width r_i has ceil(r_i K) of the K units along each axis. Each entry of an
array is averaged over the clients that have it, weighted by their examples, or keeps its value if no client of the
round has it (HeteroFL: Diao et al., ICLR 2021, equation 2). DepthFL (Kim et al., ICLR 2023) averages in the same way; a
client of depth d has the first d blocks of the network and an exit (classifier) after each.

In InclusiveFL (Liu et al., KDD 2022), clients of depth d share their last block and exit, W_d, only with each other
(at the largest depth: with all), and other arrays, W, with all clients. W_d also learns from the update of the next
deeper clients, of depth e ("momentum distillation", with the key `momentum` as b):

    g_d[a]    = (a as sent to clients) - sum_{i: d_i = d} n_i W_i(t)[a] / n_d
    W_d(t)[a] = W_d(t-1)[a] - (1 - b) g_d[a] - b m_d(t-1)[a]     if m_d(t-1) has a, else W_d(t-1)[a] - g_d[a]
    W(t)[a]   = sum_i n_i W_i(t)[a] / sum_i n_i                  over the clients i that share a with all
    m_d(t)[a] = mean of g_e over a and the arrays of blocks d + 1 to e that have a's name with another block number

where client i returns W_i(t) and has n_i examples, and n_d is the sum of n_i over the clients of depth d.

Low-rank adapters (LoRA) of different ranks are aggregated in one of three ways, with shares p_i = n_i / sum n:

    truncate    A(t) = sum_i p_i [A_i; 0],  B(t) = sum_i p_i [B_i, 0]         HetLoRA (Cho et al., EMNLP 2024)
    svd         B(t) A(t) = the closest of rank r to sum_i p_i B_i A_i        FlexLoRA (Bai et al., NeurIPS 2024)
    stack       W(t) = W(t-1) + [B_1, B_2, ...] [p_1 A_1; p_2 A_2; ...]      FLoRA (Wang et al., NeurIPS 2024)

With `truncate` and `svd`, a client of rank r_i receives the first r_i rows of A(t) and columns of B(t); with `stack`,
it receives W(t) - W(0), and starts from new A and B.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fedhet.algorithms.graphs import PermutationGroups
from fedhet.algorithms.graphs.blocks import EXITS, Exits
from fedhet.errors import FedhetError
from fedhet.messages import Arrays, Payload, Reply, WireError, load_into
from fedhet.methods.included import submodels as declared
from fedhet.methods.included.submodels import A, B
from fedhet.server import ArraysBy, Common, average_shared
from fedhet.server.submodel import SubmodelState, SubmodelStrategy, cut, read_network
from fedhet.utils.process import standard_settings
from fedhet.utils.statistics import grouped, in_order


class HeteroFL(SubmodelStrategy[declared.SizedOptions, SubmodelState]):
    """HeteroFL: averages each weight over clients that have it, and a row of the head over clients with its class."""

    method = declared.heterofl

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        spec, rows = self.federation.specs[reply.client], reply.arrays.get("rows", {})
        for key, each in rows.items():
            many = spec[key][0][0] if key in spec and spec[key][0] else 0
            ordered = each.ndim == 1 and each.dtype == "int64" and (each[1:] > each[:-1]).all()
            if not ordered or not len(each) or not 0 <= each[0] <= each[-1] < many:
                raise WireError(f"rows of {key[:100]} must be ascending int64 below {many}: check the client's mods")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        models, parts = {}, {}
        for client, reply in replies.items():
            models[client], parts[client] = dict(reply.arrays["model"]), dict(self.parts(client))
            for key, rows in reply.arrays.get("rows", {}).items():
                array = models[client][key]
                if len(rows) < len(array):
                    models[client][key] = array[rows]
                    parts[client][key] = (rows, *parts[client].get(key, (None,) * array.ndim)[1:])
        self.state.model = self.state.model | self.average_entries(models, self.aggregator.weights(replies), parts)
        return {}


class FedRolex(HeteroFL):
    """FedRolex: HeteroFL with a client's units shifted each round (Alam et al., NeurIPS 2022, equation 2)."""

    method = declared.fedrolex


class FjORD(SubmodelStrategy[declared.FjORDOptions, SubmodelState]):
    """FjORD: averages each weight over the clients whose widest network has it (Horvath et al., NeurIPS 2021)."""

    method = declared.fjord


D = TypeVar("D", bound=declared.DepthOptions)
T = TypeVar("T", bound=SubmodelState)


class ByDepth(SubmodelStrategy[D, T]):
    """Base class of strategies that average each array over the clients whose network is deep enough to have it."""

    def global_model(self) -> nn.Module | None:
        if not self.has_global_model:
            return None
        groups = read_network(self.state.network)
        model = Exits(self.run.network_like(in_order(self.state.clients)[0]), groups[0].width)
        model.add_exits(groups)
        if model.state_dict().keys() - self.state.model.keys():
            return None
        load_into(model.state_dict(), self.state.model)
        return model


class DepthFL(ByDepth[declared.DepthFLOptions, SubmodelState]):
    """DepthFL: the network has exits (classifiers after blocks); each array is averaged over clients that have it."""

    method = declared.depthfl


@dataclass
class InclusiveFLState(SubmodelState):
    """The state of InclusiveFL, by client depth: the last block and classifier (`last`), and their `momentum`."""

    last: ArraysBy = field(default_factory=dict)
    momentum: ArraysBy = field(default_factory=dict)


class InclusiveFL(ByDepth[declared.InclusiveFLOptions, InclusiveFLState]):
    """InclusiveFL: averages last blocks over clients of equal depth, and earlier blocks over clients that have them."""

    method = declared.inclusivefl

    def admit(self, reply: Reply) -> None:
        if not self.state.network:
            check_alike(read_network(reply.report.groups))
        super().admit(reply)

    def payload_for(self, client: str) -> Payload:
        payload, state = super().payload_for(client), self.state
        if not state.last:
            return payload
        last = state.last.get(str(_depth(self.federation.specs[client], blocks_of(state.network))), {})
        return Payload({"model": payload.arrays["model"] | last})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        state, share, blocks = self.state, self.options.momentum, blocks_of(self.state.network)
        whole, constants = max(blocks.values()), read_network(self.state.network).kinds
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
            learnt, after = state.momentum.get(str(depth), {}), average_shared(group, weights, *rule)
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
            if deeper := [each for each in changes if each > int(name)]:
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
    found = [{groups.needs[name][1] for name in names} for names in alike(weights)]
    for pair in pairwise(range(1, groups[0].width + 1)):
        if not any(each.issuperset(pair) for each in found):
            raise FedhetError(
                "inclusivefl needs repeated blocks with weights of equal shapes, whose names differ in one number only "
                f"(as in layers.0, layers.1); blocks {pair[0]} and {pair[1]} of the client's network have no such "
                "weights: set inclusivefl.blocks to the names of the modules that end repeated blocks, such as layers.0"
            )


Array = np.ndarray[Any, Any]


@dataclass
class LoRAState(SubmodelState):
    """The state of LoRA: with `aggregate = stack`, `products` has, by layer, the sum of B A over rounds."""

    products: Arrays = field(default_factory=dict)


class LoRA(SubmodelStrategy[declared.LoRAOptions, LoRAState]):
    """LoRA: aggregates low-rank adapters, whose ranks can differ among clients, and averages trained heads."""

    method = declared.lora

    def common(self, reply: Reply) -> Mapping[str, Common]:
        remedy = "all clients need the same frozen layers and weights, for example a trained network that model() loads"
        return {**super().common(reply), "frozen network": Common(reply.values.line("backbone"), remedy)}

    def payload_for(self, client: str) -> Payload:
        if self.options.aggregate != "stack":
            return super().payload_for(client)
        head = {key: array for key, array in self.state.model.items() if not key.endswith((A, B))}
        groups = {"model": head, "products": self.state.products}
        return Payload({name: arrays for name, arrays in groups.items() if arrays})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        how, before, sums = self.options.aggregate, self.state.model, self.state.products
        models = self._clipped({client: reply.arrays["model"] for client, reply in replies.items()})
        if how == "truncate":
            widest = {key: max(model[key].shape for model in models.values()) for key in before}
            values = {client: {key: _filled(a, widest[key]) for key, a in m.items()} for client, m in models.items()}
        else:
            heads = {client: {key: m[key] for key in m if not key.endswith((A, B))} for client, m in models.items()}
            values = {client: _products(model) | heads[client] for client, model in models.items()}
        weights = self.aggregator.weights(replies)
        means = average_shared(values, weights, self.config.aggregation, self.config.byzantine)
        for layer in _layers(before) if how != "truncate" else ():
            product = means.pop(layer)
            if how == "svd":
                means[layer + A], means[layer + B] = _factors(product, len(before[layer + A]))
            else:
                sums[layer] = sums[layer] + product if layer in sums else product
        self.state.model = before | {key: _placed(mean, before[key]) for key, mean in means.items()}
        return {}

    def _clipped(self, models: Mapping[str, Arrays]) -> Mapping[str, Arrays]:
        stacked = self.options.aggregate == "stack" and not self.aggregator.plain
        moved = {c: {k: a for k, a in m.items() if not (stacked and k.endswith(A))} for c, m in models.items()}
        starts = {client: cut(self.state.model, self.parts(client)) for client in models}
        clipped = self.aggregator.clipped(moved, starts)
        return {client: model | clipped[client] for client, model in models.items()}


def _layers(model: Arrays) -> list[str]:
    return [key.removesuffix(A) for key in model if key.endswith(A)]


def _products(model: Arrays) -> Arrays:
    with standard_settings():
        pairs = {layer: [torch.from_numpy(model[layer + each]) for each in (B, A)] for layer in _layers(model)}
        return {layer: (b @ a).numpy() for layer, (b, a) in pairs.items()}


def _factors(product: Array, rank: int) -> tuple[Array, Array]:
    """Return A (rank, in) and B (out, rank) such that B A approximates `product` (out, in) best, by SVD."""
    with standard_settings():
        u, s, v = (each.numpy() for each in torch.linalg.svd(torch.from_numpy(product).double(), full_matrices=False))
    a, b = _filled(v[:rank], (rank, product.shape[1])), _filled((u * s)[:, :rank], (len(product), rank))
    return a.astype(product.dtype), b.astype(product.dtype)


def _placed(part: Array, whole: Array) -> Array:
    whole = whole.copy()
    whole[tuple(map(slice, part.shape))] = part
    return whole


def _filled(array: Array, shape: tuple[int, ...]) -> Array:
    return np.pad(array, [(0, whole - size) for size, whole in zip(array.shape, shape, strict=True)])
