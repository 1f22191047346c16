"""A model of other widths from a model: the same modules, other parameters."""

import copy
from collections.abc import Collection, Hashable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from .graph import UnsupportedArchitecture
from .reading import storage_place
from .states import State


def resize(model: nn.Module, state: State, lacking: Collection[str] = ()) -> nn.Module:
    """Copy a model with these parameters and buffers, which may have other widths; it has none of the `lacking` ones.

    An ``nn.LSTM`` whose layers get different widths becomes a ``StackedLSTM`` with the same parameter names. Tied
    parameters stay tied; dtypes, devices, modes and ``requires_grad`` are the model's.

    Raises:
        KeyError: The state lacks a ``state_dict`` name, or has one that is not the model's.
        UnsupportedArchitecture: A layer whose sizes fedhet does not know would change its shape.
    """
    expected = {name: value for name, value in model.state_dict().items() if name not in lacking}
    if state.keys() != expected.keys():
        raise KeyError(
            f"a state of {type(model).__name__} lacks {sorted(expected.keys() - state.keys())}, "
            f"and {sorted(state.keys() - expected.keys())} is not in the model"
        )
    result = copy.deepcopy(model)
    # By the tensor replaced, so that what was tied stays tied; it is kept, or its place might be given away.
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
        if changed:
            _learn_sizes(module, prefix)
            recurrent = [value for name, value in module._parameters.items() if name.startswith("weight_hh")]
            if isinstance(module, nn.LSTM) and len({units.shape[1] for units in recurrent if units is not None}) > 1:
                if not prefix:
                    return StackedLSTM(module)
                result.set_submodule(prefix, StackedLSTM(module))
    return result


class StackedLSTM(nn.Module):
    """``nn.LSTM`` whose layers may differ in width; h_n and c_n are tuples of (N, H_l), one a layer and direction."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.num_layers, self.batch_first, self.bias = lstm.num_layers, lstm.batch_first, lstm.bias
        self.dropout, self.bidirectional = lstm.dropout, lstm.bidirectional
        for name, parameter in lstm._parameters.items():
            self.register_parameter(name, parameter)
        self.train(lstm.training)

    def forward(
        self, sequence: Tensor, states: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    ) -> tuple[Tensor, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Run all layers over a batch of sequences (N, T, E), or (T, N, E) without ``batch_first``."""
        time, batch = (1, 0) if self.batch_first else (0, 1)
        hidden: list[Tensor] = []
        cells: list[Tensor] = []
        for layer in range(self.num_layers):
            outputs = []
            for suffix in ("", "_reverse") if self.bidirectional else ("",):
                kinds = ("weight_ih", "weight_hh") + ("bias_ih", "bias_hh") * self.bias
                weights = [getattr(self, f"{kind}_l{layer}{suffix}") for kind in kinds]
                if states is None:
                    h, c = (sequence.new_zeros(1, sequence.shape[batch], weights[1].shape[1]) for _ in range(2))
                else:
                    h, c = (state[len(hidden)].unsqueeze(0) for state in states)
                source = sequence.flip(time) if suffix else sequence
                output, h, c = torch.lstm(source, (h, c), weights, self.bias, 1, 0.0, False, False, self.batch_first)
                outputs.append(output.flip(time) if suffix else output)
                hidden.append(h[0])
                cells.append(c[0])
            sequence = torch.cat(outputs, -1)
            if layer < self.num_layers - 1:
                sequence = nn.functional.dropout(sequence, self.dropout, self.training)
        return sequence, (tuple(hidden), tuple(cells))


def _learn_sizes(module: nn.Module, name: str) -> None:
    match module:
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case _ConvNd() if not module.transposed:
            outputs, inputs = module.weight.shape[:2]
            if module.groups == module.in_channels > 1:  # depthwise: as many outputs a channel as before
                module.groups = outputs // (module.out_channels // module.in_channels)
            module.out_channels, module.in_channels = outputs, inputs * module.groups
        case _BatchNorm():
            module.num_features = next(len(v) for v in (module.weight, module.running_mean) if v is not None)
        case nn.Embedding():
            module.num_embeddings, module.embedding_dim = module.weight.shape
        case nn.PReLU():
            module.num_parameters = len(module.weight)
        case nn.LSTM():
            module.input_size, module.hidden_size = (len(w[0]) for w in module.all_weights[0][:2])
        case StackedLSTM():
            pass
        case _:
            raise UnsupportedArchitecture(
                f"parameters of {name!r} change their shape, but fedhet does not know the size attributes of "
                f"{type(module).__name__}; keep its widths or build it from supported layers"
            )
