"""Test sets and test parts that the seed draws from all examples."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedhet import data
from fedhet.client.clients import Clients
from fedhet.config import configuration
from fedhet.data import ClientData, Examples
from fedhet.data.examples import Owners
from fedhet.errors import DataError
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo
from fedhet.setup.user_functions import data_function

CPU = torch.device("cpu")


def rows(*parts):
    """The examples of parts together, sorted, to compare them as multisets."""
    return sorted(map(tuple, torch.cat([part.inputs.flatten(1) for part in parts]).tolist()))


def labelled(*parts):
    """The images of parts with their labels, sorted."""
    pairs = (zip(part.inputs.flatten(1).tolist(), part.labels.tolist(), strict=True) for part in parts)
    return sorted((*image, label) for part in pairs for image, label in part)


def settings(**changes):
    return configuration.resolve({"method": "local", "clients": 4, "test-split": "drawn", **changes})


def test_test_sets_are_drawn_by_the_seed():
    digits = data.load("digits")
    drawn = [data.with_drawn_test_set(digits, seed) for seed in (0, 0, 1)]
    for each in drawn:
        assert (len(each.train), len(each.test)) == (1442, 355)
        assert rows(each.train, each.test) == rows(digits.train, digits.test)
        shares = torch.bincount(each.test.labels) / torch.bincount(torch.cat([each.train.labels, each.test.labels]))
        assert shares.sub(355 / 1797).abs().max() < 0.01
        assert labelled(each.train, each.test) == labelled(digits.train, digits.test)
    assert torch.equal(drawn[0].test.inputs, drawn[1].test.inputs)
    again = len({*rows(drawn[0].test)} & {*rows(drawn[2].test)})
    assert 40 < again < 110  # 70 of 355 by chance


def test_examples_that_belong_together_stay_together():
    rng, digits = np.random.default_rng(0), data.load("digits")
    patients = Owners(rng.integers(0, 200, len(digits.train)), rng.integers(200, 250, len(digits.test)))
    # The owner is written into the image, so that it can be read from where the image is drawn to.
    owned = [
        Examples(torch.from_numpy(numbers).view(-1, 1, 1, 1), part.labels)
        for part, numbers in zip((digits.train, digits.test), patients, strict=True)
    ]
    dataset = replace(digits, train=owned[0], test=owned[1], together=patients, groups=patients)
    drawn = data.with_drawn_test_set(dataset, 1)
    assert abs(len(drawn.test) - 355) < 30
    assert not {*drawn.train.inputs.flatten().tolist()} & {*drawn.test.inputs.flatten().tolist()}
    for part, together, groups in zip((drawn.train, drawn.test), drawn.together, drawn.groups, strict=True):
        assert part.inputs.flatten().tolist() == together.tolist() == groups.tolist()


def test_natural_clients_refuse_it():
    dataset = replace(data.load("digits"), groups=Owners(np.zeros(1442, int), np.zeros(355, int)))
    with pytest.raises(DataError, match="digits has natural clients with fixed test examples"):
        data.with_drawn_test_set(dataset, 0)


def test_drawn_parts_share_no_example():
    config = settings(method="fedhenn", **{"public-samples": 100})
    parts = [client_setup.data_of(ClientInfo(str(n), n, 4, config)) for n in range(4)]
    dataset, digits = client_setup.dataset_of(config), data.load("digits")
    everybody = [part for each in parts for part in (each.train, each.test)]
    assert rows(client_setup.public_dataset(config), *everybody) == rows(digits.train, digits.test)
    assert rows(*(each.test for each in parts)) == rows(dataset.test)


def test_test_share():
    digits = data.load("digits")
    dataset = client_setup.dataset_of(settings(**{"test-share": 0.25}))
    assert (len(dataset.train), len(dataset.test)) == (1348, 449)
    assert rows(dataset.train, dataset.test) == rows(digits.train, digits.test)
    config = settings(**{"test-share": 0.25, "samples-per-client": 30})
    parts = [client_setup.data_of(ClientInfo(str(number), number, 4, config)) for number in range(4)]
    assert [(len(part.train), len(part.test)) for part in parts] == [(30, 10)] * 4
    mine = ClientData(*(Examples(torch.arange(size).view(-1, 1), torch.zeros(size).long()) for size in (6, 6)))
    drawn = data.with_drawn_test_set(mine, 0, 0.25, client="0")
    assert (len(drawn.train), len(drawn.test)) == (9, 3)


def own(test):
    def function(client):
        number = client.partition_id
        return (100 * number + torch.arange(12.0).view(12, 1), torch.tensor([0, 1] * 6)), test(number)

    return function


def test_test_parts_of_own_data_are_drawn():
    function = own(lambda number: (100 * number + torch.arange(12.0, 16).view(4, 1), torch.tensor([0, 1] * 2)))
    clients = Clients(None, data_function(function), None)
    tested = []
    for number in range(3):
        info = ClientInfo(str(number), number, 3, settings(validation=0.25))
        drawn = clients._data_of(info, CPU)
        assert (len(drawn.train), len(drawn.validation), len(drawn.test)) == (9, 3, 4)
        assert drawn.test.labels.tolist().count(1) == 2
        mine = rows(drawn.train, drawn.validation, drawn.test)
        assert mine == [(100.0 * number + row,) for row in range(16)]
        tested.append([row - 100 * number for row in drawn.test.inputs.flatten().tolist()])
    assert [12, 13, 14, 15] not in tested
    assert len({*map(tuple, tested)}) == 3  # each client by itself


def test_parts_of_unlike_shapes_are_not_pooled():
    small, large = (Examples(torch.zeros(4, size), torch.zeros(4).long()) for size in (2, 3))
    with pytest.raises(DataError, match=r"in memory, of one shape and dtype.*client\.split_seed"):
        data.with_drawn_test_set(ClientData(small, large), 0, client="0")
    lazy = data_function(lambda client: ([(torch.zeros(2), 0)] * 4, (torch.zeros(4, 2), [0] * 4)))
    with pytest.raises(DataError, match="in memory"):
        data.with_drawn_test_set(lazy(ClientInfo("0", 0, 1, settings())), 0, client="0")
    without = ClientData(small, large.subset(torch.arange(0)))
    assert data.with_drawn_test_set(without, 0, client="0") is without
