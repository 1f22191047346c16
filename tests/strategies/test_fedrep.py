"""FedRep: heads of one's own on a body that is shared."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhet.errors import FedhetError
from fedhet.setup import client_setup
from fedhet.training import Evaluation


def test_head_then_body(federate, phases, changed):
    federate("fedrep", rounds=1, clients=1, local_epochs=5, architectures="resnet8", **{"fedrep.body-epochs": 2})
    (head, *first), (body, *then) = phases
    assert (head.epochs, body.epochs) == (3, 2)
    assert changed(*first) == {"head.weight", "head.bias"}
    assert changed(*then)
    assert not any(name.startswith("head.") for name in changed(*then))


def test_averaged_body_with_own_head_is_scored(federate, phases):
    done = federate("fedrep", clients=3)
    last = {phase: after for phase, (_, _, after) in enumerate(phases)}
    score, dataset = {}, client_setup.dataset_of(done.config)
    for number, client in enumerate("012"):
        # Clients train in order of name, each its head, then its body.
        trained, saved = last[len(phases) - 6 + 2 * number + 1], done.saved(client)
        for name, tensor in saved.items():
            own = trained[name].numpy() if name.startswith("head.") else done.state.model[name]
            assert np.array_equal(tensor.numpy(), own), name
        test = client_setup.data_of(done.info(client)).test
        score[client] = Evaluation(done.network(client), test, dataset.task, dataset.transform).result().value
    assert {row.client: row.accuracy for row in done.clients if row.round == 3} == pytest.approx(score)
    assert done.summary["personal"] == "received"
    assert done.summary["personal_accuracy"]["mean"] == pytest.approx(np.mean(list(score.values())))
    assert done.summary["trained_accuracy"] is not None


def test_closing_round_trains_heads(federate, phases, changed):
    settings = {"fraction_train": 0.4, "architectures": "resnet8", "rounds": 1, "samples_per_client": 20}
    before = federate("fedrep", "before", **settings)
    phases.clear()
    done = federate("fedrep", "closing", closing_epochs=3, **settings)
    # The one round of one client is two phases; then all of them train the head alone, for all epochs.
    closing = phases[2:]
    assert [phase.epochs for phase, _, _ in closing] == [3, 3, 3]
    for _, *tensors in closing:
        assert changed(*tensors) == {"head.weight", "head.bias"}
    assert done.state.model.keys() == before.state.model.keys()
    for name, array in done.state.model.items():
        assert np.array_equal(array, before.state.model[name])
    # An unchanged body does not travel back.
    assert done.rows[2]["participants"] == ["0", "1", "2"]
    assert done.rows[2]["bytes_up"] == 0
    for client in "012":
        saved = done.saved(client)
        assert all(np.array_equal(saved[name].numpy(), array) for name, array in done.state.model.items())
    own = [done.saved(client)["head.weight"] for client in "012"]
    assert not torch.equal(own[0], own[1])


def test_model_without_body_is_refused(federate):
    def model(client):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def data(client):
        return ((torch.zeros(8, 64), torch.zeros(8).long()),) * 2

    with pytest.raises(FedhetError, match="clients .*: a training phase has no parameters to train"):
        federate("fedrep", model=model, data=data)
