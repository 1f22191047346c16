"""FedMD against a plain loop: what is fitted in which order, what is told, and whose mean it is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedhet.algorithms.alignment import targets
from fedhet.errors import FedhetError
from fedhet.setup import client_setup
from fedhet.strategies.fedmd import Keys as FedMDKeys
from fedhet.utils.randomness import derive_seed, seed_everything, torch_generator

SMALL = {
    **{"optimizer": "sgd", "public_samples": 48, "fedmd.public-epochs": 1, "fedmd.private-epochs": 3},
    "fedmd.public-batch": 20,
}
UNLABELLED = {**SMALL, "fedmd.public-epochs": 0}


@pytest.fixture
def exact(monkeypatch):
    monkeypatch.setitem(targets.DTYPES, "values", "float32")


def rows_of(arrays):
    return torch.from_numpy(np.array(arrays["rows"])).long()


def plain_rounds(done, rounds):
    """Everything written out: what each client's network is after so many rounds."""
    config, own, public = done.config, done.config.options, client_setup.public_dataset(done.config)
    transform = client_setup.dataset_of(config).transform
    networks, mean, last = {}, None, None
    for round in range(1, rounds + 1):
        rows = rows_of(done.received[round, "0"]["next-rows"]) if round < rounds else None
        told = []
        for name in "012":
            train = client_setup.data_of(done.info(name)).train
            fresh = name not in networks
            if fresh:
                seed_everything(derive_seed(config.seed, "initial weights", name))
                networks[name] = client_setup.model_of(done.info(name))
            network, order = networks[name], torch_generator(config.seed, "batches", name, round)

            def fit(inputs, wanted, epochs, batch, loss, network=network, order=order):
                optimizer = torch.optim.SGD(network.parameters(), lr=config.learning_rate)
                for _ in range(epochs):
                    for index in torch.randperm(len(inputs), generator=order).split(batch):
                        optimizer.zero_grad()
                        loss(network(transform(inputs[index])), wanted[index]).backward()
                        optimizer.step()

            def match(outputs, wanted):
                return (outputs - wanted).abs().mean()

            if fresh and own.public_epochs:
                fit(public.inputs, public.labels, own.public_epochs, own.public_batch, F.cross_entropy)
            if mean is not None:
                fit(public.inputs[last], mean, own.digest_epochs, own.public_batch, match)
            epochs = own.private_epochs if fresh else config.local_epochs
            fit(train.inputs, train.labels, epochs, config.batch_size, F.cross_entropy)
            if rows is not None:
                with torch.no_grad():
                    told.append(network(transform(public.inputs[rows])))
        if rows is not None:
            mean, last = sum(told) / 3, rows
    return networks


@pytest.mark.parametrize(
    ("settings", "subset"), [(SMALL, 5000), (UNLABELLED, 5000), (UNLABELLED, 30)], ids=["labelled", "unlabelled", "30"]
)
@pytest.mark.usefixtures("exact")
def test_three_rounds_by_hand(federate, settings, subset, monkeypatch):
    monkeypatch.setattr(FedMDKeys, "subset", subset)
    few = {"partition": "classes", "classes_per_client": 4, "rounds": 3}
    done = federate("fedmd", **few, **settings)
    assert done.failures == []
    for name, network in plain_rounds(done, 3).items():
        for key, tensor in network.state_dict().items():
            torch.testing.assert_close(done.saved(name)[key], tensor, rtol=0, atol=1e-5)


def test_arrays_of_each_round(federate):
    done = federate("fedmd", rounds=3, **SMALL)
    groups = [set(done.received[round, "0"]) for round in (1, 2, 3)]
    assert groups == [{"next-rows"}, {"rows", "mean", "next-rows"}, {"rows", "mean"}]
    assert [set(done.sent[round, "0"]) for round in (1, 2, 3)] == [{"scores"}, {"scores"}, set()]
    assert np.array_equal(done.received[2, "0"]["rows"]["rows"], done.received[1, "0"]["next-rows"]["rows"])
    closed = federate("fedmd", "closed", rounds=2, closing_epochs=1, **SMALL)
    assert set(closed.received[3, "0"]) == {"rows", "mean"}
    assert set(closed.sent[2, "0"]) == {"scores"}


def test_labelled_public_dataset_is_required(federate):
    with pytest.raises(FedhetError, match="no labelled public dataset, but .* no labels, set fedmd.public-epochs = 0"):
        federate("fedmd", rounds=1, **{**SMALL, "public_samples": 0})
