import pytest
import torch
from torch import nn

from fedhet import models

CIFAR10, CHEST = (3, 32, 32), (1, 224, 224)


def types(model: nn.Module) -> list[tuple[int, ...]]:
    """Types of the layers with weights: channels in and out, kernel and stride; two widths of a linear layer."""
    return [
        (layer.in_channels, layer.out_channels, layer.kernel_size[0], layer.stride[0])
        if isinstance(layer, nn.Conv2d)
        else (layer.in_features, layer.out_features)
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    ]


def depth(model: nn.Module) -> int:
    """Number of layers with weights, without 1 x 1 shortcuts."""
    return sum(len(layer) == 2 or layer[2] > 1 for layer in types(model))


def shared_types(model: nn.Module) -> set[tuple[int, ...]]:
    return {layer for layer in types(model)[1:] if len(layer) == 4}


def test_arch_0_is_resnet18_with_the_cifar_stem() -> None:
    model = models.build("flha-arch-0", CIFAR10, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    assert len(set(types(model))) == 12  # 8 of 3 x 3, 3 shortcuts, the head
    assert (depth(model), types(model)[0]) == (18, (3, 64, 3, 1))


def test_depths_and_skips_are_the_papers() -> None:
    networks = [models.build(name, CIFAR10, 10) for name in models.expand("flha-small")]
    assert [depth(network) for network in networks] == [18, 10, 12, 12]
    skips = [[type(layer).__name__ == "ResidualBlock" for layer in network.body][1:-2] for network in networks]
    assert skips == [[True] * 8, [False] * 8, [True] * 4 + [False] * 2, [False] * 2 + [True] * 4]


def test_hybrids_concatenate() -> None:
    networks = [models.build(name, CIFAR10, 10) for name in models.expand("flha-small-hybrids")]
    concatenations = [
        tuple(index for index, layer in enumerate(network.body) if type(layer).__name__ == "ConcatBlock")
        for network in networks
    ]
    assert concatenations == [(), (2,), (4,), (2, 4)]
    assert [depth(network) for network in networks] == [18] * 4


def test_plain_networks_repeat_one_type() -> None:
    networks = [models.build(name, CIFAR10, 10) for name in models.expand("flha-small-plain")]
    assert [depth(network) for network in networks] == [4, 7, 10, 13]
    assert len(set().union(*map(shared_types, networks))) == 1


SMALL = [name for name in models.names() if name.startswith("flha-small") and "plain" not in name]


@pytest.mark.parametrize("name", SMALL)
def test_all_layers_have_resnet18s_types(name: str) -> None:
    resnet = shared_types(models.build("flha-small-0", CIFAR10, 10))
    assert shared_types(models.build(name, CIFAR10, 10)) <= resnet


def test_large_images_have_the_stem_of_7_x_7() -> None:
    for name in ("flha-small-2", "flha-small-plain-4"):
        model = models.build(name, CHEST, 14).eval()
        assert types(model)[0][2:] == (7, 2)
        with torch.no_grad():
            assert model.body[:2](torch.zeros(1, *CHEST)).shape[2:] == (56, 56)
            assert model(torch.randn(1, *CHEST)).shape == (1, 14)
