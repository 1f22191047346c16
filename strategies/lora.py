"""Low-rank adapters of different ranks, server side: three ways to aggregate them.

    truncate    A(t) = sum_i p_i [A_i; 0],  B(t) = sum_i p_i [B_i, 0]         HetLoRA (Cho et al., EMNLP 2024)
    svd         B(t) A(t) = the closest of rank r to sum_i p_i B_i A_i        FlexLoRA (Bai et al., NeurIPS 2024)
    stack       W(t) = W(t-1) + [B_1, ..., B_m] [p_1 A_1; ...; p_m A_m]     FLoRA (Wang et al., NeurIPS 2024)

A client of rank r_i receives the first r_i rows of A(t) and columns of B(t). p_i is n_i / sum n, where n_i is the
client's number of examples. Rows and columns that no client of a round has keep their values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedhet.messages import Arrays, Payload, Reply, cast
from fedhet.methods.included.submodels import A, B, LoRAOptions, lora
from fedhet.server import Common, average_shared
from fedhet.server.submodel import SubmodelState, SubmodelStrategy, cut
from fedhet.utils.machine import one_thread

Array = np.ndarray[Any, Any]


@dataclass
class LoRAState(SubmodelState):
    """The state of LoRA: with `aggregate = stack`, `products` has each layer's sum of products B A.

    A sum is kept as factors `lora_a` (r, in) and `lora_b` (out, r) while these are smaller than the whole matrix, and
    then as the matrix, under the name `lora_b`.
    """

    products: Arrays = field(default_factory=dict)


class LoRA(SubmodelStrategy[LoRAOptions, LoRAState]):
    """Aggregates the clients' low-rank adapters, and averages the head if it is trained."""

    method = lora
    state_class = LoRAState

    def common(self, reply: Reply) -> Mapping[str, Common]:
        remedy = "all clients need the same frozen layers and weights, for example a trained network that model() loads"
        return {**super().common(reply), "frozen network": Common(reply.values.line("backbone"), remedy)}

    def payload_for(self, client: str) -> Payload:
        """Return the client's part of the adapters; with `aggregate = stack`, the sums of products B A so far."""
        if self.options.aggregate != "stack":
            return super().payload_for(client)
        head = {key: array for key, array in self.state.model.items() if not key.endswith((A, B))}
        groups = {"model": head, "products": self.state.products}
        return Payload({name: cast(arrays, self.config.wire_dtype) for name, arrays in groups.items() if arrays})

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Aggregate the adapters by the method's key `aggregate`, and average the head as in FedAvg."""
        keys, config, before = self.options, self.config, self.state.model
        models = self._clipped({client: reply.arrays["model"] for client, reply in replies.items()})
        products = {client: _products(model) for client, model in models.items()}
        weights = {client: float(reply.examples) for client, reply in replies.items()}
        widest = {key: max(model[key].shape for model in models.values()) for key in before}
        values = {client: {key: _filled(a, widest[key]) for key, a in m.items()} for client, m in models.items()}
        if keys.aggregate != "truncate":
            heads = {client: {key: m[key] for key in m if not key.endswith((A, B))} for client, m in models.items()}
            values = {client: products[client] | heads[client] for client in models}
        specs = {client: {key: (a.shape, str(a.dtype)) for key, a in m.items()} for client, m in values.items()}
        means = average_shared(values, weights, specs, config.aggregation, config.byzantine)
        for layer in _layers(before) if keys.aggregate != "truncate" else ():
            product = means.pop(layer)
            if keys.aggregate == "svd":
                means[layer + A], means[layer + B] = _factors(product, len(before[layer + A]))
            else:
                self._add(layer, product, models, weights)
        self.state.model = before | {key: _placed(mean, before[key]) for key, mean in means.items()}
        return {}

    def _clipped(self, sent: Mapping[str, Arrays]) -> dict[str, Arrays]:
        """Return the clients' arrays in the dtypes of the state, with updates clipped."""
        # With `aggregate = stack`, the server does not know the A from which a client started.
        stacked = self.options.aggregate == "stack" and not self.aggregator.plain
        before, left_out = self.state.model, A if stacked else None
        models = {c: {key: a.astype(before[key].dtype) for key, a in model.items()} for c, model in sent.items()}
        moved = {c: {k: model[k] for k in model if k.rpartition(".")[2] != left_out} for c, model in models.items()}
        clipped = self.aggregator.clipped(moved, {client: cut(before, self.parts(client)) for client in sent})
        return {client: model | clipped[client] for client, model in models.items()}

    def _add(self, layer: str, product: Array, models: Mapping[str, Arrays], weights: Mapping[str, float]) -> None:
        """Add a round's mean product B A to a layer's sum; with the plain mean, as factors while these are smaller."""
        sums, a, b, total = self.state.products, layer + A, layer + B, sum(weights.values())
        if self.config.aggregation == "mean" and (a in sums or b not in sums):
            pairs = [(sums.pop(a), sums.pop(b))] if a in sums else []
            pairs += [(model[a] * (weights[client] / total), model[b]) for client, model in models.items()]
            stacked = {a: np.concatenate([rows for rows, _ in pairs]), b: np.concatenate([c for _, c in pairs], 1)}
            if stacked[a].size + stacked[b].size < product.size:
                sums |= stacked
                return
            product = _products(stacked)[layer]
        sums[b] = sums[b] + product if b in sums else product


def _layers(model: Arrays) -> list[str]:
    return [key.removesuffix(A) for key in model if key.endswith(A)]


def _products(model: Arrays) -> Arrays:
    """Return the product B A of each adapter, (out, in), by layer."""
    with one_thread():
        pairs = {layer: [torch.from_numpy(model[layer + each]) for each in (B, A)] for layer in _layers(model)}
        return {layer: (b @ a).numpy() for layer, (b, a) in pairs.items()}


def _factors(product: Array, rank: int) -> tuple[Array, Array]:
    """Return A (rank, in) and B (out, rank) such that B A is the best approximation of `product` of this rank (SVD)."""
    with one_thread():
        u, s, v = (each.numpy() for each in torch.linalg.svd(torch.from_numpy(product).double(), full_matrices=False))
    a, b = _filled(v[:rank], (rank, product.shape[1])), _filled((u * s)[:, :rank], (len(product), rank))
    return a.astype(product.dtype), b.astype(product.dtype)


def _placed(part: Array, whole: Array) -> Array:
    """Return a copy of `whole` with `part` in its first rows and columns."""
    whole = whole.copy()
    whole[tuple(map(slice, part.shape))] = part
    return whole


def _filled(array: Array, shape: tuple[int, ...]) -> Array:
    return np.pad(array, [(0, whole - size) for size, whole in zip(array.shape, shape, strict=True)])
