"""Client side of FLHA-GHN: trains the graph hypernetwork (GHN) that generates the weights of the client's network.

All clients send arrays with the same names and shapes. The GHN has a head for each layer type. Heads of types that a
client's network lacks are sent back unchanged, so the server can infer its types.
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
from fedhet.algorithms.hypernets.personal import calibrated
from fedhet.client import Client, ClientSide, Payload, Phase
from fedhet.data import DataSet
from fedhet.methods.options import OWN
from fedhet.models.copies import Start, starts_of
from fedhet.setup import client_setup
from fedhet.strategies.flha_ghn import Keys
from fedhet.utils.randomness import seeded

REFINE_RATE = 0.001
"""Learning rate at which the head is fine-tuned before an evaluation."""


class FLHAGHN(ClientSide[Keys]):
    @classmethod
    def starts_of(cls, build: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Mapping[str, Start]:
        return calibrated(build(), inputs())

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        settings = self.options
        config = client.config
        self.graph = layer_graph(client.model, client.transform(client.data.train.inputs[:2]), client.starts)
        of_dataset = settings.head != "tiled" and config.dataset != OWN
        types = _types(config.architectures, client_setup.dataset_of(config)) if of_dataset else {}
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
        optimisation = self.client.optimisation().at(REFINE_RATE)
        head = f"{self.client.head}."
        return [Phase(1, optimisation, trains=lambda name: name.startswith(head))]

    @torch.no_grad()
    def _write(self) -> None:
        for name, array in self.written.write().items():
            self.client.tensors[name].copy_(array)


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
