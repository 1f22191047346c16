"""Client side of DepthFL: trains all exits (classifiers after blocks) of the client's part of the network."""

import math
from itertools import permutations
from typing import cast

import torch
from torch import Tensor

from fedhet.algorithms.graphs.blocks import EXITS, Exits
from fedhet.client import Loss, Payload, Step, Term
from fedhet.models.representation import Output
from fedhet.strategies.depthfl import Keys

from .families.submodels import ByDepth


class DepthFL(ByDepth[Keys]):
    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("which its exits exchange")
        return super().handshake(payload)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        model = cast(Exits, self.client.model)
        keys = self.options
        names = [f"{EXITS}.{number}" for number in range(model.depth - 1)]
        others = {name: Output(model, name) for name in names}
        left = 1 - min(self.client.request.round - 1, keys.ramp_up) / keys.ramp_up if keys.ramp_up else 0.0
        weight = math.exp(-5 * left**2)
        return (Term(exits, captures=others, weighted=True, weight=weight),) if others else ()


def exits(step: Step, weight: float) -> Tensor:
    """Return the sum of the task's losses of all exits but the last, plus `weight` times a distillation loss.

    The latter is the sum of the KL divergences between each two of the d exits, in both directions, divided by d - 1.
    """
    others = [outputs.to(step.outputs.dtype) for outputs in step.captured.values()]
    loss = torch.stack([step.loss(outputs) for outputs in others]).sum()
    learnt = [step.divergence(one, other) for one, other in permutations([*others, step.outputs], 2)]
    return loss + weight / len(others) * torch.stack(learnt).sum()
