"""Graph hypernetworks, which generate the weights of networks of any architecture from their graphs.

Litany et al., "Federated Learning with Heterogeneous Architectures using Graph HyperNetworks" (2022), section 3, and
Zhang et al., "Graph HyperNetworks for Neural Architecture Search" (ICLR 2019).
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cos, log2, pi, prod, sin

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.algorithms.graphs import LayerGraph, LayerNode
from fedhet.algorithms.hypernets.design import STEPS, WIDTH, Catalogue, Head, slots_of, start
from fedhet.algorithms.hypernets.heads import Latents, Tiled, Tiles, head, tiling
from fedhet.models.copies import tied_names

with warnings.catch_warnings():  # PyTorch Geometric uses torch.jit, which PyTorch has deprecated
    warnings.simplefilter("ignore")
    from torch_geometric.nn import GraphConv

KINDS = ("c", "ct", "l", "add", "cat", "stack")
FEATURES = 3 * 5 + len(KINDS) + 1


class Embedding(nn.Module):
    """Compute embeddings h of layers by message passing along the data flow (Litany et al., 2022, equation 2).

        h'_v = ReLU(W1 h_v + sum_{u -> v} W2 h_u + b)

    W1, W2 and b are learned. Initially h_v is a learned vector of the layer's type, or a linear map of `shape_features`
    for an unknown type. A LayerNorm follows the last step.
    """

    def __init__(self, types: Sequence[str], *, normalise: bool) -> None:
        super().__init__()
        self.types = nn.ParameterDict({type: nn.Parameter(torch.zeros(WIDTH)) for type in types})
        self.shapes = nn.Linear(FEATURES, WIDTH)
        self.normalise = normalise
        self.steps = nn.ModuleList([GraphConv(WIDTH, WIDTH) for _ in range(STEPS)])

    def forward(self, known: Sequence[str | None], features: Tensor, edges: Tensor) -> Tensor:
        """Return the embeddings of all nodes (nodes, width).

        `known` has the type of each node, or None if it is unknown; `features` are the `shape_features` of nodes with
        unknown types, and `edges` (2, edges) the indices of source and target nodes.
        """
        others = iter(self.shapes(features).unbind(0)) if len(features) else iter(())
        h = torch.stack([next(others) if type is None else self.types[type] for type in known])
        for step in self.steps:
            h = F.relu(step(h, edges))
        return F.layer_norm(h, h.shape[-1:]) if self.normalise else h


def shape_features(node: LayerNode) -> list[float]:
    """Return features of a layer of any type: its kind, and logarithms, sines and cosines of its sizes.

    Sizes are the numbers of inputs and outputs, kernel size, stride and groups.
    """
    weight = next((shape for shape in node.shapes.values() if len(shape) > 1), ())
    units = weight or next(iter(node.shapes.values()), ())
    options = (re.search(rf"_{letter}(\d+)", node.type) for letter in "sg")
    stride, groups = (int(option[1]) if option else 1 for option in options)
    sizes = (prod(weight[1:2]), prod(units[:1]), prod(weight[2:3]), stride, groups)
    doublings = [log2(max(size, 1)) for size in sizes]
    waves = [wave(each * pi / 4) for each in doublings for wave in (sin, cos)]
    match = re.match(r"(?:ct|c|l)(?=\d)|[a-z_]+(?=_|$)", node.type)
    kind = match[0] if match and match[0] in KINDS else ""
    return [*(each / 8 for each in doublings), *waves, *(float(kind == each) for each in ("", *KINDS))]


@dataclass(frozen=True)
class Reading:
    """The graph of a network, prepared for `GraphHypernetwork.write`.

    Attributes:
        known: type of each node, or None if the hypernetwork does not know the type.
        heads: names of an array in the layers of a type (None for a layer without it), by type and role.
        rows: tiles of the arrays to generate (see `tiling`).
        names: names of the generated arrays.
        unknown: types of layers for which nothing is generated.
        tensors: indices and features, on the hypernetwork's device.
    """

    known: tuple[str | None, ...]
    heads: Mapping[str, Mapping[str, Sequence[str | None]]]
    rows: Mapping[str, Tiled]
    names: tuple[str, ...]
    unknown: tuple[str, ...]
    tensors: Mapping[str, Tensor]


class GraphHypernetwork(nn.Module):
    """A network that generates the weights of other networks, with heads that take embeddings of the layers.

    Each layer type in `types` has a head, unless the `kind` of head is ``tiled``. With `normalise`, embeddings and
    latent vectors have unit variance, so that initial weights have Kaiming's scale. `seed` draws the initial values
    (see `start`), or is None if values are loaded later.
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
        """Return the graph of a network in the form that `write` needs."""
        nodes, slots = graph.nodes, [slots_of(node) for node in graph]
        known = tuple(node.type if node.type in self.catalogue else None for node in nodes)
        places: dict[str, list[int]] = {}
        others: list[int] = []
        for place, node in enumerate(nodes):
            if slots[place]:
                (others if known[place] is None else places.setdefault(node.type, [])).append(place)
        tiled = others if self.tiles else []
        heads = {
            type: {
                role: [nodes[place].parameters[role] if role in slots[place] else None for place in members]
                for role in self.catalogue[type].slots
            }
            for type, members in places.items()
        }
        rows = tiling((nodes[place].parameters, slots[place]) for place in tiled)
        described = [shape_features(node) for node, type in zip(nodes, known, strict=True) if type is None]
        ordered = [place for members in places.values() for place in members]
        index: dict[str, list[int]] = {
            "order": ordered,
            "row": [row for row, members in enumerate(places.values()) for _ in members],
            "tiled": tiled,
        } | {f"{kind}-nodes": each.nodes for kind, each in rows.items()}
        tensors = {name: torch.tensor(values, dtype=torch.long) for name, values in index.items()}
        tensors["edges"] = torch.tensor(graph.edges, dtype=torch.long).view(-1, 2).T.contiguous()
        tensors["features"] = torch.tensor(described).view(-1, FEATURES)
        tensors |= {f"{kind}-places": torch.tensor(each.places) for kind, each in rows.items()}
        tensors |= {f"{kind}-signs": torch.tensor(each.signs) for kind, each in rows.items()}
        names = tuple(nodes[place].parameters[role] for place in (*ordered, *tiled) for role in slots[place])
        unknown = () if self.tiles else tuple(dict.fromkeys(nodes[place].type for place in others))
        device = self.embedding.shapes.weight.device
        return Reading(known, heads, rows, names, unknown, {key: each.to(device) for key, each in tensors.items()})

    def embeddings(self, reading: Reading) -> Tensor:
        """Return the embeddings h of all nodes, (nodes, width)."""
        h: Tensor = self.embedding(reading.known, reading.tensors["features"], reading.tensors["edges"])
        return h

    def write(self, reading: Reading) -> dict[str, Tensor]:
        """Return the generated arrays, as differentiable tensors by their names in the network's state dict."""
        written: dict[str, Tensor] = {}
        h, tensors = self.embeddings(reading), reading.tensors
        if reading.heads:
            z, scale = self.latents(h[tensors["order"]], list(reading.heads), tensors["row"])
            sizes = [len(next(iter(roles.values()))) for roles in reading.heads.values()]
            for (type, roles), latents, factor in zip(
                reading.heads.items(), z.split(sizes), scale.split(sizes), strict=True
            ):
                heads: nn.ModuleDict = self.heads[type]  # type: ignore[assignment]
                for role, names in roles.items():
                    scaled = factor * self.catalogue[type].slots[role].scale
                    arrays = zip(names, heads[role](latents, scaled).unbind(0), strict=True)
                    written |= {name: array for name, array in arrays if name is not None}
        if self.tiles is not None and len(tensors["tiled"]):
            written |= self.tiles(h[tensors["tiled"]], reading.rows, tensors)
        return written


class Written(nn.Module):
    """A network that runs with generated weights, so that training it trains the hypernetwork.

    Other parameters, which are trained as well, and running statistics are those in `network`.
    """

    def __init__(self, hypernetwork: GraphHypernetwork, network: nn.Module, reading: Reading) -> None:
        super().__init__()
        self.hypernetwork, self.network, self.reading = hypernetwork, network, reading
        tensors, modules = network.state_dict(keep_vars=True), dict(network.named_modules())
        tied = tied_names(network).items()  # a module with two names is written once
        self._tied = {name: first for name, first in tied if name.rpartition(".")[0] in modules}
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}

    def write(self) -> dict[str, Tensor]:
        """Generate the network's arrays and return them by name, in the network's dtypes."""
        written = self.hypernetwork.write(self.reading)
        return {name: array.to(self._dtypes.get(name, array.dtype)) for name, array in written.items()}

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's outputs with newly generated weights."""
        with torch.autocast(inputs.device.type, enabled=False):  # weights are float32 in mixed precision, too
            written = self.write()
        written |= {name: written[first] for name, first in self._tied.items() if first in written}
        # Looking for tied tensors in each call takes a twentieth of a small network's step.
        outputs: Tensor = functional_call(self.network, written, (inputs,), tie_weights=False)
        return outputs
