"""Controls of FedHARM: the target is the client's own, or that of other images, instead of the peers'.

What they give is no gain from peers. Each takes FedHARM's keys and is named on the command line by file and name:

    fedhet compare fedharm own=run_configs/fedharm/controls.py:own shuffled=run_configs/fedharm/controls.py:shuffled
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedhet.algorithms.alignment.targets import target_of
from fedhet.client_apps.fedharm import FedHARM as FedHARMClient
from fedhet.messages import Payload
from fedhet.methods.method import Traits
from fedhet.strategies.fedharm import FedHARM as FedHARMServer
from fedhet.strategies.fedharm import Keys
from fedhet.strategies.fedharm import traits as traits_of
from fedhet.utils.randomness import torch_generator


class Own(FedHARMClient):
    """The target comes from the client's own network before the phase."""

    def target(self, payload: Payload) -> list[Tensor]:
        """Return the target that the client's own descriptors give."""
        sent = [part.cpu() for part in self.sent()]
        generator = self.client.generator("parallel analysis")
        made = target_of(self.options.align, [sent], generator=generator)
        return [self.client.to_device(part) for part in made]


class Shuffled(FedHARMServer):
    """The target is that of other images."""

    def target(self, round: int) -> list[Tensor]:
        """Return the peers' target with permuted rows, the same permutation for all parts."""
        order = torch.randperm(
            self.state.public_size, generator=torch_generator(self.config.seed, "shuffled images", round)
        )
        return [part[order] for part in super().target(round)]


def _alone(keys: Keys) -> Traits:
    """Return FedHARM's traits for clients that send nothing about the shared images."""
    traits = traits_of(keys)
    return replace(traits, other_arrays="", sends={name: kind for name, kind in traits.sends.items() if name != "sent"})


own = FedHARMServer.method.variant("fedharm-own", client=Own, traits=_alone)
shuffled = FedHARMServer.method.variant("fedharm-shuffled", server=Shuffled)
