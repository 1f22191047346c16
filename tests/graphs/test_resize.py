"""Runnable models of other widths."""

import pytest
import torch
from torch import nn

from fedhet.algorithms.graphs import UnsupportedArchitecture, resize
from fedhet.algorithms.graphs.resize import HeadAttention, StackedRecurrent, resizable_groups


def test_size_attributes() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.PReLU(6))
    model[0].weight.requires_grad_(False)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: torch.ones(value.shape, dtype=torch.float64) for name, value in before.items()}
    state |= {"0.weight": torch.ones(5, 2, 3, 3), "0.bias": torch.ones(5), "1.weight": torch.ones(10, 1, 3, 3)}
    state |= {name: torch.ones(10) for name in before if name[0] in "23" and "num" not in name}
    state["1.bias"] = torch.ones(10)
    big = resize(model, state)
    assert big(torch.zeros(2, 2, 4, 4)).shape == (2, 10, 2, 2)
    assert (big[0].out_channels, big[1].in_channels, big[1].groups, big[1].out_channels) == (5, 5, 5, 10)
    assert (big[2].num_features, big[3].num_parameters) == (10, 10)
    assert big[0].weight.dtype == torch.float32
    assert not big[0].weight.requires_grad
    assert big[1].weight.requires_grad
    assert not big.training
    assert big[2].num_batches_tracked.dtype == torch.int64
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    model[1].weight = model[0].weight
    big = resize(model, {"0.weight": torch.ones(7, 6), "1.weight": torch.ones(7, 6), "1.bias": torch.ones(7)})
    assert big[0].weight is big[1].weight
    assert (big[0].embedding_dim, big[1].in_features) == (6, 6)


def test_unsupported_layers() -> None:
    bilinear = nn.Bilinear(2, 2, 3)
    with pytest.raises(UnsupportedArchitecture, match="Bilinear"):
        resize(bilinear, {"weight": torch.ones(4, 2, 2), "bias": torch.ones(4)})
    biased = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    state = {name: torch.cat([value, value]) for name, value in biased.state_dict().items()}
    with pytest.raises(UnsupportedArchitecture, match="add_bias_kv"):
        resize(biased, state)


def test_sizes_divided_with_a_remainder_do_not_fit() -> None:
    """A few units more would give heads of the same size, but fewer units do not."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begin, self.qkv, self.end, self.head = (nn.Linear(*each) for each in ((6, 8), (8, 24), (8, 8), (8, 3)))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            values = self.begin(tokens)
            n, count, width = values.shape
            q, k, v = self.qkv(values).view(n, count, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
            weights = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
            return self.head((values + self.end((weights @ v).transpose(1, 2).reshape(n, count, -1))).mean(1))

    with pytest.raises(UnsupportedArchitecture, match="its forward fails after module 'qkv'"):
        resizable_groups(Attention(), torch.randn(2, 5, 6), partly=True)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("batch_first", [True, False])
def test_head_attention_equals_pytorchs(heads: int, batch_first: bool) -> None:
    model = nn.MultiheadAttention(8, heads, batch_first=batch_first, dtype=torch.float64)
    x, state = torch.randn(3, 5, 8, dtype=torch.float64), model.state_dict()
    own = HeadAttention(model)
    halves = {name: value[: len(value) // 2] if "in_proj" in name else value for name, value in state.items()}
    few = resize(model, halves | {"out_proj.weight": state["out_proj.weight"][:, :4]})
    tokens = x.shape[1 if batch_first else 0]
    hidden = torch.rand(tokens, tokens) < 0.3
    hidden[:, 0] = False  # a row without any key is not a number
    absent = torch.zeros(x.shape[0 if batch_first else 1], tokens, dtype=torch.bool)
    absent[0, -1] = True
    added = torch.randn(tokens, tokens, dtype=torch.float64)
    for masks in ({}, {"attn_mask": hidden}, {"attn_mask": added}, {"key_padding_mask": absent}):
        expected, _ = model(x, x, x, **masks)
        torch.testing.assert_close(own(x, x, x, **masks)[0], expected)
        assert few(x, x, x, **masks)[0].shape == x.shape
    both, _ = model(x, x, x, key_padding_mask=absent, attn_mask=hidden)
    torch.testing.assert_close(own(x, x, x, key_padding_mask=absent, attn_mask=hidden)[0], both)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_stacked_recurrent_equals_pytorchs(kind: type[nn.RNNBase]) -> None:
    layer, x = kind(3, 4, 2, bidirectional=True), torch.randn(7, 2, 3)
    output, ends = layer(x)
    own, own_ends = StackedRecurrent(layer)(x)
    torch.testing.assert_close(own, output)
    for one, other in zip(own_ends, ends, strict=True):
        torch.testing.assert_close(torch.stack(one) if kind is nn.LSTM else one, other)
