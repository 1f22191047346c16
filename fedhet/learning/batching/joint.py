"""Passes of several networks that are built alike, run as one pass of a batch of networks (`torch.func.vmap`).

The parameters of all are stacked, as part of the graph: each network's own parameters get their gradients.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedhet.learning.batching.layouts import Unfit, layout
from fedhet.learning.batching.passes import Forward, Passed
from fedhet.representations import RandomStream


def together(passes: Sequence[Forward], streams: Sequence[RandomStream]) -> list[Passed]:
    """Run passes of one kind as one, and return their results; smaller batches are padded with zeros.

    Args:
        passes: passes of one kind.
        streams: the random stream for dropout in each pass.

    Raises:
        Unfit: an operator other than `nn.Dropout` draws random numbers, or has no form for a batch of networks.
    """
    sizes = [len(each.inputs) for each in passes]
    inputs = torch.stack([_filled(each.inputs, max(sizes)) for each in passes])
    call = _Call(passes[0], [*zip(streams, sizes, strict=True)])
    with torch.set_grad_enabled(passes[0].learns and torch.is_grad_enabled()):
        parameters = _stacked([layout(each.model).parameters for each in passes])
        stored = [layout(each.model).buffers for each in passes]
        try:
            outputs, captured, buffers = vmap(call.of, randomness="error")(parameters, _stacked(stored), inputs)
        except Exception as error:  # any operation that a batch of networks cannot do
            raise Unfit(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    if passes[0].stream is None:
        with torch.no_grad():
            for name, now in buffers.items():
                for each, value in zip(stored, now.unbind(), strict=True):
                    each[name].copy_(value)
    parts = {name: value.unbind() for name, value in captured.items()}
    return [
        (each[:size], {name: values[index][:size] for name, values in parts.items()})
        for index, (size, each) in enumerate(zip(sizes, outputs.unbind(), strict=True))
    ]


def fits(passes: Sequence[Forward]) -> bool:
    """Whether batches of passes, of one kind and size, may be padded, since no row depends on the others.

    Raises Unfit like `together`, or if its results differ from those of single passes.
    """
    # Rounding to bfloat16 would hide what differs.
    passes = [replace(each, bf16=False, learns=False, stream=RandomStream(0)) for each in passes]
    joint, seen = together(passes, [RandomStream(0) for _ in passes])[-1]
    alone, captured = passes[-1].run()
    if not _alike([joint, *seen.values()], [alone, *captured.values()]):
        raise Unfit("as a batch of networks it computes something else")
    rows = passes[-1].inputs
    if len(rows) < 3:
        return False
    fewer, others = replace(passes[-1], inputs=rows[:-1], stream=RandomStream(0)).run()
    return _alike([fewer, *others.values()], [each[:-1] for each in (alone, *captured.values())])


def _alike(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(
        one.shape == other.shape
        and (one - other).abs().max() <= torch.finfo(one.dtype).eps ** 0.5 * other.abs().max().clamp(min=1)
        for one, other in zip(ones, others, strict=True)
    )


def _filled(inputs: Tensor, size: int) -> Tensor:
    missing = size - len(inputs)
    return torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])]) if missing else inputs


def _stacked(networks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in networks]) for name in networks[0]}


class _Call(nn.Module):
    """A pass as a module, so that `functional_call` puts other tensors into the network that it goes through.

    `drawing` holds for each network what dropout draws from, and how many rows of the batch are its own.
    """

    def __init__(self, asked: Forward, drawing: Sequence[tuple[RandomStream, int]]) -> None:
        super().__init__()
        self.model = asked.model
        self._compute, self._drawing = asked.compute, drawing

    def forward(self, inputs: Tensor) -> Passed:
        live = [module for module in layout(self.model).dropouts if module.training and module.p]
        try:
            for module in live:
                vars(module)["forward"] = functools.partial(self._drop, module.p)
            return self._compute(inputs)
        finally:
            for module in live:
                del vars(module)["forward"]

    def _drop(self, p: float, inputs: Tensor) -> Tensor:
        return _Dropout.apply(inputs, p, self._drawing)  # PyTorch before 2.12 takes no keywords under vmap

    def of(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return outputs, captured values, and the updated buffers."""
        tensors = {f"model.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
        outputs, captured = functional_call(self, tensors, (inputs,))
        return outputs, dict(captured), {name: tensors[f"model.{name}"] for name in buffers}


class _Dropout(torch.autograd.Function):
    """Dropout of a batch of networks: each draws for its rows, from its stream, as it would alone."""

    @staticmethod
    def forward(inputs: Tensor, p: float, drawing: Sequence[tuple[RandomStream, int]]) -> Tensor:
        raise Unfit("dropout of what does not depend on the network")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: `vmap` is differentiated as it stands."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        inputs: Tensor,
        p: float,
        drawing: Sequence[tuple[RandomStream, int]],
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        inputs = inputs.movedim(in_dims[0], 0)
        factors = []
        for batch, (stream, rows) in zip(inputs, drawing, strict=True):
            with stream.active({inputs.device} - {torch.device("cpu")}):
                factors.append(_filled(F.dropout(torch.ones_like(batch[:rows]), p), len(batch)))
        return inputs * torch.stack(factors), 0
