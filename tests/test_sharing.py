"""The shared arrays of a network, and their keys."""

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
