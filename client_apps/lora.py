"""Client side of LoRA: trains low-rank adapters of the client's rank; the rest of the network is frozen.

A (rank, in) is initialised uniformly in +-1 / sqrt(in), and B (out, rank) to zero (Hu et al., ICLR 2022).
"""

import math
import re
from collections.abc import Hashable, Sequence
from fnmatch import filter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedhet.algorithms.graphs import PermutationGroup, PermutationGroups, Segment, Submodel
from fedhet.client import ClientSide, Phase
from fedhet.data.examples import digest
from fedhet.errors import ModelError
from fedhet.messages import Arrays, Payload, to_tensor
from fedhet.methods.options import Config, listed
from fedhet.models.copies import storage_place
from fedhet.models.representation import head_name
from fedhet.strategies.lora import A, B, Keys


class Ranks(Submodel):
    """A client's part of the adapters: the first r rows of A and the first r columns of B, for a client of rank r."""

    @classmethod
    def groups_of(cls, model: nn.Module, inputs: Tensor) -> PermutationGroups:
        named = model.named_parameters(remove_duplicate=False)
        trained = {name: parameter.shape for name, parameter in named if parameter.requires_grad}
        axes = {name: [(Segment(None, size),) for size in shape] for name, shape in trained.items()}
        for name in [name.removesuffix(f".{A}") for name in trained if name.endswith(f".{A}")]:
            axes[f"{name}.{A}"][0] = axes[f"{name}.{B}"][1] = (Segment(0, ranks := trained[f"{name}.{A}"][0]),)
        group = PermutationGroup(0, "rank", ranks, rows=(), completes=())
        return PermutationGroups((group,), {name: tuple(layout) for name, layout in axes.items()}, (), {})


class LoRA(ClientSide[Keys]):
    parts = Ranks

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        keys = config.options
        head = head_name(model, config.head)
        if adapters(model):
            raise ModelError("the model function returned one network twice, but lora needs a new network in each call")
        model.requires_grad_(False)
        model.get_submodule(head).requires_grad_(keys.train_head)
        # Layers with one tied weight share an adapter.
        first: dict[Hashable, Any] = {}
        rank = int(keys.largest)
        for layer in _chosen(model, keys, head):
            weight = layer.weight
            if (tied := first.setdefault(storage_place(weight), layer)) is layer:
                # A network of bfloat16 is adapted in float32.
                dtype = torch.promote_types(weight.dtype, torch.float32)
                outputs, inputs = _as_stored(layer, weight).shape
                layer.register_parameter(A, nn.Parameter(weight.new_empty(rank, inputs, dtype=dtype)))
                layer.register_parameter(B, nn.Parameter(weight.new_empty(outputs, rank, dtype=dtype)))
                _start(layer)
            layer.lora_a, layer.lora_b = tied.lora_a, tied.lora_b
            layer.register_forward_hook(_with_adapter, with_kwargs=True)
        return model

    def handshake(self, payload: Payload) -> Payload:
        """Return a digest (hash) of the frozen weights; raise a ModelError if an adapter has no effect."""
        client = self.client
        check_adapters(client.model, client.transform(client.data.train.inputs[:2]))
        shared = self.shared_names()
        tensors = client.tensors.items()
        frozen = {name: tensor for name, tensor in tensors if name not in shared and not name.endswith((A, B))}
        return Payload(values={"backbone": digest(*frozen, *frozen.values())})

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        if self.options.aggregate != "stack":
            return
        generator = self.client.generator("adapters")
        products = payload.arrays.get("products", {})
        for name, layer in adapters(self.client.model).items():
            _add(layer, name, products)
            _start(layer, generator)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        return [Phase(self.client.request.epochs, self.client.optimisation(), trains=self.shared_names().__contains__)]

    def personal(self) -> dict[str, Tensor]:
        """Return the network's tensors, with the adapters merged into the weights."""
        tensors = dict(self.client.tensors)
        for name, layer in adapters(self.client.model).items():
            change = layer.lora_b @ layer.lora_a
            tensors[f"{name}.weight"] = layer.weight + _as_stored(layer, change).to(layer.weight.dtype)
        return {name: tensor for name, tensor in tensors.items() if not name.endswith((A, B))}


def check_adapters(model: nn.Module, inputs: Tensor) -> None:
    """Check that outputs for `inputs` (n, ...) depend on each adapter; raise a ModelError otherwise."""
    layers = adapters(model)
    total = model.eval()(inputs).sum() + torch.zeros((), requires_grad=True)
    gradients = torch.autograd.grad(total, [layer.lora_b for layer in layers.values()], allow_unused=True)
    if idle := [name for name, gradient in zip(layers, gradients, strict=True) if gradient is None]:
        patterns = {name: re.sub(r"\d+", "*", name) for name in layers if name not in idle}
        others = dict.fromkeys(name if filter(idle, pattern) else pattern for name, pattern in patterns.items())
        remedy = f"set lora.layers = '{', '.join(others)}'" if others else "choose another method"
        raise ModelError(
            f"an adapter of {idle[0]} has no effect on the outputs of {type(model).__name__}, which calls the layer "
            f"nowhere (but may use its weight), or does not use what the layer returns: {remedy}"
        )


def adapters(model: nn.Module) -> dict[str, Any]:
    """Return the layers of a model that have an adapter, by name."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if A in module._parameters}


def _is_conv1d(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _as_stored(layer: nn.Module, weight: Tensor) -> Tensor:
    return weight.T if _is_conv1d(layer) else weight


def _chosen(model: nn.Module, keys: Keys, head: str) -> list[Any]:
    linear = {
        name: module
        for name, module in model.named_modules()
        if name
        and "weight" in module._parameters  # not computed, as by weight_norm
        and (isinstance(module, nn.Linear) or _is_conv1d(module))
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    }
    if keys.train_head or not keys.layers:
        linear = {name: layer for name, layer in linear.items() if not f"{name}.".startswith(f"{head}.")}
    plain = (module for module in model.modules() if module not in linear.values())
    # Weights that other modules use as well stay tied.
    outside = {storage_place(tensor) for module in plain for tensor in module.parameters(recurse=False)}
    linear = {name: layer for name, layer in linear.items() if storage_place(layer.weight) not in outside}
    matching = {pattern: filter(linear, pattern) for pattern in listed(keys.layers) or ["*"]}
    if not keys.layers and not linear:
        raise ModelError(
            f"lora adapts nn.Linear layers, but {type(model).__name__} has none except its head {head!r}: build "
            "hidden layers as nn.Linear, or choose another method"
        )
    if idle := [pattern for pattern, names in matching.items() if not names]:
        raise ModelError(
            f"lora.layers: {type(model).__name__} has no nn.Linear that matches {', '.join(idle)}; adapters can be "
            f"added to {', '.join(linear) or 'none of its layers'}"
        )
    return [linear[name] for name in {name: None for names in matching.values() for name in names}]


@torch.no_grad()
def _start(layer: Any, generator: torch.Generator | None = None) -> None:
    a = layer.lora_a
    a.copy_((2 * torch.rand(a.shape, generator=generator) - 1) / math.sqrt(a.shape[1]))
    layer.lora_b.zero_()


@torch.no_grad()
def _add(layer: Any, name: str, products: Arrays) -> None:
    if f"{name}." in products:
        layer.weight += _as_stored(layer, to_tensor(products[f"{name}."]).to(layer.lora_b)).to(layer.weight.dtype)


def _with_adapter(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Tensor) -> Tensor:
    (inputs,) = (*args, *kwargs.values())
    change = F.linear(F.linear(inputs.to(layer.lora_a.dtype), layer.lora_a), layer.lora_b)
    return outputs + change.to(outputs.dtype)
