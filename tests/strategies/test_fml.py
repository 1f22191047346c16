"""FML, against a plain computation from its paper."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedhet.config import client_setup
from fedhet.models import registry as models
from tests.strategies.by_hand import AT_ONCE, UNLIKE, divergence, live, logits, own_network, stepped, tanh_network

SETTINGS = UNLIKE | AT_ONCE
ALPHA, BETA = 0.6, 0.3


@pytest.fixture
def double(monkeypatch, float64_travels):
    """Weights travel in float64, and a small network of that dtype has a name."""
    monkeypatch.setitem(models._BUILDERS, "small-float64", lambda input_shape, classes: tanh_network(5, classes))


def test_three_rounds_by_hand(federate, double):
    keys = {"fml.shared-model": "small-float64", "fml.alpha": ALPHA, "fml.beta": BETA}
    done = federate("fml", model=own_network, **{**SETTINGS, "wire_dtype": "float64", **keys})
    assert done.failures == []
    transform = client_setup.dataset_of(done.config).transform
    shared = {name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()}
    own = {client: live(own_network(done.info(client)).state_dict()) for client in "012"}
    for _ in range(3):
        sent, weights = {}, {}
        for client in "012":
            part = client_setup.data_of(done.info(client)).train
            inputs, labels = transform(part.inputs[:]).double(), part.labels
            small, mine = live(shared), own[client]
            velocities = {}, {}
            for _ in range(SETTINGS["local_epochs"]):
                theirs, ours = logits(small, inputs), logits(mine, inputs)
                loss = ALPHA * F.cross_entropy(ours, labels) + (1 - ALPHA) * divergence(ours, theirs)
                shared_loss = BETA * F.cross_entropy(theirs, labels) + (1 - BETA) * divergence(theirs, ours)
                stepped(mine, velocities[0], loss)
                stepped(small, velocities[1], shared_loss)
            sent[client], weights[client] = small, len(labels)
        total = sum(weights.values())
        shared = {name: sum(weights[c] * sent[c][name].detach() for c in "012") / total for name in shared}
    for name, tensor in shared.items():
        np.testing.assert_allclose(done.state.model[name], tensor.numpy(), rtol=1e-9, atol=1e-9, err_msg=name)
    for client in "012":
        saved = done.saved(client)
        for name, tensor in own[client].items():
            np.testing.assert_allclose(saved[name], tensor.detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=name)
