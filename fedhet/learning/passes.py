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
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Pass a batch through a network, in the mode in which the network is.

    Args:
        model: the network.
        inputs: (n, ...) prepared.
        captures: inner values that are wanted as well, by name.
        until: the pass ends at the head, and its outputs are Phi (n, d).
        learns: whether a graph is wanted.
        stream: where the pass must leave no trace in the network: what dropout draws from.

    Returns:
        The outputs, and captured values by name.
    """
    if not (captures or stream) and learns:  # which is most steps
        return (until or model)(inputs), {}
    with ExitStack() as stack:
        if stream:
            stack.enter_context(isolated(model, stream))
        if not learns:
            stack.enter_context(torch.no_grad())
        sites = {name: stack.enter_context(site.capture()) for name, site in captures.items()}
        outputs = (until or model)(inputs)
    return outputs, {name: site.features for name, site in sites.items()}
