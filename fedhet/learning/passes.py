"""Forward passes, as training and evaluation need them: with captured inner values, up to the head, isolated."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fedhet.representations import Capturing, RandomStream, Representation, isolated

NOTHING: Mapping[str, Capturing] = {}


def forward(
    model: nn.Module,
    inputs: Tensor,
    captures: Mapping[str, Capturing] = NOTHING,
    *,
    until: Representation | None = None,
    learns: bool = True,
    stream: RandomStream | None = None,
    bf16: bool = False,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Pass a batch through a network, in the mode in which the network is.

    Args:
        model: the network.
        inputs: (n, ...) prepared.
        captures: inner values that are wanted as well, by name.
        until: the pass ends at the head, and its outputs are Phi (n, d).
        learns: whether a graph is wanted.
        stream: where the pass must leave no trace in the network: what dropout draws from.
        bf16: whether it is computed in bfloat16 where torch holds that to be safe; its results are float32.

    Returns:
        The outputs, and captured values by name.
    """
    if not (captures or bf16 or stream) and learns:  # which is most steps
        return (until or model)(inputs), {}
    with ExitStack() as stack:
        if stream:
            stack.enter_context(isolated(model, stream))
        if not learns:
            stack.enter_context(torch.no_grad())
        if bf16:
            stack.enter_context(torch.autocast(inputs.device.type, torch.bfloat16))
        sites = {name: stack.enter_context(site.capture()) for name, site in captures.items()}
        outputs = (until or model)(inputs)
    captured = {name: site.features for name, site in sites.items()}
    if not bf16:
        return outputs, captured
    return outputs.float(), {name: value.float() for name, value in captured.items()}
