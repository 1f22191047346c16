"""The architecture graph: what is read from an export, which is all that can be exported."""

import pytest
import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs import UnsupportedArchitecture, architecture_graph
from fedhet.algorithms.graphs.graph import ArchitectureGraph, Node


class Branchy(nn.Module):
    """Branches on shapes, which torch.fx's tracer refuses; one operator in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if y.shape[-1] > 2:
            y = torch.max_pool2d(y, 2)
        z = y.mean((2, 3))
        z.relu_()
        return self.head(z)


def layers_in(graph: ArchitectureGraph) -> list[Node]:
    """The operators that have parameters, in data-flow order."""
    return [node for node in graph if node.parameters and node.operator != "parameter"]


def test_nodes() -> None:
    graph = architecture_graph(Branchy(), torch.zeros(3, 1, 8, 8))
    assert [node.operator for node in graph] == [
        "input", "conv2d", "batch_norm", "max_pool2d", "mean", "relu", "linear", "output",
    ]  # fmt: skip
    convolution, norm, linear = layers_in(graph)
    assert (convolution.module, convolution.shape) == ("body.0", (3, 4, 6, 6))
    assert convolution.parameters == {"weight": "body.0.weight", "bias": "body.0.bias"}
    assert convolution.options["groups"] == 1
    assert norm.parameters["running_var"] == "body.1.running_var"
    # The in-place result is what is read afterwards, though the code goes on with the old name.
    assert graph[linear.inputs[0]].operator == "relu"
    assert convolution.name in norm.inputs
    assert graph.shapes["head.weight"] == (2, 4)
    assert graph.tied == {}
    assert graph.unused == ()


def test_tied_weights() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    model[1].weight = nn.Parameter(model[0].weight.detach())  # another Parameter, the same storage
    graph = architecture_graph(model, torch.zeros(2, 3, dtype=torch.long))
    assert graph.tied == {"1.weight": "0.weight"}
    assert layers_in(graph)[1].parameters["weight"] == "0.weight"
    assert graph.unused == ()


def assert_whole(graph: ArchitectureGraph, model: nn.Module) -> None:
    """Every parameter is in the graph or unused, and every node stands behind its inputs."""
    used = {name for node in graph for name in node.parameters.values()}
    for name, _ in model.named_parameters():
        assert (graph.tied.get(name, name) in used) != (name in graph.unused), name
    known = set()
    for node in graph:
        assert known.issuperset(node.inputs)
        assert node.name not in known
        known.add(node.name)


class First(nn.Module):
    """A recurrent layer's outputs, without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    ("model", "shape", "layers"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), (2, 3), {"linear": 2, "layer_norm": 2}),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)), (2, 3, 5, 5), {"conv2d": 2, "group_norm": 2}),
        (nn.Sequential(nn.InstanceNorm2d(3, affine=True)), (2, 3, 5, 5), {"instance_norm": 2}),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.PixelShuffle(2)), (2, 3, 5, 5), {"conv_transpose2d": 2}),
        (First(nn.GRU(3, 4, 2, bidirectional=True)), (5, 2, 3), {"gru": 16}),
        (First(nn.LSTM(3, 4, proj_size=2)), (5, 2, 3), {"lstm": 5}),
        (First(nn.LSTMCell(3, 4)), (2, 3), {"lstm_cell": 4}),
    ],
)
def test_layers_and_their_parameters(model: nn.Module, shape: tuple[int, ...], layers: dict[str, int]) -> None:
    graph = architecture_graph(model, torch.zeros(shape))
    assert {node.operator: len(node.parameters) for node in layers_in(graph)} == layers
    assert_whole(graph, model)


def test_export_fails() -> None:
    class OnValues(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(UnsupportedArchitecture, match="OnValues"):
        architecture_graph(OnValues(3, 4), torch.zeros(2, 3))
