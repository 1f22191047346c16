"""The shared arrays of a network, and their keys."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedhet
from fedhet.errors import FedhetError
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


class Words(nn.Module):
    """A language model, whose head has the weight of the embedding (`tied`), and is the last of its `layers`, too."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.layers = nn.Sequential(self.embedding, self.head)

    def forward(self, ids):
        return self.layers(ids)


def test_a_head_with_two_names_is_not_sent_as_another_layer():
    of = NetworkDescription(Words(), "head", "words")
    assert names(HEAD, of) == {"head.weight": "head.weight"}
    assert {*names(BODY, of)} == {"embedding.weight", "layers.0.weight"}


@pytest.mark.parametrize("method", ["fedrep", "lg-fedavg"])
def test_a_head_tied_to_a_layer_is_not_shared_without_it(tmp_path, method):
    def data(client):
        ids = torch.arange(60).view(12, 5) % 7
        return dict.fromkeys(("train", "test"), (ids[:, :-1], ids[:, 1:]))

    settings = {"method": method, "clients": 2, "rounds": 1}
    with pytest.raises(FedhetError, match="embedding.weight and head.weight are one array.* give the head its own"):
        fedhet.run(settings, model=lambda: Words(tied=True), data=data, out=tmp_path / "tied", progress=False)
    done = fedhet.run(settings, model=lambda: Words(), data=data, out=tmp_path / "own", progress=False)
    assert done.summary["failures"] == 0


def test_key_of_a_head():
    first, other = network("2"), NetworkDescription(nn.ModuleDict({"fc": nn.Linear(3, 2)}), "fc", "large")
    assert names(HEAD, first) == {"2.weight": "head.weight", "2.bias": "head.bias"}
    assert names(HEAD, other) == {"fc.weight": "head.weight", "fc.bias": "head.bias"}


def test_similar_names_of_modules():
    of = NetworkDescription(nn.ModuleDict({"head": nn.Linear(1, 1), "head2": nn.Linear(1, 1)}), "head", "small")
    assert names(HEAD, of).keys() == {"head.weight", "head.bias"}
    assert names(BODY, of).keys() == {"head2.weight", "head2.bias"}
