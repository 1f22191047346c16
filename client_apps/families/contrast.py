"""What contrastive methods share at a client: projection heads, and representations by other weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.models.copies import in_evaluation_mode
from fedhet.models.representation import Representation
from fedhet.training import Step


def projection_head(inputs: int, width: int, dtype: torch.dtype) -> nn.Module:
    """Return a new projection head (n, inputs) -> (n, width): two linear layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(inputs, inputs, dtype=dtype), nn.ReLU(), nn.Linear(inputs, width, dtype=dtype))


def represent_by(step: Step, phi: Representation, arrays: Mapping[str, Tensor]) -> Tensor:
    """Return the representations `phi` (n, d) of a step's inputs by a network with other `arrays`, without gradients.

    `arrays` are a state dict of the step's network, which computes in evaluation mode.
    """
    step.again += 1
    network = _Represented(phi)
    names = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]
    state = {name: arrays[name.removeprefix("model.")] for name in names if name.removeprefix("model.") in arrays}
    autocast = torch.autocast(step.inputs.device.type, torch.bfloat16, enabled=step.bf16)
    with in_evaluation_mode(phi.model), torch.no_grad(), autocast:
        values: Tensor = functional_call(network, state, (step.inputs,))
    return values.float() if step.bf16 else values


class _Represented(nn.Module):
    """A module that returns a network's representation, for `functional_call`."""

    def __init__(self, phi: Representation) -> None:
        super().__init__()
        self.model = phi.model
        self.phi = phi

    def forward(self, inputs: Tensor) -> Tensor:
        return self.phi(inputs)
