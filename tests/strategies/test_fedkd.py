"""FedKD, against a plain computation from its paper."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.config import client_setup
from fedhet.methods.included import distillation
from fedhet.models import registry as models
from fedhet.utils.randomness import derive_seed, seed_everything
from tests.strategies.by_hand import (
    AT_ONCE,
    UNLIKE,
    WHO,
    divergence,
    head,
    hidden,
    live,
    own_network,
    own_width,
    rounds_of,
    stepped,
    tanh_network,
)

SETTINGS = UNLIKE | AT_ONCE
KEYS = {"fedkd.shared-model": "small-float64"}


def projector(width, seed):
    """A client's first projector."""
    with torch.random.fork_rng():
        seed_everything(derive_seed(seed, "projector", "all"))
        return dict(nn.Linear(12, width, bias=False, dtype=torch.float64).state_dict())


def truncated(matrix, energy):
    """The best approximation with that part of the sum of squares; by eigenvectors, not by a decomposition."""
    if matrix.ndim < 2:
        return matrix
    values, vectors = np.linalg.eigh(matrix @ matrix.T)
    values, vectors = values[::-1], vectors[:, ::-1]
    rank = next(k for k in range(1, len(values) + 1) if values[:k].sum() >= energy * values.sum() * (1 - 1e-12))
    if rank * sum(matrix.shape) >= matrix.size:
        return matrix
    return vectors[:, :rank] @ vectors[:, :rank].T @ matrix


def as_arrays(state):
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


@pytest.fixture
def double(monkeypatch, float64_travels):
    """Weights travel in float64, and a small network of that dtype has a name."""
    monkeypatch.setitem(models._BUILDERS, "small-float64", lambda input_shape, classes: tanh_network(12, classes))


@pytest.mark.parametrize("who", WHO)
def test_three_rounds_by_hand(federate, double, who, monkeypatch):
    monkeypatch.setattr(distillation, "FIRST", 0.6)
    monkeypatch.setattr(distillation, "LAST", 0.9)
    done = federate("fedkd", model=own_network, **SETTINGS, wire_dtype="float64", **KEYS, **WHO[who])
    assert done.failures == []
    transform = client_setup.dataset_of(done.config).transform
    shared = done.received[1, "0"]["model"]
    mine = {client: live(own_network(done.info(client)).state_dict()) for client in "012"}
    joined = {client: live(projector(own_width(client), done.config.seed)) for client in "012"}
    for round, present in enumerate(rounds_of(done), 1):
        energy = 0.6 + round / 3 * 0.3
        changes, weights = {}, {}
        for client in present:
            part = client_setup.data_of(done.info(client)).train
            inputs, labels = transform(part.inputs[:]).double(), part.labels
            states = live({name: torch.from_numpy(each) for name, each in shared.items()}), mine[client], joined[client]
            velocities = {}, {}, {}
            for _ in range(SETTINGS["local_epochs"]):
                small, network, project = states
                theirs, ours = hidden(small, inputs), hidden(network, inputs)
                outputs, small_outputs = head(network, ours), head(small, theirs)
                loss, small_loss = F.cross_entropy(outputs, labels), F.cross_entropy(small_outputs, labels)
                both = (loss + small_loss).item()
                apart = (theirs @ project["weight"].T - ours).square().mean() / both
                losses = (
                    small_loss + divergence(small_outputs, outputs) / both + apart,
                    loss + divergence(outputs, small_outputs) / both + apart,
                    apart,
                )
                for each in zip(states, velocities, losses, strict=True):
                    stepped(*each)
            after = as_arrays(states[0])
            changes[client] = {name: truncated(after[name] - shared[name], energy) for name in shared}
            weights[client] = len(labels)
        total = sum(weights.values())
        for name, before in shared.items():
            mean = sum(weights[client] * changes[client][name] for client in present) / total
            shared = shared | {name: before + truncated(mean, energy)}
    for name, array in shared.items():
        np.testing.assert_allclose(done.state.model[name], array, rtol=1e-9, atol=1e-9, err_msg=name)
    for client in "012":
        saved = done.saved(client)
        for name, array in as_arrays(mine[client]).items():
            np.testing.assert_allclose(saved[name], array, rtol=1e-9, atol=1e-9, err_msg=name)


def test_changes_and_whole_networks_are_sent(federate):
    done = federate("fedkd", **{**SETTINGS, "fraction_train": 0.6, "fedkd.shared-model": "mlp-20"})
    assert done.failures == []
    whole = models.build("mlp-20", (1, 8, 8), 10).state_dict()
    narrow = {"body.1.weight:left", "body.1.weight:right"}
    for (round, client), arrays in done.received.items():
        trained_before = (round - 1, client) in done.received
        assert narrow <= arrays["model"].keys() if trained_before else arrays["model"].keys() == whole.keys()
    assert all(narrow <= arrays["update"].keys() for arrays in done.sent.values())
