"""Nodes' embeddings h: what each layer learns of its place in its network, by messages along the graph."""

import re
import warnings
from collections.abc import Sequence
from math import cos, log2, pi, prod, sin

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.graphs import LayerNode
from fedhet.hypernets.design import Design

with warnings.catch_warnings():  # PyTorch Geometric uses torch.jit, which PyTorch has deprecated
    warnings.simplefilter("ignore")
    from torch_geometric.nn import GraphConv

KINDS = ("c", "ct", "l", "add", "cat", "stack")
SIZES = 5
FEATURES = 3 * SIZES + len(KINDS) + 1


class Embedding(nn.Module):
    """T steps of a graph network over the layers of a network.

    A step is h'_v = ReLU(W1 h_v + sum_u->v W2 h_u + b) (equation 2); a LayerNorm follows the last. At first
    h is one vector a type (a one-hot type times a matrix), or for types that have none a linear map of what
    `shape_features` says.

    Args:
        types: the types that have a vector.
        design: width, steps, and whether the LayerNorm is there.
    """

    def __init__(self, types: Sequence[str], design: Design) -> None:
        super().__init__()
        width = design.width
        self.types = nn.ParameterDict({type: nn.Parameter(torch.empty(width)) for type in types})
        self.shapes = nn.Linear(FEATURES, width)
        self.normalise = design.normalise
        self.steps = nn.ModuleList([GraphConv(width, width) for _ in range(design.steps)])

    def forward(self, known: Sequence[str | None], features: Tensor, edges: Tensor) -> Tensor:
        """Embeddings (nodes, width).

        Args:
            known: each node's type, None where its features take the place of one.
            features: (nodes without a type, FEATURES), in their order.
            edges: (2, edges) int64, from and to.
        """
        others = iter(self.shapes(features).unbind(0)) if len(features) else iter(())
        h = torch.stack([next(others) if type is None else self.types[type] for type in known])
        for step in self.steps:
            h = F.relu(step(h, edges))
        return F.layer_norm(h, h.shape[-1:]) if self.normalise else h


def shape_features(node: LayerNode) -> list[float]:
    """Features that any layer has: sizes (in, out, kernel, stride, groups) on a scale of doublings, and its type.

    Sizes also go by sine and cosine, so that those that are near each other differ by more than a little.
    """
    weight = next((shape for shape in node.shapes.values() if len(shape) > 1), ())
    units = weight or next(iter(node.shapes.values()), ())
    sizes = (prod(weight[1:2]), prod(units[:1]), prod(weight[2:3]), _option(node, "s"), _option(node, "g"))
    doublings = [log2(max(size, 1)) for size in sizes]
    waves = [wave(each * pi / 4) for each in doublings for wave in (sin, cos)]
    found = re.match(r"(?:ct|c|l)(?=\d)|[a-z_]+(?=_|$)", node.type)
    kind = found[0] if found and found[0] in KINDS else ""
    return [*(each / 8 for each in doublings), *waves, *(float(kind == each) for each in ("", *KINDS))]


def _option(node: LayerNode, letter: str) -> int:
    found = re.search(rf"_{letter}(\d+)", node.type)
    return int(found[1]) if found else 1
