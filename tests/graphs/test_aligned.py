"""Blocks of one network that answer to those of another."""

from itertools import combinations

import pytest
import torch
from torch import nn

from fedhet import models
from fedhet.graphs import UnsupportedArchitecture, align_blocks, blocks, trunk
from fedhet.graphs.aligned import angle, cheapest, divergence, grouped

IMAGES = torch.rand(12, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, (1, 16, 16), 10)


def test_the_cheapest_choice_in_order_is_found() -> None:
    costs = torch.rand(4, 9, generator=torch.Generator().manual_seed(1))
    sums = {
        columns: sum(float(costs[row, column]) for row, column in enumerate(columns))
        for columns in combinations(range(9), 4)
    }
    assert cheapest(costs) == min(sums, key=lambda columns: sums[columns])
    assert cheapest(torch.zeros(2, 5)) == (0, 1)
    assert cheapest(torch.eye(3)) == (0, 1, 2)


def test_groups_do_not_depend_on_signs_widths_or_the_order_of_channels() -> None:
    maps = torch.randn(3, 6, 8, 8, generator=torch.Generator().manual_seed(2))
    wider = torch.cat([maps.flip(1), -maps], 1)
    assert torch.allclose(grouped(maps), grouped(wider), atol=1e-6)
    assert grouped(maps).shape == grouped(maps[:, :, :2, :2]).shape == (3, 16)


def test_angles_and_divergences() -> None:
    one, other = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [3.0, 3.0]])
    assert float(angle(one, other)) == pytest.approx(0.5, abs=1e-3)  # a right angle, and none
    assert float(angle(one, 5 * one)) == pytest.approx(0.0, abs=1e-3)
    p, q = torch.tensor([[1.0, 3.0]]), torch.tensor([[6.0, 2.0]])
    both = 0.25 * torch.tensor(0.25 / 0.75).log() + 0.75 * torch.tensor(0.75 / 0.25).log()
    assert float(divergence(p, q)) == pytest.approx(float(both), rel=1e-5)
    assert float(divergence(p, 7 * p)) == pytest.approx(0.0, abs=1e-6)


def test_a_network_answers_to_itself_block_by_block() -> None:
    model = built("small-resnet-a")
    found = align_blocks(model, model, IMAGES, lambda images: images, count=4)
    assert found.reference == blocks(model, IMAGES[:2])
    diagonal = found.angles[range(4), list(found.chosen)]
    assert float(diagonal.abs().max()) < 1e-3
    assert found.blocks[:3] == found.reference[:3]


def test_of_another_family_the_chosen_blocks_are_in_order_and_the_least_different() -> None:
    model = built("small-mobilenet-b")
    found = align_blocks(model, built("small-resnet-a"), IMAGES, lambda images: images, count=4)
    assert found.candidates == tuple(trunk(model, IMAGES[:2]))
    assert list(found.chosen) == sorted(set(found.chosen))
    total = found.angles + found.divergences
    assert float(total[range(4), list(found.chosen)].sum()) <= float(total[range(4), [2, 3, 4, 5]].sum())


def test_the_trunk_is_what_returns_maps_one_after_another() -> None:
    model = models.build("torchvision/resnet18", (3, 32, 32), 10)
    layers = [f"layer{number}" for number in range(1, 5)]
    assert trunk(model, torch.randn(2, 3, 32, 32)) == [
        "conv1",
        *(f"{name}{end}" for name in layers for end in (".0", "")),
    ]


def test_a_network_without_maps_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"MLP has 0 modules that return feature maps .* 4 blocks are"):
        align_blocks(built("mlp"), built("small-resnet-a"), IMAGES, lambda images: images, count=4)
