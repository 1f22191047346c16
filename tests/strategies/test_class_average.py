"""Class-average against plain computations."""

import numpy as np
import pytest
import torch

import fedhet
from fedhet import config as configuration
from fedhet import population
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import LocalGrid


def test_each_class_of_the_output_layer_is_averaged_over_who_has_it(federate):
    deal = {"partition": "classes", "classes_per_client": 2, "samples_per_client": 20, "clients": 4, "rounds": 2}
    done = federate("class-average", fraction_train=0.75, **deal)
    assert done.failures == []
    clients = [client for number, client in done.sent if number == 2]
    assert len(clients) == 3
    labels = [population.data_of(done.info(client)).train.labels.numpy() for client in clients]
    counts = np.stack([np.bincount(own, minlength=10) for own in labels])
    held = counts.any(axis=0)
    assert 0 < held.sum() < 10  # rows of classes that nobody has are averaged by examples, as all other layers
    sent = [done.sent[2, client]["model"] for client in clients]
    for name, tensor in done.saved("global").items():
        stacked = np.stack([model[name].astype(np.float64) for model in sent])
        expected = np.average(stacked, axis=0, weights=counts.sum(axis=1))
        if name.startswith("head."):
            for c in np.flatnonzero(held):
                expected[c] = np.average(stacked[:, c], axis=0, weights=counts[:, c])
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-7)


def test_it_needs_one_class_an_example(tiny, watch, home):
    def many(client):
        (inputs, labels), test = tiny.data(client)
        return (inputs, torch.nn.functional.one_hot(labels, 3).float()), (test[0], torch.eye(3)[test[1]])

    strategy = fedhet.ClassAverage(rounds=1, observers=[watch])
    with pytest.raises(FedhetError, match="needs examples of one class each"):
        strategy.start(LocalGrid(tiny.app(data=many, task="multi-label"), 2))


def test_the_last_round_has_a_rate_of_its_own(federate, phases):
    own = {"class-average.last-learning-rate": 0.01}
    federate("class-average", "constant", rounds=3, clients=1, closing_epochs=1, **own)
    rates = [phase.optimisation.learning_rate for phase, *_ in phases]
    assert rates == [0.1, 0.1, 0.01, 0.01]
    phases.clear()
    federate("class-average", "cycle", rounds=2, clients=1, lr_schedule="one-cycle", **own)
    first, last = (phase.optimisation for phase, *_ in phases)
    assert first.schedule is not None
    assert (last.learning_rate, last.schedule) == (0.01, None)


@pytest.mark.parametrize("other", [{"aggregation": "krum"}, {"clip-norm": 2.0}])
def test_another_rule_is_refused(other):
    with pytest.raises(ConfigError, match="leave them out, or use fedavg"):
        configuration.resolve({"method": "class-average", **other})
