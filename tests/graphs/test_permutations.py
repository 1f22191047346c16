"""Permutation groups: what moves together, by comparing outputs on random networks, and by known structures."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.graphs import (
    PermutationGroups,
    Segment,
    UnsupportedArchitecture,
    architecture_graph,
    columns,
    cut_out,
    expand,
    permute,
    resize,
    rows,
    set_rows,
)
from fedhet.algorithms.graphs.blocks import block_ends
from fedhet.algorithms.graphs.permutations import permutation_groups
from fedhet.algorithms.graphs.states import widths

Random = np.random.Generator
TOKENS = 11


class Dense(nn.Module):
    """Concatenations, of hidden streams and of the input, BatchNorm and a residual addition over them, a flatten."""

    def __init__(self, random: Random):
        super().__init__()
        a, b, c = random.integers(1, 6, 3)
        self.one = nn.Conv2d(2, a, 3, padding=1)
        self.norm, self.two = nn.BatchNorm2d(a + 2), nn.Conv2d(a + 2, b, 3, padding=1)
        self.wide, self.three = nn.BatchNorm2d(a + b), nn.Conv2d(a + b, c, 3, padding=1)
        self.head = nn.Linear(16 * (2 * a + 2 * b + c), 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 2)
        one = self.one(x)
        two = self.two(F.relu(self.norm(torch.cat([one, x], 1))))
        both = self.wide(torch.cat([one, two], 1)).relu()
        three = self.three(both)
        return self.head(torch.flatten(torch.cat([both + torch.cat([one, two], 1), three, one, two], 1), 1))


class Text(nn.Module):
    def __init__(self, random: Random, bidirectional: bool = False):
        super().__init__()
        e, h = random.integers(1, 6, 2).tolist()
        self.embedding = nn.Embedding(TOKENS, e)
        self.lstm = nn.LSTM(e, h, 2, batch_first=True, bidirectional=bidirectional, dropout=0.1)
        self.decoder = nn.Linear(h * (1 + bidirectional), TOKENS)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        output, states = self.lstm(self.embedding(x))
        return self.decoder(output if self.lstm.bidirectional else output[:, -1]), states


class Tied(nn.Module):
    """A decoder that is the embedding, a layer that is run twice."""

    def __init__(self, random: Random):
        super().__init__()
        e = int(random.integers(2, 6))
        self.embedding, self.lstm = nn.Embedding(TOKENS, e), nn.LSTM(e, e, bias=False, batch_first=True)
        self.twice, self.decoder = nn.Linear(e, e), nn.Linear(e, TOKENS)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(self.embedding(x))[0].mean(1)
        return self.decoder(self.twice(torch.relu(self.twice(x))))


class Padded(nn.Module):
    """Channels last, padded by rows and columns but not by channels, as windows of Twins and Swin are."""

    def __init__(self, random: Random):
        super().__init__()
        a, b = random.integers(2, 6, 2).tolist()
        self.one, self.two, self.head = nn.Conv2d(2, a, 3), nn.Linear(a, b), nn.Linear(b, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.one(x).permute(0, 2, 3, 1), (0, 0, 0, 2, 1, 0))
        return self.head(self.two(x).relu().mean((1, 2)))


NETWORKS: dict[str, Callable[[Random], nn.Module]] = {
    "dense": Dense,
    "padded": Padded,
    "text": Text,
    "text-both-ways": lambda random: Text(random, bidirectional=True),
    "tied": Tied,
}


def build(name: str, seed: int) -> tuple[nn.Module, Tensor, np.random.Generator]:
    """A random float64 network, BatchNorm's numbers included, and a batch for it."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = NETWORKS[name](random).double().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    if name.startswith("tied") or "text" in name:
        return model, torch.randint(0, TOKENS, (3, 5)), random
    return model, torch.randn(3, 2, 8, 8, dtype=torch.float64), random


def output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result = model(x)
    return result if isinstance(result, Tensor) else result[0]


def groups_of(model: nn.Module, x: Tensor) -> PermutationGroups:
    return permutation_groups(architecture_graph(model, x))


def groups_along(groups: PermutationGroups, parameter: str, axis: int) -> list[tuple[int | None, int]]:
    """The group and the block of each run of a parameter's axis."""
    return [(segment.group, segment.block) for segment in groups.axes[parameter][axis]]


networks = pytest.mark.parametrize("name", NETWORKS)
SEEDS = range(2)


@networks
@pytest.mark.parametrize("seed", SEEDS)
def test_permuting_and_widening_keep_the_function(name: str, seed: int) -> None:
    model, x, random = build(name, seed)
    groups, state = groups_of(model, x), model.state_dict()
    permutations = {group.index: random.permutation(group.width) for group in groups}
    permuted = permute(state, groups, permutations)
    torch.testing.assert_close(output(resize(model, permuted), x), output(model, x), rtol=1e-9, atol=1e-9)

    sizes = {group.index: group.width + int(random.integers(0, 4)) for group in groups}
    assignments = {g.index: random.choice(sizes[g.index], g.width, replace=False) for g in groups}
    big = expand(state, groups, assignments, sizes)
    assert widths(big, groups) == tuple(sizes.values())
    assert {key: value.shape for key, value in big.items()} == groups.shapes(tuple(sizes.values()))
    torch.testing.assert_close(output(resize(model, big), x), output(model, x), rtol=1e-9, atol=1e-9)
    for key, value in cut_out(big, groups, assignments).items():
        np.testing.assert_array_equal(value, state[key].numpy())

    one_by_one = state
    for index in assignments:
        one_by_one = expand(one_by_one, groups, {index: assignments[index]}, {index: sizes[index]})
        assert output(resize(model, one_by_one), x).shape == output(model, x).shape
    for key, value in one_by_one.items():
        np.testing.assert_array_equal(value, big[key])


@networks
def test_rows_and_set_rows(name: str) -> None:
    model, x, random = build(name, 0)
    groups, state = groups_of(model, x), model.state_dict()
    for group in groups:
        matrix = rows(state, groups, group.index)
        assert matrix.shape == (group.width, len(columns(state, groups, group.index)))
        permutation = random.permutation(group.width)
        moved = permute(state, groups, {group.index: permutation})
        np.testing.assert_array_equal(rows(moved, groups, group.index)[permutation], matrix)
        for key, value in set_rows(moved, groups, group.index, matrix[np.argsort(permutation)]).items():
            np.testing.assert_array_equal(value, moved[key])
        new = random.normal(size=(group.width + 2, matrix.shape[1]))
        grown = expand(state, groups, {group.index: permutation}, {group.index: group.width + 2})
        np.testing.assert_array_equal(rows(set_rows(grown, groups, group.index, new), groups, group.index), new)


@networks
def test_each_parameter_is_settled_once(name: str) -> None:
    model, x, _ = build(name, 0)
    groups = groups_of(model, x)
    matched = {slot.parameter for group in groups for slot in group.rows}
    completed = [slot.parameter for group in groups for slot in group.completes]
    statistics, trained = {key for key in groups.axes if "running" in key}, {key for key, _ in model.named_parameters()}
    assert len(completed) == len(set(completed))
    assert matched.isdisjoint(completed)
    assert matched | set(completed) | set(groups.fixed) == trained | statistics
    assert not set(groups.fixed) & (matched | set(completed))


def test_groups_of_lenet() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(96, 10), nn.ReLU(), nn.Linear(10, 3),
    )  # fmt: skip
    groups = groups_of(model, torch.zeros(2, 1, 28, 28))
    assert [(group.name, group.width) for group in groups] == [("0", 4), ("3", 6), ("7", 10)]
    places = [(name, axis) for name, own in groups.axes.items() for axis in range(len(own))]
    assert [place for place in places if groups_along(groups, *place) == [(1, 16)]] == [("7.weight", 1)]
    assert groups.axes["7.weight"][1] == (Segment(1, 6, 16),)
    assert groups.fixed == ("9.weight", "9.bias")
    state = model.state_dict()
    expected = np.hstack([state["3.weight"].numpy().reshape(6, -1), state["3.bias"].numpy()[:, None]])
    np.testing.assert_array_equal(rows(state, groups, 1), expected)


def test_padding_keeps_the_axes_that_it_leaves() -> None:
    model, x, _ = build("padded", 0)
    assert [group.name for group in groups_of(model, x)] == ["one", "two"]


def test_rows_of_an_lstm() -> None:
    model, x, _ = build("text", 0)
    groups, state = groups_of(model, x), model.state_dict()
    assert [group.name for group in groups] == ["embedding", "lstm", "lstm"]
    w_ih, b_ih = state["lstm.weight_ih_l0"].numpy(), state["lstm.bias_ih_l0"].numpy()
    units = groups[1].width
    expected = np.hstack([w_ih[g * units : (g + 1) * units] for g in range(4)] + [b_ih.reshape(4, units).T])
    np.testing.assert_array_equal(rows(state, groups, 1), expected)
    np.testing.assert_array_equal(rows(state, groups, 0), state["embedding.weight"].numpy().T)
    assert {slot.parameter for slot in groups[1].completes} == {"lstm.weight_hh_l0", "lstm.bias_hh_l0"}


def test_adding_the_input_fixes_units() -> None:
    class AddsInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.head = nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.down(self.up(x).relu()))

    groups = groups_of(AddsInput(), torch.zeros(2, 3))
    assert [group.name for group in groups] == ["up"]
    assert groups.fixed == ("down.weight", "down.bias", "head.weight", "head.bias")


class Refused(nn.Module):
    def __init__(self, way: str):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 2)
        self.grouped = nn.Conv1d(9, 6, 1, groups=3) if way == "grouped" else nn.Identity()
        self.gru = nn.GRU(6, 6) if way == "state" else nn.Identity()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        inputs, x = x, self.one(x)
        match self.way:
            case "softmax":
                x = x.softmax(-1)
            case "grouped":  # three groups of three channels, which the six units do not fill
                x = self.grouped(torch.cat([inputs[:, :1], x, inputs[:, :2]], 1)[..., None])[..., 0]
            case "shuffle":
                x = x + x.view(x.size(0), 2, 3).transpose(1, 2).flatten(1)
            case "shift":
                x = F.pad(x, (1, -1))
            case "slice":
                x = torch.cat([x[:, 3:], x[:, :3]], 1)
            case "state":
                x = self.gru(x[None], x[None])[0][0]
        return self.two(x)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("softmax", "softmax"),
        ("grouped", r"conv1d of module 'grouped' takes 3 channels together"),
        ("shuffle", "combines axes with different orders of hidden units"),
        ("shift", "pad in the model's forward works along hidden units"),
        ("slice", "slice"),
        ("state", "an initial state that the network computes"),
    ],
)
def test_operators_that_divide_units(way: str, message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        groups_of(Refused(way), torch.zeros(2, 6))


def test_unsupported_layers() -> None:
    with pytest.raises(UnsupportedArchitecture, match="weight_norm"):
        groups_of(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), torch.zeros(2, 3))

    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight / 2, self.bias)

    with pytest.raises(
        UnsupportedArchitecture, match=r"weight of linear in '0' is computed \(by div\), not a parameter"
    ):
        groups_of(nn.Sequential(Halved(3, 4)), torch.zeros(2, 3))

    class Joined(nn.Linear):  # as in BEiT
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, torch.cat([self.bias[:2], self.bias[2:]]))

    with pytest.raises(
        UnsupportedArchitecture, match=r"bias of linear in '0' is computed \(by cat\), .* as in nn\.Linear"
    ):
        groups_of(nn.Sequential(Joined(3, 4), nn.Linear(4, 2)), torch.zeros(2, 3))

    class Projected(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    class Frozen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    with pytest.raises(UnsupportedArchitecture, match="no rule for operator .*set_grad_enabled"):
        groups_of(nn.Sequential(Frozen(3, 4), nn.Linear(4, 2)), torch.zeros(2, 3))
    with pytest.raises(UnsupportedArchitecture, match="proj_size to 0|cannot trace Projected"):  # PyTorch 2.7
        groups_of(Projected(3, 4, proj_size=2), torch.zeros(5, 2, 3))


def test_unused_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.auxiliary = nn.Linear(4, 2)
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    with pytest.raises(UnsupportedArchitecture, match=r"auxiliary\.weight"):
        groups_of(model, torch.zeros(2, 3))


@pytest.mark.parametrize("first", [lambda x: torch.empty(0), lambda x: x[:, :0], lambda x: x.new_zeros(len(x), 0)])
def test_an_empty_tensor_is_joined(first: Callable[[Tensor], Tensor]) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            values = self.body(inputs).relu()
            return self.head(torch.cat([first(values), values], 1))

    model, inputs = Joined(), torch.randn(3, 6)
    assert permutation_groups(architecture_graph(model, inputs)).widths == (8,)
    assert block_ends(model, inputs, 2) == ("body",)
