"""Graph hypernetworks: what they write, at which scale, for whom, and what their gradients reach."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from fedhet import models
from fedhet.algorithms.graphs import LayerGraph, layer_graph
from fedhet.algorithms.hypernets.design import Head, catalogue, start, std_of
from fedhet.algorithms.hypernets.hypernetwork import GraphHypernetwork
from fedhet.algorithms.hypernets.personal import calibrated
from fedhet.models.copies import starts_of

HEADS = ("dense", "base-lowrank", "tiled")


@cache
def network(name: str, shape: tuple[int, ...] = (1, 8, 8)) -> tuple[nn.Module, LayerGraph]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = models.build(name, shape, 10)
    dtype = torch.long if "lstm" in name else torch.float32
    return model, layer_graph(model, torch.zeros(2, *shape, dtype=dtype))


def hypernetwork(graphs: Sequence[LayerGraph], *, seed: int | None = 0, **design: Any) -> GraphHypernetwork:
    return GraphHypernetwork(catalogue(graphs), **design, seed=seed)


def family(name: str) -> list[LayerGraph]:
    return [network(each)[1] for each in models.FAMILIES[name]]


def parameters(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


# ---- what is written


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [("mlp", (1, 8, 8)), ("resnet8", (1, 8, 8)), ("small-mobilenet-a", (1, 8, 8)), ("char-lstm", (80,))],
)
def test_generated_arrays(name: str, shape: tuple[int, ...], head: str) -> None:
    assert_written_at_scale(*network(name, shape), head)


def assert_written_at_scale(model: nn.Module, graph: LayerGraph, head: str) -> None:
    """Every array has its name and shape; every layer's weights begin at .85 to 1.15 of Kaiming's scale.

    A layer of few weights may be off by chance, by three standard deviations.
    """
    made = hypernetwork([graph], kind=head)
    with torch.no_grad():
        written = made.write(made.read(graph))
    assert {key: array.shape for key, array in written.items()} == parameters(model)
    off = {}
    for key, array in written.items():
        if array.ndim > 1:
            type = "embedding" if key.startswith("embedding") else ""
            ratio = (array / std_of(type, tuple(array.shape))).square().mean().sqrt().item()
            if abs(ratio - 1) > 0.15 + 3 * (2 * array.numel()) ** -0.5 * (array.numel() < 2000):
                off[key] = ratio
        else:  # a normalisation begins as PyTorch's, a bias at 0
            normalises = isinstance(model.get_submodule(key.rpartition(".")[0]), nn.BatchNorm2d)
            assert torch.equal(array, model.state_dict()[key] if normalises else torch.zeros_like(array))
    assert off == {}


class Tokens(nn.Module):
    """Parameters outside layers: a class token around 0, and a vector of gains around 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.gains = nn.Parameter(0.1 * torch.randn(1, 1, 64)), nn.Parameter(torch.rand(64))
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), x], 1).mul(self.gains).tanh().mean(1))


@pytest.mark.parametrize("head", HEADS)
def test_parameters_outside_layers_are_drawn_as_the_networks(head: str) -> None:
    torch.manual_seed(0)
    model = Tokens()
    graph = layer_graph(model, torch.randn(2, 3, 64), starts_of(model))
    made = hypernetwork([graph], kind=head)
    written = made.write(made.read(graph))
    for name, mean, std in (("token", 0.0, 0.1), ("gains", 0.5, 0.29)):
        assert written[name].mean().item() == pytest.approx(mean, abs=0.2 * std + 0.05)
        assert written[name].std().item() == pytest.approx(std, rel=0.35)


class Summed(nn.Linear):
    """A layer over a complete graph of nodes (n, nodes, d), which sums the values of all nodes."""

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        return super().forward(nodes + nodes.sum(1, keepdim=True))


@pytest.mark.parametrize("head", HEADS)
def test_sums_without_normalisation_start_at_the_scale_of_the_network(head: str) -> None:
    torch.manual_seed(0)
    sums = [layer for size in (4, 32, 32, 32) for layer in (Summed(size, 32), nn.ReLU())]
    model, inputs = nn.Sequential(*sums, nn.Flatten(), nn.Linear(320, 5)), torch.randn(16, 10, 4)
    with torch.no_grad():
        before = model(inputs).square().mean().sqrt()
        starts = calibrated(copy.deepcopy(model), inputs)
        graph = layer_graph(model, inputs, starts)
        made = hypernetwork([graph], kind=head)
        after = torch.func.functional_call(model, made.write(made.read(graph)), inputs).square().mean().sqrt()
    assert all(each.exact for each in starts.values())
    assert before / 4 < after < 4 * before


def test_kaimings_scale_suits_common_networks() -> None:
    for name in ("mlp", "resnet8", "flha-small-0"):
        starts = calibrated(copy.deepcopy(network(name)[0]), torch.randn(16, 1, 8, 8))
        assert not any(each.exact for each in starts.values())


# ---- graphs


@pytest.mark.parametrize(("messages", "distinct"), [(True, 7), (False, 1)])
def test_messages_distinguish_equal_layers(messages: bool, distinct: int) -> None:
    _, graph = network("flha-small-plain-13")
    made = hypernetwork([graph])
    h = made.embeddings(made.read(graph if messages else replace(graph, edges=())))
    (equal,) = [
        places
        for type in {n.type for n in graph}
        if len(places := [i for i, n in enumerate(graph) if n.type == type]) > 1
    ]
    assert len(equal) == 11
    far = torch.pdist(h[equal]) > 1e-4
    apart = torch.zeros(11, 11, dtype=torch.bool)
    apart[*torch.triu_indices(11, 11, 1)] = far
    assert sum(not (~apart[:place, place]).any() for place in range(11)) == distinct


# ---- values before training, and bytes


def test_initial_values() -> None:
    one, all_ = hypernetwork([network("flha-small-1")[1]]), hypernetwork(family("flha-small"))
    common = {key: value for key, value in one.state_dict().items() if value.shape == all_.state_dict()[key].shape}
    assert len(common) > 0.8 * len(one.state_dict())
    for key, value in common.items():
        assert torch.equal(value, all_.state_dict()[key])
        assert torch.equal(value, start(key, tuple(value.shape), 0))
    other = hypernetwork([network("flha-small-1")[1]], seed=1).state_dict()
    assert not torch.equal(other["heads.l32_10.weight.base"], common["heads.l32_10.weight.base"])


def test_initialisation_of_the_paper() -> None:
    """W_H is Xavier's normal times (2 c_in / d_lat)^.5, biases are 0, and what stands before it is PyTorch's."""
    _, graph = network("flha-small-0")
    made = hypernetwork([graph], kind="dense", normalise=False)
    values = made.state_dict()
    dense = values["heads.c32_32_k3_s1.weight.dense"]
    assert dense.shape == (16, 32, 32, 3, 3)
    expected = (2 / (16 + 32 * 32 * 9)) ** 0.5 * (2 * 32 / 16) ** 0.5
    assert float(dense.std()) == pytest.approx(expected, rel=0.02)
    assert not values["heads.c32_32_k3_s1.weight.bias"].any()
    first = values["latents.weight.c32_32_k3_s1"]
    assert 0.9 * first.shape[1] ** -0.5 < float(first.abs().max()) <= first.shape[1] ** -0.5
    assert not values["latents.bias.c32_32_k3_s1"].any()
    reading = made.read(graph)
    with torch.no_grad():
        h = made.embeddings(reading)
        unit = hypernetwork([graph], kind="dense").embeddings(reading)
    torch.testing.assert_close(unit.square().mean(1), torch.ones(len(graph.nodes)), rtol=0.02, atol=0.02)
    assert not torch.allclose(h.square().mean(1), torch.ones(len(graph.nodes)), rtol=0.1)


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("dense", 329e6, 333e6), ("base-lowrank", 20e6, 35e6), ("tiled", 1e6, 4e6)]
)
def test_size_of_the_hypernetwork(kind: Head, least: float, most: float) -> None:
    """330 MB for dense heads, 35 at most by default; the twelve types of ResNet-18 and its like."""
    graphs = [network(name, (3, 32, 32))[1] for name in models.FAMILIES["flha"]]
    assert len({node.type for graph in graphs for node in graph} - {"add"}) == 12
    with torch.device("meta"):
        made = hypernetwork(graphs, seed=None, kind=kind)
    size = sum(parameter.numel() * 4 for parameter in made.parameters())
    assert least < size < most
