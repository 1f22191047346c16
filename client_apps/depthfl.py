"""DepthFL and InclusiveFL, client side: a client has the first blocks of a network, with an exit (classifier) each.

In DepthFL, exits learn from the labels and from each other (Kim et al., ICLR 2023):

    L = sum_i CE(p_i, y) + w(t) / (d - 1) sum_i sum_{j != i} KL(p_j || p_i)

The sums are over the client's d exits with predictions p_i; the target p_j of each KL is a constant. In round t, w(t) =
exp(-5 (1 - min(t - 1, T) / T)^2), where T is `ramp-up`. In InclusiveFL (Liu et al., KDD 2022), only the last exit is
trained and evaluated.
"""

import math
from itertools import permutations
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs import PermutationGroups
from fedhet.algorithms.graphs.blocks import EXITS, Exits, groups_by_depth
from fedhet.client import ClientSide
from fedhet.client.submodel import Submodel
from fedhet.messages import Payload
from fedhet.methods.included.submodels import DepthFLOptions, DepthOptions, InclusiveFLOptions
from fedhet.methods.options import Config
from fedhet.models.representation import Output
from fedhet.training import Loss, Step, Term

D = TypeVar("D", bound=DepthOptions)


class FirstBlocks(Submodel):
    """A client's part of a network: its first blocks, with an exit after each block."""

    @classmethod
    def groups_of(cls, model: nn.Module, inputs: Tensor) -> PermutationGroups:
        return groups_by_depth(cast(Exits, model), inputs)

    def cut(self, model: nn.Module) -> nn.Module:
        """Return the first blocks of a newly built network, with their exits."""
        cast(Exits, model).add_exits(self.groups)
        part = cast(Exits, super().cut(model))
        part.depth = len(self.units[0])
        return part


class ByDepth(ClientSide[D]):
    """Client side with the first blocks of a network and an exit after each block."""

    parts = FirstBlocks
    kind: ClassVar[type[Exits]] = Exits

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        keys = config.options
        return cls.kind(model, count=max(keys.all_sizes), names=keys.blocks)

    @classmethod
    def head_of(cls, config: Config) -> str:
        return f"{EXITS}.0" if max(config.options.all_sizes) > 1 else config.head


class DepthFL(ByDepth[DepthFLOptions]):
    """Trains all exits of the client's part of the network."""

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_scores("which its exits exchange")
        return super().handshake(payload)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return a term with the losses of all exits except the last one, and the distillation between all exits."""
        model, keys = cast(Exits, self.client.model), self.options
        others = {name: Output(model, name) for name in (f"{EXITS}.{number}" for number in range(model.depth - 1))}
        left = 1 - min(self.client.request.round - 1, keys.ramp_up) / keys.ramp_up if keys.ramp_up else 0.0
        return (Term(exits, captures=others, weight=math.exp(-5 * left**2)),) if others else ()


def exits(step: Step, weight: float) -> Tensor:
    """Return the sum of the losses of all exits except the last one and of the distillation between all exits."""
    others = [outputs.to(step.outputs.dtype) for outputs in step.captured.values()]
    loss = torch.stack([step.loss(outputs) for outputs in others]).sum()
    learnt = [step.divergence(one, other) for one, other in permutations([*others, step.outputs], 2)]
    return loss + weight / len(others) * torch.stack(learnt).sum()


class LastExit(Exits):
    """A network with exits (classifiers after blocks) that returns the outputs of the last exit, also in evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.depth < self.count:
            with Output(self, f"{EXITS}.{self.depth - 1}").capture() as last:
                super().forward(inputs)
            return last()
        self.network.training = self.training
        scores: Tensor = self.network(inputs)
        return scores


class InclusiveFL(ByDepth[InclusiveFLOptions]):
    """Trains the client's first blocks and their last exit, or the network's head if the client has all blocks."""

    kind = LastExit
