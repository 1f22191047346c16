"""Blocks of networks: torchvision's as given, others' stages by spatial size, or named by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer

from fedhet import models
from fedhet.algorithms.graphs import UnsupportedArchitecture, architecture_graph, blocks
from fedhet.algorithms.graphs.blocks import Exits, block_ends, groups_by_depth, stages
from fedhet.algorithms.graphs.layers import output_axis
from fedhet.client_apps.families.submodels import FirstBlocks
from fedhet.config import configuration
from fedhet.errors import ModelError

PAPER = configuration.preset_settings("fedharm/cifar10_iid")["fedharm.blocks"]
GIVEN = {
    "resnet18": ("layer1,layer2,layer3,layer4", "layer1 layer2 layer3"),
    "efficientnet_b0": ("features.4,features.5,features.6,features.7", "features.2 features.3 features.5"),
    "mobilenet_v3_small": ("features.6,features.8,features.11,features.12", "features.1 features.3 features.8"),
    "mobilenet_v3_large": ("features.10,features.12,features.15,features.16", "features.3 features.6 features.12"),
}
"""The blocks of torchvision's networks in the presets of the paper, and the first three of the last four stages."""


def built(name: str, size: int = 64, channels: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return models.build(name, (channels, size, size), 10), torch.randn(2, channels, size, size)


@pytest.mark.parametrize("name", GIVEN)
def test_torchvision_blocks(name: str) -> None:
    model, images = built(f"torchvision/{name}")
    papers, first_stages = GIVEN[name]
    assert blocks(model, images, chosen=PAPER) == tuple(papers.split(","))
    assert blocks(model, images)[:3] == tuple(first_stages.split())


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("name", models.FAMILIES["fedharm-small"])
def test_small_networks_have_four_stages(name: str, size: int) -> None:
    model, images = built(name, size, 1)
    assert blocks(model, images) == ("stages.0", "stages.1", "stages.2", "stages" if "resnet" in name else "last")


def tiny_swin() -> nn.Module:
    return SwinTransformer([2, 2], 8, [1, 1, 1, 1], [1, 1, 2, 2], [2, 2], num_classes=10)


def tiny_convnext() -> nn.Module:
    sizes = [(4, 8, 1), (8, 12, 1), (12, 16, 1), (16, None, 1)]
    return ConvNeXt([CNBlockConfig(*each) for each in sizes], num_classes=10)


@pytest.mark.parametrize("build", [tiny_swin, tiny_convnext])
def test_blocks_are_the_four_stages_of_transformers(build: Callable[[], nn.Module]) -> None:
    """Features lie along the last axis in Swin's, and along the last and then the second axis in ConvNeXt's blocks."""
    model, images = build(), torch.randn(2, 3, 64, 64)
    assert blocks(model, images) == ("features.1", "features.3", "features.5", "features")
    graph = architecture_graph(model, images)
    found = [output_axis(graph, name) for name in ("features.1", "features.3", "features")]
    assert found == [3 if build is tiny_swin else 1] * 3


def test_too_few_stages() -> None:
    for name in ("mlp", "resnet8"):
        with pytest.raises(UnsupportedArchitecture, match=r"last modules of 4 blocks, .* input-size"):
            blocks(*built(name, 32))


def test_named_blocks() -> None:
    model, images = built("resnet8", 32)
    chosen = "layer1,layer2,layer3,layer4; body.2, body.3,body.4,body.5"
    assert blocks(model, images, chosen=chosen) == ("body.2", "body.3", "body.4", "body.5")
    assert blocks(model, images, chosen="body.3,body.5", count=2) == ("body.3", "body.5")
    with pytest.raises(UnsupportedArchitecture, match=r"no module 'layer1'.*choose from body, body\.0"):
        blocks(model, images, chosen="layer1,layer2,layer3,layer4")
    with pytest.raises(UnsupportedArchitecture, match=r"name the 4 modules that .* but is body\.3, body\.5"):
        blocks(model, images, chosen="body.3,body.5")


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Patches(nn.Module):
    """Two convolutions that make patches, and residual layers in a list, whose last ones are a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 2, 2))
        self.layers = nn.ModuleList(Residual(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(5))
        self.gate, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :1, ::4, ::4].flatten(2).transpose(1, 2) > -9
        x = self.layers[0](self.stem(x).flatten(2).transpose(1, 2) * self.gate)
        for layer in self.layers[1:]:
            x = layer(x) * mask
        return self.head(x.mean(1))


def test_patches_end_no_block_and_lists_are_no_modules() -> None:
    model, images = Patches(), torch.randn(2, 3, 16, 16)
    assert stages(model, images) == ["layers.4"]
    assert block_ends(model, images, 3) == ("layers.0", "layers.2")
    assert {node.module for node in architecture_graph(model, images)} <= {name for name, _ in model.named_modules()}


class Skipping(nn.Module):
    """A network that skips its second layer in training, as LayerDrop does at random, and rotates all features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs
        for number, layer in enumerate(self.layers):
            if number != 1 or not self.training:
                values = layer(values).relu()
                # Rotary embeddings leave features as they are that may be none.
                values = torch.cat([values[..., :6].flip(-1), values[..., 6:]], -1)
        return self.head(values.mean(1))


@pytest.mark.parametrize("depth", [1.0, 0.5])
def test_a_skipped_end_of_a_block_is_named(depth: float) -> None:
    model, example = Exits(Skipping(), 2), torch.randn(2, 5, 6)
    part = FirstBlocks(depth, groups_by_depth(model, example)).cut(model)
    assert part.eval()(example).shape == (2, 3)
    with pytest.raises(ModelError, match=r"Skipping skips an end of its blocks \(layers.1\) .* layerdrop, to 0"):
        part.train()(example)


@pytest.mark.parametrize("depth", [1.0, 0.5])
def test_another_error_of_the_network_is_no_skipped_end(depth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = Exits(Skipping(), 2), torch.randn(2, 5, 6)
    part = FirstBlocks(depth, groups_by_depth(model, example)).cut(model)
    monkeypatch.setattr(Skipping, "forward", lambda self, inputs: len(0))
    with pytest.raises(TypeError, match="has no len"):
        part.train()(example)
