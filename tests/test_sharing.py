"""The shared arrays of a network, and their keys."""

import itertools
from dataclasses import replace

import pytest
from torch import nn

from fedhet.methods.sharing import (
    BODY,
    BY_FIRST_LAYERS,
    BY_TYPE_AND_ORDER,
    EVERYTHING,
    HEAD,
    NOTHING,
    WITHIN_ARCHITECTURES,
    NetworkDescription,
)

STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
OWN = {"0.weight", "0.bias", "1.weight", "1.bias"}
LAST = {"2.weight", "2.bias"}


def network(head="2", architecture="small"):
    return NetworkDescription(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), head, architecture)


def names(sharing, of, *, statistics=True):
    return sharing.names(of, of.model.state_dict(), statistics=statistics)


@pytest.mark.parametrize(
    ("sharing", "statistics", "shared"),
    [
        (EVERYTHING, True, {*OWN, *STATISTICS, *LAST}),
        (EVERYTHING, False, {*OWN, *LAST}),
        (BODY, True, {*OWN, *STATISTICS}),
        (BODY, False, OWN),
        (HEAD, True, LAST),
        (NOTHING, True, set()),
        (WITHIN_ARCHITECTURES, False, {*OWN, *LAST}),
        (BY_TYPE_AND_ORDER, False, {*OWN, *LAST}),
        (BY_FIRST_LAYERS, False, {*OWN, *LAST}),
        (replace(EVERYTHING, statistics="always"), False, {*OWN, *STATISTICS, *LAST}),
        (replace(BODY, statistics="always"), False, {*OWN, *STATISTICS}),
    ],
)
def test_shared_arrays(sharing, statistics, shared):
    of = network()
    found = names(sharing, of, statistics=statistics)
    assert found.keys() == shared
    assert list(found) == [name for name in of.model.state_dict() if name in shared], "in the model's order"
    assert len(set(found.values())) == len(found), "no two arrays of one network go by one key"


def test_key_of_a_head():
    first, other = network("2"), NetworkDescription(nn.ModuleDict({"fc": nn.Linear(3, 2)}), "fc", "large")
    assert names(HEAD, first) == {"2.weight": "head.weight", "2.bias": "head.bias"}
    assert names(HEAD, other) == {"fc.weight": "head.weight", "fc.bias": "head.bias"}


def test_similar_names_of_modules():
    of = NetworkDescription(nn.ModuleDict({"head": nn.Linear(1, 1), "head2": nn.Linear(1, 1)}), "head", "small")
    assert names(HEAD, of).keys() == {"head.weight", "head.bias"}
    assert names(BODY, of).keys() == {"head2.weight", "head2.bias"}


def convolutions():
    """Two convolutions alike, one of another stride, and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, stride=2), nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(12, 2)
    )


def test_keys_by_kind_and_order():
    one = NetworkDescription(convolutions(), "4", "one")
    inner = nn.ModuleDict({"a": nn.Conv2d(3, 3, 3), "b": nn.Conv2d(3, 3, 3), "c": nn.Conv2d(3, 3, 3)})
    other = NetworkDescription(nn.ModuleDict({"inner": inner, "out": nn.Linear(10, 2)}), "out", "other")
    mine, theirs = names(BY_TYPE_AND_ORDER, one), names(BY_TYPE_AND_ORDER, other)
    for name, its in (("0", "inner.a"), ("2", "inner.b")):
        for part in ("weight", "bias"):
            assert mine[f"{name}.{part}"] == theirs[f"{its}.{part}"]
    # The third of its kind has no partner, nor have those of another stride or width.
    alone = {mine["1.weight"], mine["4.weight"], theirs["inner.c.weight"], theirs["out.weight"]}
    assert len(alone) == 4
    assert alone & set(mine.values()) & set(theirs.values()) == set()


def test_keys_by_first_layers():
    def made(*widths):
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        return NetworkDescription(nn.Sequential(*layers), str(len(layers) - 1), "any")

    one, other, third = (names(BY_FIRST_LAYERS, made(*widths)) for widths in ((4, 4, 4, 2), (4, 4, 2), (3, 4, 4, 4, 2)))
    assert one["0.weight"] == other["0.weight"]
    assert one["2.weight"] != other["1.weight"], "the same kind, behind other layers"
    assert not set(third.values()) & {*one.values(), *other.values()}
    assert len(set(one.values()) & set(other.values())) == 2
