"""Planted permutations: a network whose units are in another order is the same function, and the order is found."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.graphs import architecture_graph, permutation_groups, permute, resize
from fedhet.algorithms.matching import Matching, match_networks

torchvision = pytest.importorskip("torchvision")

TOKENS = 11


class Block(nn.Module):
    """A residual block of images: with a grouped convolution (ResNeXt), or with GroupNorm."""

    def __init__(self, norm: Callable[[int], nn.Module], groups: int = 1):
        super().__init__()
        self.stem, self.norms = nn.Conv2d(3, 12, 3), nn.ModuleList([norm(12), norm(8)])
        self.one, self.two = nn.Conv2d(12, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.three, self.head = nn.Conv2d(8, 12, 1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        x = x + self.three(F.relu(self.norms[1](self.two(F.relu(self.one(x))))))
        return self.head(x.mean((2, 3)))


class Words(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(TOKENS, 6), kind(6, 7, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x))[0][:, -1])


def transformer() -> nn.Module:
    """A ViT-B/16 in small: two layers of four heads of four units."""
    return torchvision.models.VisionTransformer(16, 8, 2, 4, 16, 24, num_classes=5)


def convnext() -> nn.Module:
    """A ConvNeXt-T in small: two stages of a block each."""
    setting = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt([setting(8, 12, 1), setting(12, None, 1)], num_classes=5)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    # builder, size of the images (0: words), widths of the groups
    "vit": (transformer, 16, (16, 4, 24, 4, 24)),
    "convnext": (convnext, 16, (8, 32, 12, 48)),
    "resnext": (partial(Block, nn.BatchNorm2d, groups=4), 8, (12, 4)),
    "groupnorm": (partial(Block, partial(nn.GroupNorm, 4)), 8, (4, 8, 4)),
    "gru": (partial(Words, nn.GRU), 0, (6, 7, 7, 7, 7)),
    "rnn": (partial(Words, nn.RNN), 0, (6, 7, 7, 7, 7)),
}
LARGE: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "vit_b_16": (torchvision.models.vit_b_16, 224, (768, *(12, 3072) * 12)),
    "shufflenet": (
        torchvision.models.shufflenet_v2_x0_5,
        64,
        (24, 3, *[24] * 4, 1, *[48] * 5, 1, *[48] * 3, 12, *[96] * 4, 1024),
    ),
}


@pytest.mark.parametrize("name", [*NETWORKS, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_planted_order(name: str) -> None:
    build, size, expected = (NETWORKS | LARGE)[name]
    torch.manual_seed(0)
    model = build().double().eval()
    for key, value in model.state_dict().items():  # also what begins as ones or zeros
        if value.is_floating_point() and "var" not in key:
            value.add_(torch.randn_like(value), alpha=0.05)
    x = torch.randn(2, 3, size, size).double() if size else torch.randint(TOKENS, (4, 5))
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
