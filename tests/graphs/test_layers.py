"""The graph of layers, which hypernetworks and averages by layer type read."""

import pytest
import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs import LayerGraph, layer_graph


class Skip(nn.Module):
    """A stem, a residual block called as it is, a concatenation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.block = nn.Conv2d(4, 4, (1, 3), padding=(0, 1), groups=2)
        self.late = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = x + self.block(x)
        return self.head(self.late(torch.cat([x, y], 1)).mean((2, 3)))


def types(graph: LayerGraph) -> list[str]:
    return [node.type for node in graph]


def test_layers_and_joints() -> None:
    graph = layer_graph(Skip(), torch.zeros(2, 3, 8, 8))
    assert types(graph) == ["c3_4_k3_s1", "c4_4_k1x3_s1_g2", "add", "cat", "batch_norm_8_8", "l8_5"]
    assert graph.edges == ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (3, 4), (4, 5))
    stem, block = graph.nodes[:2]
    assert stem.parameters["weight"] == "stem.weight"
    assert stem.parameters["norm_bias"] == "norm.bias"
    assert stem.shapes["weight"] == (4, 3, 3, 3)
    assert block.parameters == {"weight": "block.weight", "bias": "block.bias"}
    # Behind a joint stands no layer whose norm it could be.
    assert graph.nodes[4].parameters["running_var"] == "late.running_var"


def test_shared_layers_are_one_node() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.again, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
            self.out.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.again(torch.relu(self.again(self.table(x)))))

    graph = layer_graph(Tied(), torch.zeros(2, 3, dtype=torch.long))
    assert types(graph) == ["embedding_7x4_7", "l4_4"]
    assert set(graph.nodes[0].parameters.values()) == {"table.weight", "out.bias"}
    assert graph.edges == ((0, 1), (1, 0))


@pytest.mark.parametrize(
    ("layer", "shape", "type"),
    [
        (nn.Conv2d(4, 6, 3, stride=(1, 2), dilation=2), (4, 9, 9), "c4_6_k3_s1x2_d2"),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (4, 9, 9), "ct4_6_k2_s2"),
        (nn.Conv1d(4, 8, 3, groups=4), (4, 9), "c1d4_8_k3_s1_g4"),
        (nn.LayerNorm(9), (9,), "layer_norm_9_9"),
        (nn.PReLU(), (9,), "prelu_1"),
    ],
)
def test_layer_types(layer: nn.Module, shape: tuple[int, ...], type: str) -> None:
    assert types(layer_graph(layer, torch.zeros(2, *shape))) == [type]
