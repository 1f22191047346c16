"""Copies of networks with other numbers of hidden units, and submodels: narrower networks cut from a wider one."""

import math
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from fedhet.algorithms.graphs.graph import ArchitectureGraph, UnsupportedArchitecture, architecture_graph
from fedhet.algorithms.graphs.permutations import PermutationGroups, permutation_groups
from fedhet.algorithms.graphs.states import State, cut_out, entries_of, expand
from fedhet.models.copies import copied, holds_arrays, in_evaluation_mode, storage_place
from fedhet.utils.machine import out_of_memory

_resizable: WeakKeyDictionary[nn.Module, dict[tuple[ArchitectureGraph, bool], PermutationGroups]] = WeakKeyDictionary()


def resize(model: nn.Module, state: State) -> nn.Module:
    """Return a copy of a network with the arrays in `state` only; their shapes determine the sizes of its layers.

    Recurrent layers of different widths become ``StackedRecurrent``, and resized ``nn.MultiheadAttention`` becomes
    ``HeadAttention``. Raises UnsupportedArchitecture for a layer of PyTorch that fedhet does not know how to resize.
    """
    if holds_arrays(model):
        raise UnsupportedArchitecture(
            f"network {type(model).__name__} has arrays of its layers, or views of them, in other attributes, which "
            "would keep their sizes and values: use arrays only as attributes of their layers"
        )
    result = copied(model)
    lacking = model.state_dict().keys() - state.keys()
    # By storage of the replaced tensor, to keep ties; the tensor is kept so that its storage is not reused.
    new: dict[Hashable, tuple[Tensor, Tensor]] = {}
    for prefix, module in list(result.named_modules()):
        changed = False
        for store in (module._parameters, module._buffers):
            for name, old in list(store.items()):
                key = f"{prefix}.{name}" if prefix else name
                if key in lacking:
                    store[name] = None
                if old is None or key not in state:
                    continue
                changed |= tuple(old.shape) != tuple(state[key].shape)
                if (place := storage_place(old)) not in new:
                    value = torch.as_tensor(state[key]).detach().to(old).clone()
                    new[place] = old, nn.Parameter(value, old.requires_grad) if store is module._parameters else value
                setattr(module, name, new[place][1])
        if isinstance(module, _NormBase) and module.running_mean is None:
            module.track_running_stats = False  # else PyTorch would expect a counter in a state that is loaded
        if changed and (other := _replaced(module, prefix)) is not module:
            if prefix:
                result.set_submodule(prefix, other)
            else:
                result = other
    return result


def resizable_groups(model: nn.Module, example: Tensor, *, partly: bool = False) -> PermutationGroups:
    """Return the groups of interchangeable units of a network that works with other widths; results are cached.

    As a check, all groups are widened, the network runs on `example`, and the wider network's groups are derived; this
    raises an UnsupportedArchitecture error if it fails. With `partly`, units that cannot be permuted are left out of
    all groups instead and, if the check still fails, all units of modules that reshape one axis into several.
    """
    graph = architecture_graph(model, example)
    cached = _resizable.setdefault(model, {})
    if (graph, partly) not in cached:
        try:
            groups = _checked(model, graph, example, partly=partly)
        except UnsupportedArchitecture:
            if not partly:
                raise
            groups = _checked(model, graph, example, partly=True, whole=True)
            if not groups:
                raise
        if partly and not groups:
            permutation_groups(graph)  # raises an error with the reason
            raise UnsupportedArchitecture(f"network {graph.model} has no hidden layer to make narrower: use another")
        cached[graph, partly] = groups
    return cached[graph, partly]


def _checked(model: nn.Module, graph: ArchitectureGraph, example: Tensor, **options: bool) -> PermutationGroups:
    groups = permutation_groups(graph, **options)
    # More than a few units: a size that the forward divides without remainder, such as by heads, must change, too.
    sizes = [group.width + group.width // 4 + 1 + group.index % 3 for group in groups]
    places = {group.index: np.arange(group.width) for group in groups}
    wide = resize(model, expand(model.state_dict(), groups, places, dict(enumerate(sizes))))
    try:
        reason = _failing(wide, example)
        again = groups if reason else permutation_groups(architecture_graph(wide, example), **options)
        if not reason and again.axes != groups.with_widths(sizes).axes:
            reason = "the order of its hidden units would change"
    except UnsupportedArchitecture as error:
        reason = str(error).partition("\n")[0]
    if reason:
        raise UnsupportedArchitecture(
            f"network {type(model).__name__} cannot have other numbers of hidden units: {reason}; in its forward, "
            "take sizes of hidden layers from its tensors (x.flatten(1), x.unflatten(-1, (-1, head_size))) instead of "
            "numbers or attributes (x.view(-1, 400)), or choose another network or method"
        )
    return groups


def _failing(model: nn.Module, example: Tensor) -> str:
    # An error message with the last module that ran, or an empty string if the network runs.
    done = [""]
    with ExitStack() as hooks, in_evaluation_mode(model), torch.no_grad():
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(lambda *_, name=name: done.append(name)))
        try:
            model(example)
        except Exception as error:  # whatever a user's forward raises
            if out_of_memory(error):
                raise
            return f"its forward fails after module {done[-1]!r}"
    return ""


def _replaced(module: nn.Module, name: str) -> nn.Module:
    match module:
        case nn.RNNBase() if len({len(weights[1][0]) for weights in module.all_weights}) > 1:
            return StackedRecurrent(module)
        case nn.RNNBase():
            module.input_size, module.hidden_size = (len(w[0]) for w in module.all_weights[0][:2])
        case nn.MultiheadAttention():
            return HeadAttention(module)
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case _ConvNd() if not module.transposed:
            outputs, inputs = module.weight.shape[:2]
            if module.groups > 1:  # groups keep their number of outputs
                module.groups = outputs // (module.out_channels // module.groups)
            module.out_channels = outputs
            module.in_channels = inputs * module.groups
        case _BatchNorm():
            module.num_features = next(len(v) for v in (module.weight, module.running_mean) if v is not None)
        case nn.Embedding():
            module.num_embeddings, module.embedding_dim = module.weight.shape
        case nn.PReLU():
            module.num_parameters = len(module.weight)
        case nn.LayerNorm() | nn.RMSNorm():
            module.normalized_shape = tuple(module.weight.shape)
        case nn.GroupNorm():
            if module.num_groups > 1:  # groups keep their number of channels
                module.num_groups = len(module.weight) // (module.num_channels // module.num_groups)
            module.num_channels = len(module.weight)
        case _ if hasattr(module, "hidden_dim") and isinstance(token := getattr(module, "class_token", None), Tensor):
            module.hidden_dim = token.shape[-1]  # type: ignore[assignment]  # of torchvision's VisionTransformer
        case _ if type(module).__module__.startswith("torch.nn."):
            raise UnsupportedArchitecture(
                f"layer {name!r}, of type {type(module).__name__}, cannot change its width: use another type of layer"
            )
    return module


States = tuple[Tensor, ...]


class StackedRecurrent(nn.Module):
    """``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` whose layers can have different widths.

    The final states are a tuple with a tensor (N, H_l) for each layer l and direction; an LSTM returns two such tuples.
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.mode, self.num_layers, self.bias = layer.mode, layer.num_layers, layer.bias
        self.batch_first, self.dropout, self.bidirectional = layer.batch_first, layer.dropout, layer.bidirectional
        for name, parameter in layer._parameters.items():
            self.register_parameter(name, parameter)
        self.train(layer.training)

    def forward(self, sequence: Tensor) -> tuple[Tensor, States | tuple[States, ...]]:
        """Return outputs and final states for sequences (N, T, E), or (T, N, E) without ``batch_first``."""
        time, batch = (1, 0) if self.batch_first else (0, 1)
        pair = self.mode == "LSTM"
        ends: list[States] = []
        for layer in range(self.num_layers):
            outputs = []
            for suffix in ("", "_reverse") if self.bidirectional else ("",):
                kinds = ("weight_ih", "weight_hh") + ("bias_ih", "bias_hh") * self.bias
                weights = [getattr(self, f"{kind}_l{layer}{suffix}") for kind in kinds]
                start = [sequence.new_zeros(1, sequence.shape[batch], weights[1].shape[1])] * (1 + pair)
                source = sequence.flip(time) if suffix else sequence
                run = getattr(torch, self.mode.lower())
                options = weights, self.bias, 1, 0.0, False, False, self.batch_first
                output, *end = run(source, start if pair else start[0], *options)
                outputs.append(output.flip(time) if suffix else output)
                ends.append(tuple(state[0] for state in end))
            sequence = torch.cat(outputs, -1)
            if layer < self.num_layers - 1:
                sequence = F.dropout(sequence, self.dropout, self.training)
        by_kind = tuple(zip(*ends, strict=True))
        return sequence, by_kind if pair else by_kind[0]


class HeadAttention(nn.Module):
    """``nn.MultiheadAttention`` for self-attention with any width and size of heads; returns no attention weights."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
            raise UnsupportedArchitecture(
                "nn.MultiheadAttention cannot change its width: leave out kdim, vdim, add_bias_kv and add_zero_attn"
            )
        self.dropout = attention.dropout
        self.batch_first = attention.batch_first
        self.scale = attention.head_dim**-0.5
        # A single head can have any size.
        self.sizes = (3, -1, attention.head_dim) if attention.num_heads > 1 else (3, 1, -1)
        self.in_proj_weight: nn.Parameter = attention.in_proj_weight
        self.in_proj_bias: nn.Parameter | None = attention.in_proj_bias
        self.out_proj: nn.Linear = attention.out_proj
        self._qkv_same_embed_dim = False  # else nn.TransformerEncoderLayer skips forward in evaluation mode
        self.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        **_: bool,
    ) -> tuple[Tensor, None]:
        """Return self-attention of `query` (N, T, E), and None as weights; masks as in ``nn.MultiheadAttention``."""
        sequence = query if self.batch_first else query.transpose(0, 1)
        packed = F.linear(sequence, self.in_proj_weight, self.in_proj_bias)
        heads = packed.unflatten(-1, self.sizes).permute(2, 0, 3, 1, 4)  # (3, N, heads, T, head_dim)
        mask = _added(attn_mask, sequence)
        if (padding := _added(key_padding_mask, sequence)) is not None:
            padding = padding[:, None, None]
            mask = padding if mask is None else mask + padding
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, dropout, scale=self.scale)
        output = F.linear(attended.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        return output if self.batch_first else output.transpose(0, 1), None


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


@dataclass(frozen=True)
class Submodel:
    """A client's part of a network: a fraction of the units of each hidden layer, rounded up.

    `width` is the fraction, above 0 and at most 1, and `groups` are the whole network's sets of interchangeable units.
    """

    width: float
    groups: PermutationGroups

    @classmethod
    def groups_of(cls, model: nn.Module, inputs: Tensor) -> PermutationGroups:
        """Return the groups of hidden units that a submodel makes smaller; `inputs` is a batch of two examples."""
        return resizable_groups(model, inputs, partly=True)

    @cached_property
    def units(self) -> dict[int, NDArray[np.int64]]:
        """Indices of the units that the submodel keeps, by index of the permutation group: the group's first units."""
        return {group.index: np.arange(math.ceil(round(group.width * self.width, 6))) for group in self.groups}

    def cut(self, model: nn.Module) -> nn.Module:
        """Return the submodel of the whole network `model`, or `model` itself if `self.width` is 1 (all units)."""
        if self.width == 1:
            return model
        return resize(model, self.state(model))

    def state(self, model: nn.Module, units: Mapping[int, NDArray[np.int64]] | None = None) -> Mapping[str, Tensor]:
        """Return the part of `model`'s state dict with these `units` (indices by group), by default the submodel's."""
        units = units or self.units
        whole = model.state_dict()
        if self.width == 1:
            return whole
        entries = entries_of(self.groups, units)
        kept = {name: tensor for name, tensor in whole.items() if entries.get(name) != ()}
        parts = {name: whole[name] for name, axes in entries.items() if axes}
        return kept | {n: torch.from_numpy(array) for n, array in cut_out(parts, self.groups, units).items()}
