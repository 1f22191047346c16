"""Low-rank adapters (LoRA: Hu et al., ICLR 2022) of different ranks: a linear layer computes W x + B (A x) + b.

Clients train A (rank, in) and B (out, rank). The server aggregates them in one of three ways, with p_i = n_i / sum n:

    truncate    A(t) = sum_i p_i [A_i; 0],  B(t) = sum_i p_i [B_i, 0]         HetLoRA (Cho et al., EMNLP 2024)
    svd         B(t) A(t) = the closest of rank r to sum_i p_i B_i A_i        FlexLoRA (Bai et al., NeurIPS 2024)
    stack       W(t) = W(t-1) + [B_1, B_2, ...] [p_1 A_1; p_2 A_2; ...]      FLoRA (Wang et al., NeurIPS 2024)

With `truncate` and `svd`, a client of rank r_i receives the first r_i rows of A(t) and columns of B(t); with `stack`,
it receives W(t) - W(0), and starts from new A and B.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from fedhet.methods.sharing import TRAINED
from fedhet.server import STRUCTURE, Arrays, Common, Payload, Reply, Traits, average_shared, method, option
from fedhet.utils.process import standard_settings

from .families.submodels import SubmodelKeys, SubmodelState, SubmodelStrategy, cut

A, B = "lora_a", "lora_b"
"""Suffixes of the names of an adapter's two matrices, of shapes (rank, in) and (out, rank)."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Keys(SubmodelKeys):
    size_name = "rank"
    counted = True

    aggregate: Literal["truncate", "svd", "stack"] = option(
        "truncate", "aggregation of adapters: truncate (HetLoRA), svd (FlexLoRA) or stack (FLoRA)"
    )
    ranks: str = option("16,8,4", "ranks of the adapters, assigned as `assign` says; a node may set its own as rank")
    layers: str = option("", "linear layers to adapt, where * matches any part of a name; empty: all but the head")
    train_head: bool = option(False, "train and average the head as well")


@dataclass
class Products(SubmodelState):
    """The state of LoRA: with `aggregate = stack`, `products` has, by layer, the sum of B A over rounds."""

    products: Arrays = field(default_factory=dict)


@method(
    "lora",
    Traits(
        networks="parts",
        shares=TRAINED,
        keeps="nothing",
        common_init=True,
        sends={"backbone": STRUCTURE},
        inside="head",
    ),
    Keys,
    client="fedhet.client_apps.lora:LoRA",
    own={"lora.train-head": True},
)
class LoRA(SubmodelStrategy[Keys, Products]):
    """LoRA: aggregates low-rank adapters, whose ranks can differ among clients, and averages trained heads."""

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
        how = self.options.aggregate
        before = self.state.model
        sums = self.state.products
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
        pairs = {layer: [torch.from_numpy(model[layer + matrix]) for matrix in (B, A)] for layer in _layers(model)}
        return {layer: (b @ a).numpy() for layer, (b, a) in pairs.items()}


def _factors(product: Array, rank: int) -> tuple[Array, Array]:
    """Return A (rank, in) and B (out, rank) such that B A approximates `product` (out, in) best, by SVD."""
    with standard_settings():
        factors = torch.linalg.svd(torch.from_numpy(product).double(), full_matrices=False)
        u, s, v = (factor.numpy() for factor in factors)
    a = _filled(v[:rank], (rank, product.shape[1]))
    b = _filled((u * s)[:, :rank], (len(product), rank))
    return a.astype(product.dtype), b.astype(product.dtype)


def _placed(part: Array, whole: Array) -> Array:
    whole = whole.copy()
    whole[tuple(map(slice, part.shape))] = part
    return whole


def _filled(array: Array, shape: tuple[int, ...]) -> Array:
    return np.pad(array, [(0, whole - size) for size, whole in zip(array.shape, shape, strict=True)])
