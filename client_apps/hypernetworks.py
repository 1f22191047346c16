"""Client sides of FLHA-GHN and pFedHN.

In FLHA-GHN, a client trains a graph hypernetwork (GHN) that generates the weights of its network. All clients send
arrays with the same names and shapes. The GHN has a head for each layer type. Heads of types that a client's network
lacks are sent back unchanged, so the server can infer its types. In pFedHN, only the server has the hypernetwork.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedhet import models
from fedhet.algorithms.graphs import LayerGraph, layer_graph
from fedhet.algorithms.hypernets.design import Catalogue, catalogue
from fedhet.algorithms.hypernets.hypernetwork import GraphHypernetwork, Written
from fedhet.algorithms.hypernets.personal import begin_of, calibrated
from fedhet.client import Client, ClientSide
from fedhet.data import DataSet
from fedhet.messages import Payload, to_arrays
from fedhet.methods.included.hypernetworks import FLHAGHNOptions, PFedHNOptions
from fedhet.methods.options import OWN
from fedhet.models.copies import Start, multiplies, starts_of
from fedhet.setup import client_setup
from fedhet.training import Phase
from fedhet.utils.randomness import seeded

REFINE_RATE = 0.001  # learning rate at which the head is fine-tuned before an evaluation


class FLHAGHN(ClientSide[FLHAGHNOptions]):
    """Client side of FLHA-GHN: trains the hypernetwork that generates the weights of the client's network."""

    @classmethod
    def starts_of(cls, build: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Mapping[str, Start]:
        return calibrated(build(), inputs())

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        settings, config = self.options, client.config
        self.graph = layer_graph(client.model, client.transform(client.data.train.inputs[:2]), client.starts)
        known = settings.head != "tiled" and config.dataset != OWN
        types = _types(config.architectures, client_setup.dataset_of(config)) if known else {}
        hypernetwork = GraphHypernetwork(types, settings.head, normalise=settings.normalise, seed=None)
        hypernetwork.to(client.device)
        self.written = Written(hypernetwork, client.model, hypernetwork.read(self.messages()))

    def messages(self) -> LayerGraph:
        """Return the graph of the network's layers, along which the hypernetwork passes messages."""
        return self.graph

    def shared(self) -> dict[str, Tensor]:
        return self.written.hypernetwork.state_dict()

    def shared_names(self) -> dict[str, str]:
        # Clients need not keep or redraw these arrays: the hypernetwork, which they receive, generates them.
        return dict.fromkeys(self.written.reading.slots, next(iter(self.shared())))

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        self._write()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        return [replace(phase, module=self.written) for phase in super().phases(payload)]

    def end(self, payload: Payload) -> Payload:
        self._write()
        return super().end(payload)

    def refine(self, when: str) -> Sequence[Phase]:
        if self.options.refine == "none":
            return ()
        optimisation, head = self.client.optimisation().at(REFINE_RATE), f"{self.client.head}."
        return [Phase(1, optimisation, trains=lambda name: name.startswith(head))]

    @torch.no_grad()
    def _write(self) -> None:
        for name, array in self.written.write().items():
            self.client.tensors[name].copy_(array)


class PFedHN(ClientSide[PFedHNOptions]):
    """Client side of pFedHN: trains the weights that the server's hypernetwork generated; sends their change."""

    @classmethod
    def starts_of(cls, build: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Mapping[str, Start]:
        # The server receives the starts, which must not depend on private examples.
        return starts_of(build())

    def handshake(self, payload: Payload) -> Payload:
        """Return the arrays `starts`: for each shared array, by its key in messages, the two numbers (base, scale).

        The server generates the array as base + scale * the hypernetwork's output. Arrays for which its default pair
        fits (see `begin_of`) are left out, except in deep networks without normalisation.
        """
        starts, tensors = {}, self.client.tensors
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


@lru_cache(maxsize=8)
def _types(architectures: str, dataset: DataSet) -> Catalogue:
    """Return the layer types of all networks named in `architectures`, built for inputs and classes of `dataset`."""
    example = dataset.transform(dataset.train.inputs[:2])
    with seeded(0, "layer types"):
        networks = [
            models.build(name, dataset.input_shape, dataset.classes)
            for name in dict.fromkeys(models.expand(architectures))
        ]
    return catalogue(layer_graph(network, example, starts_of(network)) for network in networks)
