"""Controls of FedHeNN: another target in the place of the peers'. What they give is no gain from peers.

Each takes FedHeNN's keys and is named on the command line by file and name:

    fedhet compare fedhenn own=run_configs/fedhenn/controls.py:own inputs=run_configs/fedhenn/controls.py:inputs
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import centred, self_inner
from fedhet.algorithms.alignment.targets import cluster_rows, mean_target, pack
from fedhet.client_apps.fedhenn import FedHeNN as FedHeNNClient
from fedhet.messages import Arrays, Payload
from fedhet.methods.method import Traits
from fedhet.strategies.fedhenn import FedHeNN as FedHeNNServer
from fedhet.strategies.fedhenn import Keys, traits
from fedhet.utils.randomness import torch_generator


class OwnTarget(FedHeNNClient):
    """The target comes from the client's own network before the round."""

    def target(self, payload: Payload, rad: Tensor) -> Tensor:
        """Return the clusters of the client's own posteriors, or its own representations."""
        if self.options.target != "spectral":
            return super().target(payload, rad)
        generator = self.client.generator("parallel analysis")
        return self.client.to_device(cluster_rows([self.values(rad)], generator=generator))


class InputsTarget(FedHeNNClient):
    """The target is a linear kernel of the raw inputs."""

    def target(self, payload: Payload, rad: Tensor) -> Tensor:
        """Return the inputs as rows, (L, d)."""
        return self.client.transform(rad).flatten(1)


class HostileFifth(FedHeNNServer):
    """Every fifth client sends the posteriors of other rows, the same permutation for all of them."""

    def next_target(self, sent: Mapping[str, Tensor], round: int) -> Arrays:
        """Return the target with permuted rows of a fifth of the peers."""
        rows = len(next(iter(sent.values())))
        order = torch.randperm(rows, generator=torch_generator(self.config.seed, "shuffled rows", round))
        hostile = sorted(sent)[::5]
        told = {client: values[order] if client in hostile else values for client, values in sent.items()}
        return super().next_target(told, round)


class FrobeniusTarget(FedHeNNServer):
    """The target is the mean of linear kernels that are divided by their norms, so that none dominates."""

    def next_target(self, sent: Mapping[str, Tensor], round: int) -> Arrays:
        """Return a factor of the mean kernel."""
        peers = [centred(features) for features in sent.values()]
        # The kernel A A^T of features A has the norm `self_inner(A) ** 0.5`.
        return pack(mean_target([peer / self_inner(peer).pow(0.25).clamp_min(1e-30) for peer in peers]))


class WithoutPeers(Keys):
    """Keys of clients that send nothing about the RAD."""

    @property
    def sent(self) -> str:
        """Return an empty string, for nothing."""
        return ""


def _of_one_size(keys: Keys) -> Traits:
    """Return FedHeNN's traits for a target that does not depend on the size of kernels."""
    return replace(traits(keys), other_arrays="")


own = FedHeNNServer.method.variant("fedhenn-own", client=OwnTarget, Options=WithoutPeers)
inputs = FedHeNNServer.method.variant("fedhenn-inputs", client=InputsTarget, Options=WithoutPeers)
hostile = FedHeNNServer.method.variant("fedhenn-hostile", server=HostileFifth)
frobenius = FedHeNNServer.method.variant("fedhenn-frobenius", server=FrobeniusTarget, traits=_of_one_size)
