"""Planted permutations: a network whose units are in another order is the same function, and the order is found."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedhet.algorithms.graphs import architecture_graph, permute, resize
from fedhet.algorithms.graphs.permutations import permutation_groups
from fedhet.algorithms.matching.groups import Matching, match_networks

torchvision = pytest.importorskip("torchvision")


def transformer() -> nn.Module:
    """A ViT-B/16 in small: two layers of four heads of four units."""
    return torchvision.models.VisionTransformer(16, 8, 2, 4, 16, 24, num_classes=5)


def convnext() -> nn.Module:
    """A ConvNeXt-T in small: two stages of a block each."""
    setting = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt([setting(8, 12, 1), setting(12, None, 1)], num_classes=5)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    # builder, size of the images, widths of the groups
    "vit": (transformer, 16, (16, 4, 24, 4, 24)),
    "convnext": (convnext, 16, (8, 32, 12, 48)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_planted_order(name: str) -> None:
    build, size, expected = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double().eval()
    for key, value in model.state_dict().items():  # also what begins as ones or zeros
        if value.is_floating_point() and "var" not in key:
            value.add_(torch.randn_like(value), alpha=0.05)
    x = torch.randn(2, 3, size, size).double()
    groups = permutation_groups(architecture_graph(model, x))
    assert groups.widths == expected
    random, state = np.random.default_rng(0), {key: value.numpy() for key, value in model.state_dict().items()}
    orders = {group.index: random.permutation(group.width) for group in groups}
    planted = permute(state, groups, orders)
    with torch.no_grad():
        before, after = model(x), resize(model, {key: torch.from_numpy(array) for key, array in planted.items()})(x)
    assert before.std() > 0.01
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9 * before.abs().max().item())

    settled, moved = match_networks([state, planted], groups, Matching(max_growth=1), np.random.RandomState(0))
    for group, each in zip(groups, settled, strict=True):
        first, second = each.match.assignments
        np.testing.assert_array_equal(second[orders[group.index]], first)
    for key, array in moved[0].items():
        np.testing.assert_array_equal(moved[1][key], array)
