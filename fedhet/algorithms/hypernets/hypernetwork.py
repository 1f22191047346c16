"""Graph hypernetworks, which generate the weights of networks of any architecture from their graphs.

Litany et al., "Federated Learning with Heterogeneous Architectures using Graph HyperNetworks" (2022), section 3, and
Zhang et al., "Graph HyperNetworks for Neural Architecture Search" (ICLR 2019).
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cos, log2, pi, prod, sin
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.algorithms.graphs import LayerGraph, LayerNode
from fedhet.algorithms.hypernets.design import STEPS, WIDTH, Catalogue, Head, Slot, slots_of, start
from fedhet.algorithms.hypernets.heads import Latents, Tiled, Tiles, head, tiling
from fedhet.errors import ModelError
from fedhet.models.copies import tied_names

with warnings.catch_warnings():  # PyTorch Geometric uses torch.jit, which PyTorch has deprecated
    warnings.simplefilter("ignore")
    from torch_geometric.nn import GraphConv

KINDS = ("c", "ct", "l", "add", "cat", "stack")
FEATURES = 3 * 5 + len(KINDS) + 1


class Embedding(nn.Module):
    """A module that computes embeddings h of layers by message passing along the data flow (Litany et al., 2022).

        h'_v = ReLU(W1 h_v + sum_{u -> v} W2 h_u + b),    equation 2

    W1, W2 and b are learned for each of `STEPS` steps. Initially h_v is a learned vector of the layer's type, one of
    `types`, or, if `types` is empty, a linear map of `shape_features`. `normalise` adds a final LayerNorm.
    """

    def __init__(self, types: Sequence[str], *, normalise: bool) -> None:
        super().__init__()
        self.types = nn.ParameterDict({type: nn.Parameter(torch.zeros(WIDTH)) for type in types})
        self.shapes = nn.Linear(FEATURES, WIDTH)
        self.normalise = normalise
        self.steps = nn.ModuleList([GraphConv(WIDTH, WIDTH) for _ in range(STEPS)])

    def forward(self, nodes: Sequence[str], features: Tensor, edges: Tensor) -> Tensor:
        """Return the embeddings (nodes, width) of a network's layers, given their types `nodes`.

        `features` (nodes, n) has their `shape_features`, and `edges` (2, edges) the indices of source and target nodes.
        """
        h: Tensor = torch.stack([self.types[type] for type in nodes]) if self.types else self.shapes(features)
        for step in self.steps:
            h = F.relu(step(h, edges))
        return F.layer_norm(h, h.shape[-1:]) if self.normalise else h


def shape_features(node: LayerNode) -> list[float]:
    """Return features of a layer of any type: its kind (one-hot), and logarithms, sines and cosines of its sizes.

    Sizes are the numbers of inputs and outputs, kernel size, stride and groups.
    """
    weight = next((shape for shape in node.shapes.values() if len(shape) > 1), ())
    units = weight or next(iter(node.shapes.values()), ())
    options = (re.search(rf"_{letter}(\d+)", node.type) for letter in "sg")
    stride, groups = (int(option[1]) if option else 1 for option in options)
    sizes = (prod(weight[1:2]), prod(units[:1]), prod(weight[2:3]), stride, groups)
    doublings = [log2(max(size, 1)) for size in sizes]
    waves = [wave(exponent * pi / 4) for exponent in doublings for wave in (sin, cos)]
    match = re.match(r"(?:ct|c|l)(?=\d)|[a-z_]+(?=_|$)", node.type)
    kind = match[0] if match and match[0] in KINDS else ""
    return [*(each / 8 for each in doublings), *waves, *(float(kind == each) for each in ("", *KINDS))]


@dataclass(frozen=True)
class Reading:
    """The graph of a network, prepared for `GraphHypernetwork.write`.

    Attributes:
        nodes: type of each node (layer).
        heads: by layer type and an array's name in the layer, such as ``weight``: ``state_dict`` names of the array in
            all layers of the type, with None for layers without it; empty for a ``tiled`` hypernetwork.
        tiles: tiles of the arrays to generate (see `tiling`) for a ``tiled`` hypernetwork, else empty.
        slots: shape and initial values of the generated arrays by ``state_dict`` name.
        tensors: `edges` (2, n), indices of source and target nodes; `features`, the nodes' `shape_features`; `order`,
            indices of nodes with arrays to generate, grouped by type; and `row`, for each, its type's index in `heads`.
    """

    nodes: tuple[str, ...]
    heads: Mapping[str, Mapping[str, Sequence[str | None]]]
    tiles: Mapping[str, Tiled]
    slots: Mapping[str, Slot]
    tensors: Mapping[str, Tensor]


class GraphHypernetwork(nn.Module):
    """A network that generates the weights of other networks: heads compute the arrays of layers from embeddings h.

    `kind` is ``dense`` or ``base-lowrank`` for a head for each array of each layer type in `types`, or ``tiled`` for a
    single head for layers of any type (see `Head`). `normalise` scales embeddings, and the latent vectors that heads
    compute from them, to unit variance, so that initial weights have the scale of He's rule. Initial values are drawn
    with `seed` (see `start`); if it is None, a state dict must be loaded before use.
    """

    def __init__(
        self, types: Catalogue, kind: Head = "base-lowrank", *, normalise: bool = True, seed: int | None = 0
    ) -> None:
        super().__init__()
        self.catalogue: Catalogue = {} if kind == "tiled" else types
        written = {type: layer for type, layer in self.catalogue.items() if layer.slots}
        self.embedding = Embedding(list(self.catalogue), normalise=normalise)
        self.latents = Latents(list(written), normalise=normalise)
        self.heads = nn.ModuleDict(
            {
                type: nn.ModuleDict({role: head(layer, slot, kind) for role, slot in layer.slots.items()})
                for type, layer in written.items()
            }
        )
        self.tiles = Tiles() if kind == "tiled" else None
        if seed is not None:
            with torch.no_grad():
                for key, parameter in self.named_parameters():
                    parameter.copy_(start(key, tuple(parameter.shape), seed, normalise=normalise))

    def read(self, graph: LayerGraph) -> Reading:
        """Prepare a network's graph for `write`; raise a ModelError if it cannot generate weights of a layer's type."""
        nodes = graph.nodes
        slots = [slots_of(node) for node in graph]
        if self.tiles is None and not all(node.type in self.catalogue for node in nodes):
            raise ModelError(
                "the hypernetwork cannot generate the weights of one of this network's layers, whose type it was not "
                "built for: set flha-ghn.head = tiled, which generates layers of any type"
            )
        places: dict[str, list[int]] = {}  # the layers with arrays to generate, by type or, with a tiled head, in order
        for place, node in enumerate(nodes):
            if slots[place]:
                places.setdefault("" if self.tiles else node.type, []).append(place)
        order = [place for members in places.values() for place in members]
        heads = dict[str, Any]()
        tiles = dict[str, Tiled]()
        device = self.embedding.shapes.weight.device
        if self.tiles is None:
            for type, members in places.items():
                heads[type] = {
                    role: [nodes[place].parameters[role] if role in slots[place] else None for place in members]
                    for role in self.catalogue[type].slots
                }
        else:
            tiles = tiling(((nodes[place].parameters, slots[place]) for place in order), device)
        row = [number for number, members in enumerate(places.values()) for _ in members]
        indices = {"order": order, "row": row, "edges": graph.edges}
        tensors = {name: torch.tensor(numbers, dtype=torch.long, device=device) for name, numbers in indices.items()}
        tensors["edges"] = tensors["edges"].view(-1, 2).T.contiguous()
        tensors["features"] = torch.tensor([shape_features(node) for node in nodes], device=device)
        named = {nodes[place].parameters[role]: slot for place in order for role, slot in slots[place].items()}
        return Reading(tuple(node.type for node in nodes), heads, tiles, named, tensors)

    def embeddings(self, reading: Reading) -> Tensor:
        """Return the embeddings (nodes, width) of all layers of a network that `read` has prepared."""
        return self.embedding(reading.nodes, reading.tensors["features"], reading.tensors["edges"])

    def write(self, reading: Reading) -> dict[str, Tensor]:
        """Return generated arrays (differentiable) by ``state_dict`` name, for a network that `read` has prepared."""
        tensors = reading.tensors
        h = self.embeddings(reading)[tensors["order"]]
        if self.tiles is not None:
            return dict(self.tiles(h, reading.tiles))
        written: dict[str, Tensor] = {}
        z, scale = self.latents(h, list(reading.heads), tensors["row"])
        sizes = [len(next(iter(roles.values()))) for roles in reading.heads.values()]
        by_type = zip(reading.heads.items(), z.split(sizes), scale.split(sizes), strict=True)
        for (type, roles), latents, factor in by_type:
            heads: nn.ModuleDict = self.heads[type]  # type: ignore[assignment]
            for role, names in roles.items():
                for name, array in zip(names, heads[role](latents, factor).unbind(0), strict=True):
                    if name is not None:
                        written[name] = reading.slots[name].placed(array, reading.slots[name].scale)
        return written


class Written(nn.Module):
    """A network that runs with generated weights, so that training it trains the hypernetwork.

    `reading` is `network`'s graph, prepared by `hypernetwork.read`. Buffers and untrained parameters are `network`'s.
    """

    def __init__(self, hypernetwork: GraphHypernetwork, network: nn.Module, reading: Reading) -> None:
        super().__init__()
        self.hypernetwork, self.network, self.reading = hypernetwork, network, reading
        tensors = network.state_dict(keep_vars=True)
        modules = dict(network.named_modules())
        tied = tied_names(network).items()  # a module with two names is written once
        self._tied = {name: first for name, first in tied if name.rpartition(".")[0] in modules}
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}

    def write(self) -> dict[str, Tensor]:
        """Generate the network's arrays and return them by name, in the network's dtypes."""
        written = self.hypernetwork.write(self.reading)
        return {name: array.to(self._dtypes.get(name, array.dtype)) for name, array in written.items()}

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's outputs for `inputs` (n, ...) with newly generated weights."""
        with torch.autocast(inputs.device.type, enabled=False):  # weights are float32 in mixed precision, too
            written = self.write()
        written |= {name: written[first] for name, first in self._tied.items() if first in written}
        # Looking for tied tensors in each call takes a twentieth of a small network's step.
        return functional_call(self.network, written, (inputs,), tie_weights=False)
