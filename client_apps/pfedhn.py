"""Client side of pFedHN: trains the weights that the server's hypernetwork generated; sends their change."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fedhet.algorithms.hypernets.personal import begin_of
from fedhet.client import ClientSide
from fedhet.messages import Payload, to_arrays
from fedhet.models.copies import Start, multiplies, starts_of
from fedhet.strategies.pfedhn import Keys


class PFedHN(ClientSide[Keys]):
    @classmethod
    def starts_of(cls, build: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Mapping[str, Start]:
        # The server receives the starts, which must not depend on private examples.
        return starts_of(build())

    def handshake(self, payload: Payload) -> Payload:
        """Return the arrays `starts`: for each shared array, by its key in messages, the two numbers (base, scale).

        The server generates the array as base + scale * the hypernetwork's output. Arrays for which its default pair
        fits (see `begin_of`) are left out, except in deep networks without normalisation.
        """
        starts = {}
        tensors = self.client.tensors
        for name, key in self.shared_names().items():
            shape = tuple(tensors[name].shape)
            begun = begin_of(key, shape, self.client.starts.get(name))
            if begun != begin_of(key, shape) or multiplies(self.client.model):
                starts[key] = torch.tensor(begun)
        return Payload({"starts": to_arrays(starts)} if starts else {})

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        self.start = {key: tensor.clone() for key, tensor in self.shared().items()}

    def end(self, payload: Payload) -> Payload:
        delta = {key: tensor - self.start[key] for key, tensor in self.shared().items()}
        return Payload({"delta": to_arrays(delta)})
