"""FedHARM with something else in the place of what peers tell, or with other descriptors.

What a client's own descriptors or those of other images give is no gain from peers. Attention maps, the mean square of
a block's channels by position (Zagoruyko and Komodakis, ICLR 2017), say where networks look; `fedharm.slots` are
squares. Each is a method that takes FedHARM's keys, named on the command line by file and name:

    fedhet compare fedharm own=run_configs/fedharm/controls.py:own shuffled=run_configs/fedharm/controls.py:shuffled
"""

from dataclasses import replace
from math import isqrt

import torch
from fedhet.client_apps.fedharm import FedHARM as FedHARMClient
from fedhet.strategies.fedharm import FedHARM as FedHARMServer
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fedhet.errors import ModelError
from fedhet.method import Traits
from fedhet.methods import fedharm
from fedhet.randomness import torch_generator
from fedhet.representations.shared_images import target_of
from fedhet.wire import Payload


class Own(FedHARMClient):
    """The target is of the client's own network as it was before the phase."""

    def target(self, payload: Payload) -> list[Tensor]:
        """Its own parts, as it would tell them."""
        sent = [part.cpu() for part in self.sent()]
        generator = self.client.generator("parallel analysis")
        made = target_of(self.parameters.align, [sent], generator=generator)
        return [self.client.to_device(part) for part in made]


class Shuffled(FedHARMServer):
    """The target is that of other images."""

    def target(self, round: int) -> list[Tensor]:
        """The same with its rows permuted, all parts alike."""
        order = torch.randperm(
            self.state.public_size, generator=torch_generator(self.config.seed, "shuffled images", round)
        )
        return [part[order] for part in super().target(round)]


class Attention(FedHARMClient):
    """Descriptors are attention maps."""

    chooses = False

    def filled(self, block: int, output: Tensor) -> Tensor:
        """A map has all slots, whatever the size of the output."""
        return self.summary(block, output)

    def summary(self, block: int, output: Tensor) -> Tensor:
        """The map of a block's output (n, channels, height, width), (n, k).

        Raises:
            ModelError: the output has another form, or k is no square.
        """
        side = isqrt(slots := self.parameters.lengths[block])
        if output.ndim != 4 or side**2 != slots:
            raise ModelError(
                f"an attention map needs outputs (n, channels, height, width) and a square of positions, got "
                f"{tuple(output.shape)} and {slots}"
            )
        return adaptive_avg_pool2d(output.square().mean(1), side).flatten(1)


class OwnAttention(Attention, Own):
    """Attention maps of the client's own network."""


def _alone(parameters: fedharm.FedHARMParameters) -> Traits:
    """FedHARM's answers, but clients tell nothing of the shared images."""
    traits = fedharm.traits(parameters)
    return replace(traits, other_arrays="", sends={name: kind for name, kind in traits.sends.items() if name != "sent"})


own = fedharm.method.variant("fedharm-own", client=Own, traits=_alone)
shuffled = fedharm.method.variant("fedharm-shuffled", server=Shuffled)
attention = fedharm.method.variant("fedharm-attention", client=Attention)
own_attention = fedharm.method.variant("fedharm-own-attention", client=OwnAttention, traits=_alone)
shuffled_attention = fedharm.method.variant("fedharm-shuffled-attention", client=Attention, server=Shuffled)
