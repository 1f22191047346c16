"""Networks with attention, gates and parameters of their own, written as people write them: what moves together."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.graphs import (
    UnsupportedArchitecture,
    architecture_graph,
    permutation_groups,
    permute,
    resizable_groups,
    resize,
)

WORDS, LENGTH = 11, 5


class Mixture(nn.Module):
    """Two layers' outputs, mixed by learnt shares; products of matrices with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.matrix = nn.Embedding(WORDS, 6), nn.Parameter(torch.randn(6, 6))
        self.shares, self.head = nn.Parameter(torch.randn(2)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).mean(1)
        shares = self.shares.softmax(0)
        return self.head(shares[0] * x + shares[1] * (x @ self.matrix).relu())


class Causal(nn.Module):
    """A language model with a head that is the embedding, stacked queries, keys and values, and a mask in a buffer."""

    def __init__(self, heads: int = 2, size: int = -1) -> None:
        super().__init__()
        self.words, self.places, self.sizes = nn.Embedding(WORDS, 6), nn.Embedding(LENGTH, 6), (heads, size)
        self.norm, self.qkv, self.out = nn.LayerNorm(6), nn.Linear(6, 24), nn.Linear(8, 6)
        self.head = nn.Linear(6, WORDS)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places(torch.arange(LENGTH))
        stacked = self.qkv(self.norm(x))
        query, key, value = (
            each.unflatten(2, self.sizes).transpose(1, 2) for each in stacked.split(stacked.shape[2] // 3, dim=2)
        )
        scores = (query @ key.transpose(-2, -1) / 2).masked_fill(self.mask == 0, -torch.inf)
        return self.head(x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)))


class Padded(nn.Module):
    """PyTorch's transformer, which does not read padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 3, 8, batch_first=True, norm_first=True)
        self.words, self.layers = nn.Embedding(WORDS, 6), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.words(x), src_key_padding_mask=x == 0)[:, -1])


class Asked(nn.Module):
    """A single head of attention from learnt queries, and positions in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.questions = nn.Embedding(WORDS, 6), nn.Parameter(torch.randn(1, 3, 7))
        self.register_buffer("places", torch.randn(LENGTH, 1), persistent=False)
        self.query, self.key, self.value = nn.Linear(7, 5), nn.Linear(6, 5), nn.Linear(6, 8)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places
        query = self.query(self.questions.expand(len(x), -1, -1))
        return self.head(F.scaled_dot_product_attention(query, self.key(x), self.value(x)).flatten(1))


class Gated(nn.Module):
    """A gated linear unit, and the largest of pairs of units."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gate, self.pairs = nn.Embedding(WORDS, 6), nn.Linear(6, 14), nn.Linear(7, 10)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pairs(F.glu(self.gate(self.words(x).mean(1)))).unflatten(1, (-1, 2)).amax(2))


@pytest.mark.parametrize(
    ("model", "widths"),
    [
        (Mixture(), {"one": 6}),
        (Causal(), {"words": 6, "qkv": 2}),
        (Padded(), {"words": 6, "layers.layers.0.self_attn": 3, "layers.layers.0.linear1": 8}),
        (Asked(), {"words": 6, "questions": 7, "query": 5, "value": 8}),
        (Gated(), {"words": 6, "gate": 7, "pairs": 5}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_groups_of_networks_by_hand(model: nn.Module, widths: dict[str, int]) -> None:
    model, x = model.double().eval(), torch.randint(WORDS, (3, LENGTH))
    groups = permutation_groups(architecture_graph(model, x))
    assert {group.name: group.width for group in groups} == widths
    random = np.random.default_rng(1)
    permuted = permute(model.state_dict(), groups, {group.index: random.permutation(group.width) for group in groups})
    with torch.no_grad():
        torch.testing.assert_close(resize(model, permuted)(x), model(x), rtol=1e-9, atol=1e-9)


def test_fixed_number_of_heads() -> None:
    x = torch.randint(WORDS, (3, LENGTH))
    with pytest.raises(UnsupportedArchitecture, match=r"Causal cannot have other widths: .*unflatten"):
        resizable_groups(Causal(2, 4), x)
    assert resizable_groups(Causal(-1, 4), x).widths == (6, 2)
    assert resizable_groups(Causal(2, 4), x, partly=True).widths == (6,)
