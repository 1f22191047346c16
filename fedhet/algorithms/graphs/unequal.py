"""Layers of widths that PyTorch's own cannot have, with the same names of parameters."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, ...]


class StackedRecurrent(nn.Module):
    """``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` whose layers may differ in width.

    Final states are tuples of (N, H_l), one a layer and direction: of an LSTM a pair of them, else one.
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.mode, self.num_layers, self.batch_first, self.bias = (
            layer.mode,
            layer.num_layers,
            layer.batch_first,
            layer.bias,
        )
        self.dropout, self.bidirectional = layer.dropout, layer.bidirectional
        for name, parameter in layer._parameters.items():
            self.register_parameter(name, parameter)
        self.train(layer.training)

    def forward(self, sequence: Tensor) -> tuple[Tensor, State | tuple[State, ...]]:
        """Run all layers over a batch of sequences (N, T, E), or (T, N, E) without ``batch_first``, from states 0."""
        time, batch = (1, 0) if self.batch_first else (0, 1)
        pair = self.mode == "LSTM"
        ends: list[State] = []
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
                ends.append(tuple(each[0] for each in end))
            sequence = torch.cat(outputs, -1)
            if layer < self.num_layers - 1:
                sequence = F.dropout(sequence, self.dropout, self.training)
        by_kind = tuple(zip(*ends, strict=True))
        return sequence, by_kind if pair else by_kind[0]


class HeadAttention(nn.Module):
    """``nn.MultiheadAttention`` of a sequence with itself, whose heads need not add up to the width of its inputs.

    It returns no attention weights: they would tell its heads apart from those of the whole network.

    Args:
        attention: with the weights of some heads, ``in_proj_weight`` (3 * heads * head_dim, E).

    Raises:
        TypeError: it is of another kind than ``nn.MultiheadAttention(E, heads)``.
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
            raise TypeError("attention with kdim, vdim, add_bias_kv or add_zero_attn has one number of heads only")
        self.dropout, self.batch_first, self.scale = attention.dropout, attention.batch_first, attention.head_dim**-0.5
        # The units of a single head are not its parts of one size.
        self.sizes = (3, -1, attention.head_dim) if attention.num_heads > 1 else (3, 1, -1)
        self.in_proj_weight: nn.Parameter = attention.in_proj_weight
        self.in_proj_bias: nn.Parameter | None = attention.in_proj_bias
        self.out_proj: nn.Linear = attention.out_proj
        self._qkv_same_embed_dim = False  # else nn.TransformerEncoderLayer computes it itself, in evaluation mode
        self.train(attention.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend from a batch (N, T, E), or (T, N, E) without ``batch_first``, to itself; masks as PyTorch's."""
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
    """A mask as numbers to add to scores, -inf where nothing may be attended to."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
