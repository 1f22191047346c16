"""The client that a client side works with."""

from types import SimpleNamespace

import pytest
import torch

from fedhet.client import Client
from fedhet.config import configuration
from fedhet.messages import Request


def client_in(round, **settings):
    config = configuration.resolve({"method": "fedavg", **settings})
    whatever = SimpleNamespace(batch_size=None)
    return Client(
        name="3",
        config=config,
        request=Request(round=round),
        data=whatever,
        representation=whatever,
        architecture="",
        task=whatever,
        device=torch.device("cpu"),
        transform=lambda inputs: inputs / 2,
        augment=lambda inputs, generator: inputs + 1,
        store=whatever,
    )


def test_optimisation_of_a_round():
    settings = {"optimizer": "sgd", "momentum": 0.5, "weight-decay": 0.1, "batch-size": 7, "learning-rate": 0.2}
    settings["clip-gradients"] = 3.0
    found = client_in(2, rounds=4, **settings, **{"lr-schedule": "linear"}).optimisation()
    assert (found.optimizer, found.momentum, found.weight_decay, found.batch_size) == ("sgd", 0.5, 0.1, 7)
    assert found.clip_gradients == 3.0
    assert (found.learning_rate, found.schedule) == (pytest.approx(0.15), None)
    closing = client_in(5, rounds=4, **settings, **{"lr-schedule": "linear"}).optimisation()
    assert closing.learning_rate == pytest.approx(0.05), "the closing round has the last round's rate"


def test_one_cycle_over_phases_and_rounds():
    def cycle(round, *part):
        return client_in(round, rounds=5, **{"lr-schedule": "one-cycle", "learning-rate": 0.1}).optimisation(*part)

    assert cycle(1).learning_rate == cycle(1).schedule(0.0) == pytest.approx(0.1 / 25)
    assert cycle(5).schedule(1.0) == pytest.approx(0.1 / 100)
    assert max(cycle(2).schedule(part / 10) for part in range(11)) == pytest.approx(0.1)
    for round in range(1, 5):
        assert cycle(round).schedule(1.0) == pytest.approx(cycle(round + 1).schedule(0.0))
    first, second = cycle(3, 0, 2).schedule, cycle(3, 1, 2).schedule
    for done in (0.0, 0.5, 1.0):
        assert first(done) == pytest.approx(cycle(3).schedule(done / 2))
        assert second(done) == pytest.approx(cycle(3).schedule(0.5 + done / 2))
    # The closing round repeats the last one's.
    assert cycle(6).schedule(0.5) == cycle(5).schedule(0.5)
