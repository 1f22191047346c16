"""The validation part of a client's training data."""

from dataclasses import replace

import numpy as np
import torch

from fedhet.config import configuration
from fedhet.data import ClientData, Examples, PublicDataset, with_drawn_test_set, with_validation
from fedhet.methods.options import Config, Options
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo


def own(labels, **parts):
    labels = torch.as_tensor(labels)
    train = Examples(torch.arange(len(labels)), labels)
    return ClientData(train, Examples(torch.arange(3) + 1000, torch.zeros(3).long()), **parts)


def test_no_example_is_in_both_parts_and_none_is_lost():
    data = own([0, 1] * 10)
    apart = with_validation(data, 0.25, 3, "7")
    assert (len(apart.train), len(apart.validation)) == (15, 5)
    assert sorted(torch.cat([apart.train.inputs, apart.validation.inputs]).tolist()) == list(range(20))
    assert torch.equal(apart.validation.labels, data.train.labels[apart.validation.inputs])
    assert apart.test is data.test


def test_classes_have_their_share():
    apart = with_validation(own([0] * 40 + [1] * 20 + [2] * 10), 0.2, 0, "0")
    assert torch.bincount(apart.validation.labels).tolist() == [8, 4, 2]


def test_chance_decides_between_small_classes():
    seen = {label for seed in range(40) for label in with_validation(own(range(10)), 0.2, seed, "0").validation.labels}
    assert {int(label) for label in seen} == set(range(10))


def test_at_least_one_example_is_in_each_part():
    assert [len(with_validation(own([0] * n), 0.1, 0, "0").validation) for n in (2, 3, 10, 20)] == [1, 1, 1, 2]
    assert len(with_validation(own([0] * 2), 0.99, 0, "0").train) == 1
    assert len(with_validation(own(torch.zeros(10, 3).long()), 0.2, 0, "0").validation) == 2, "of several labels"
    with_one = own([0, 1, 2], validation=Examples(torch.ones(1), torch.ones(1).long()))
    for data, share in ((own([1]), 0.5), (own([0, 1]), 0.0), (with_one, 0.5)):
        assert with_validation(data, share, 0, "0") is data


def test_validation_and_test_examples_have_labels():
    labels = [-1, 0, 1, -1, 1, 0, -1, -1, 0, 1, -1]
    apart = with_validation(own(labels), 0.34, 3, "7", all_labelled=False)
    assert (len(apart.train), len(apart.validation)) == (9, 2)
    assert sorted(torch.cat([apart.train.inputs, apart.validation.inputs]).tolist()) == list(range(11))
    assert sorted(apart.validation.labels.tolist()) == [0, 1]
    drawn = with_drawn_test_set(own(labels), 0, 0.34, client="0", all_labelled=False)
    assert len(drawn.test) == 3
    assert drawn.test.labels.min() >= 0
    assert with_validation(own([-1, -1, 1]), 0.5, 0, "0", all_labelled=False).validation is None


def test_owners_of_validation_examples_have_no_others():
    owners = np.array([0, 0, 1, 1, 2, 2])
    apart = with_validation(own([0, -1, 1, -1, 0, -1]), 0.3, 0, "0", owners=owners, all_labelled=False)
    (row,) = apart.validation.inputs.tolist()
    assert owners[row] not in owners[apart.train.inputs]
    assert len(apart.train) == 4


def test_seed_and_name_decide():
    drawn = {
        (seed, client): tuple(with_validation(own([0] * 50), 0.2, seed, client).validation.inputs.tolist())
        for seed in (0, 1)
        for client in ("0", "1")
    }
    assert len(set(drawn.values())) == 4
    assert drawn[0, "0"] == tuple(with_validation(own([0] * 50), 0.2, 0, "0").validation.inputs.tolist())


def test_validation_parts_come_from_training_parts_only():
    plain = configuration.resolve({"method": "fedhenn", "public-samples": 50, "clients": 3, "samples-per-client": 20})
    apart = plain.replace(validation=0.2)
    assert client_setup.public_dataset(apart).digest == client_setup.public_dataset(plain).digest
    for number in range(3):
        whole, rest = (client_setup.data_of(ClientInfo(str(number), number, 3, each)) for each in (plain, apart))
        assert torch.equal(whole.test.inputs, rest.test.inputs)
        assert whole.validation is None
        assert (len(whole.train), len(rest.train), len(rest.validation)) == (20, 16, 4)
        together = torch.cat([rest.train.inputs, rest.validation.inputs]).flatten(1)
        assert sorted(together.tolist()) == sorted(whole.train.inputs.flatten(1).tolist())
    union = torch.cat([client_setup.data_of(ClientInfo(str(n), n, 3, apart)).train.inputs for n in range(3)])
    of_all = apart.replace(options=replace(apart.options, rad_source="train-union"))
    assert client_setup.public_dataset(of_all).digest == PublicDataset(union).digest


def test_common_validation_examples():
    """Clients of two classes each validate on all ten, on the same images, and keep all of their own."""
    settings = {"partition": "classes", "samples_per_client": 30, "public_samples": 100, "validation": 0.2}
    config = own_validation = Config(clients=6, options=Options(), **settings)
    own = [client_setup.data_of(ClientInfo(str(n), n, 6, config)) for n in range(6)]
    config = Config(clients=6, validation_on="common", options=Options(), **settings)
    data = [client_setup.data_of(ClientInfo(str(n), n, 6, config)) for n in range(6)]
    assert [len(each.train) for each in own] == [24] * 6
    assert [len(each.train) for each in data] == [30] * 6
    common = data[0].validation
    assert all(each.validation is common for each in data)
    assert len(common) == 36  # a fifth of what the clients keep
    assert common.labels.unique().tolist() == list(range(10))
    public = client_setup.public_dataset(config)
    rows = [each.flatten(1) for each in (common.inputs, public.inputs, *(one.train.inputs for one in data))]
    assert len(torch.cat(rows).unique(dim=0)) == len(torch.cat([torch.unique(each, dim=0) for each in rows]))
    assert torch.equal(client_setup.public_dataset(own_validation).inputs, public.inputs)
