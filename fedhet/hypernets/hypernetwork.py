"""Graph hypernetworks: one network that writes the weights of others, whatever their architecture.

Litany et al., "Federated Learning with Heterogeneous Architectures using Graph HyperNetworks" (2022), section 3, and
Zhang et al., "Graph HyperNetworks for Neural Architecture Search" (ICLR 2019).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.graphs import LayerGraph
from fedhet.hypernets.design import Catalogue, Design, slots_of
from fedhet.hypernets.embedding import FEATURES, Embedding, shape_features
from fedhet.hypernets.heads import Latents, head
from fedhet.hypernets.starts import start
from fedhet.hypernets.tiles import Target, Tiled, Tiles, tiling


@dataclass(frozen=True)
class Reading:
    """Graphs as a hypernetwork goes through them; `GraphHypernetwork.read` makes it.

    Attributes:
        graphs: how many there are.
        known: each node's type, None for one that the hypernetwork has no vector of.
        heads: of each type that a head writes and of each of its arrays' roles, where its layers' arrays go; None: a
            layer has none.
        rows: what is laid out in tiles.
        names: of the arrays that are written, of all graphs.
        unknown: types of layers that have no head, where heads go by type; nothing is written for them without tiles.
        tensors: index tensors and features.
    """

    graphs: int
    known: tuple[str | None, ...]
    heads: Mapping[str, Mapping[str, Sequence[Target | None]]]
    rows: Mapping[str, Tiled]
    names: tuple[str, ...]
    unknown: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    def to(self, device: torch.device) -> "Reading":
        """The same for a hypernetwork on a device."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})


class GraphHypernetwork(nn.Module):
    """Writes the weights of networks from their graphs: h of each layer by messages, then its type's head.

    Args:
        types: the layer types that have heads of their own; of no use to tiled heads.
        design: how it is built.
        seed: of its values before training (see `fedhet.hypernets.starts`); None: they are arbitrary, to be filled in.
    """

    def __init__(self, types: Catalogue, design: Design | None = None, *, seed: int | None = 0) -> None:
        super().__init__()
        self.design = design = design or Design()
        self.catalogue: Catalogue = {} if design.head == "tiled" else types
        written = {type: layer for type, layer in self.catalogue.items() if layer.slots}
        self.embedding = Embedding(list(self.catalogue), design)
        self.latents = Latents(list(written), design.latent, design)
        self.heads = nn.ModuleDict(
            {
                type: nn.ModuleDict({role: head(layer, slot, design) for role, slot in layer.slots.items()})
                for type, layer in written.items()
            }
        )
        self.tiles = Tiles(design) if design.head == "tiled" else None
        if seed is not None:
            with torch.no_grad():
                for key, parameter in self.named_parameters():
                    parameter.copy_(start(key, tuple(parameter.shape), seed, normalise=design.normalise))

    def read(self, *graphs: LayerGraph) -> Reading:
        """Prepare the graphs of the networks to be written for `write`; messages go along the data flow."""
        nodes = [(number, node) for number, graph in enumerate(graphs) for node in graph]
        known = tuple(node.type if node.type in self.catalogue else None for _, node in nodes)
        slots = [slots_of(node) for _, node in nodes]
        places: dict[str, list[int]] = {}
        unknown: list[int] = []
        for place, (_, node) in enumerate(nodes):
            if slots[place]:
                (unknown if known[place] is None else places.setdefault(node.type, [])).append(place)
        tiled = unknown if self.tiles else []
        heads = {
            type: {
                role: [(nodes[p][0], nodes[p][1].parameters[role]) if role in slots[p] else None for p in members]
                for role in self.catalogue[type].slots
            }
            for type, members in places.items()
        }
        rows = tiling(
            ((nodes[place][0], index, nodes[place][1].parameters, slots[place]) for index, place in enumerate(tiled)),
            self.design.tile,
        )
        described = [shape_features(node) for (_, node), type in zip(nodes, known, strict=True) if type is None]
        index = {
            "edges": torch.tensor(_edges(graphs), dtype=torch.long).view(-1, 2).T.contiguous(),
            "order": torch.tensor([place for members in places.values() for place in members], dtype=torch.long),
            "row": torch.tensor([row for row, each in enumerate(places.values()) for _ in each], dtype=torch.long),
            "tiled": torch.tensor(tiled, dtype=torch.long),
        }
        features = {"features": torch.tensor(described).view(-1, FEATURES)}
        for kind, each in rows.items():
            index[f"{kind}-nodes"] = torch.tensor(each.nodes, dtype=torch.long)
            features[f"{kind}-places"] = torch.tensor(each.places)
        written = [place for members in (*places.values(), tiled) for place in members]
        names = tuple(nodes[place][1].parameters[role] for place in written for role in slots[place])
        others = () if self.design.head == "tiled" else tuple(dict.fromkeys(nodes[place][1].type for place in unknown))
        return Reading(len(graphs), known, heads, rows, names, others, index | features)

    def embeddings(self, reading: Reading) -> Tensor:
        """The embeddings h of all nodes of all graphs, (nodes, width)."""
        h: Tensor = self.embedding(reading.known, reading.tensors["features"], reading.tensors["edges"])
        return h

    def write(self, reading: Reading) -> list[dict[str, Tensor]]:
        """For each graph the arrays of its network by their names in its state dict, part of autograd's graph.

        What is not there is the network's own: statistics, parameters that its forward pass does not use, layers of
        unknown types.
        """
        written: list[dict[str, Tensor]] = [{} for _ in range(reading.graphs)]
        h, tensors = self.embeddings(reading), reading.tensors
        if reading.heads:
            z, scale = self.latents(h[tensors["order"]], list(reading.heads), tensors["row"])
            sizes = [len(next(iter(roles.values()))) for roles in reading.heads.values()]
            scales = scale.split(sizes) if scale is not None else [None] * len(sizes)
            for (type, roles), own, factor in zip(reading.heads.items(), z.split(sizes), scales, strict=True):
                heads: nn.ModuleDict = self.heads[type]  # type: ignore[assignment]
                for role, targets in roles.items():
                    for target, array in zip(targets, heads[role](own, factor).unbind(0), strict=True):
                        if target is not None:
                            written[target[0]][target[1]] = array
        if self.tiles is not None and len(tensors["tiled"]):
            for (graph, name), array in self.tiles(h[tensors["tiled"]], reading.rows, tensors):
                written[graph][name] = array
        return written


class Written(nn.Module):
    """A network that runs with the weights that a hypernetwork writes for it, so that training it trains the writer.

    The network's own arrays are used, and trained, where nothing is written for them; its statistics are its own.
    """

    def __init__(self, hypernetwork: GraphHypernetwork, network: nn.Module, reading: Reading) -> None:
        super().__init__()
        self.hypernetwork, self.network, self.reading = hypernetwork, network, reading
        everything = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
        self._tied = len({id(tensor) for _, tensor in everything}) < len(everything)
        floats = {name: tensor.dtype for name, tensor in everything if tensor.is_floating_point()}
        self._others = {name: dtype for name, dtype in floats.items() if dtype != torch.float32}

    def write(self) -> dict[str, Tensor]:
        """The network's arrays by name, in its own dtypes."""
        written = self.hypernetwork.write(self.reading)[0]
        for name in self._others.keys() & written.keys():
            written[name] = written[name].to(self._others[name])
        return written

    def forward(self, inputs: Tensor) -> Tensor:
        """The network's outputs; in mixed precision the weights are still written in float32."""
        with torch.autocast(inputs.device.type, enabled=False):
            written = self.write()
        # To look for tied tensors in each call costs a small network a twentieth of its step.
        outputs: Tensor = functional_call(self.network, written, (inputs,), tie_weights=self._tied)
        return outputs


def _edges(graphs: Sequence[LayerGraph]) -> list[tuple[int, int]]:
    """The edges of graphs side by side."""
    found: list[tuple[int, int]] = []
    offset = 0
    for graph in graphs:
        found += [(offset + source, offset + to) for source, to in dict.fromkeys(graph.edges)]
        offset += len(graph)
    return found
