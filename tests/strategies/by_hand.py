"""Tanh networks, losses and steps, for tests that compute a run by hand from the paper of a method."""

import numpy as np
import torch
from torch import nn

from fedhet.setup import client_setup

UNLIKE = {"rounds": 3, "momentum": 0.5, "partition": "classes", "classes_per_client": 4}
"""Settings of a short run of clients whose data differ."""

AT_ONCE = {"local_epochs": 3, "batch_size": 1000}
"""One batch an epoch, so that the order of examples is nobody's."""


THREE = UNLIKE | AT_ONCE | {"clients": 3, "learning_rate": 0.1, "samples_per_client": 24}
"""Settings of a run of three clients that have parts of one network."""

WHO = {"all": {}, "two": {"fraction_train": 0.6, "seed": 7, "halved_clients": 0.4}}
"""Who trains: all three clients; or all but 2, 0 and 1 in turn, where 2 keeps half of its examples."""


def rounds_of(done):
    """Who trained in each of three rounds: all three clients, or two others each time."""
    rounds = ["".join(client for client in "012" if (round, client) in done.received) for round in (1, 2, 3)]
    assert rounds == (["012"] * 3 if done.config.fraction_train == 1 else ["01", "12", "02"])
    return rounds


def tanh_network(width, outputs=10):
    """A network of float64 for digits, with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def own_width(client):
    """Every client's hidden layer is wider than that of the one before."""
    return 8 + int(client)


def own_network(client):
    """A client's network, from weights of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(client.partition_id)
        return tanh_network(own_width(client.partition_id))


def live(state):
    """A copy of a state with gradients."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in state.items()}


def hidden(state, inputs):
    """Outputs of the hidden layer."""
    return torch.tanh(inputs.flatten(1) @ state["1.weight"].T + state["1.bias"])


def head(state, representation):
    """Outputs of the last layer."""
    return representation @ state["3.weight"].T + state["3.bias"]


def logits(state, inputs):
    """Outputs of the network."""
    return head(state, hidden(state, inputs))


def divergence(learner, teacher):
    """KL(teacher || learner), written out."""
    wanted = teacher.detach().double().softmax(1)
    return (wanted * (wanted.log() - learner.log_softmax(1))).sum(1).mean()


def stepped(state, velocity, loss, rate=0.1):
    """A step of SGD with momentum on the loss's gradient, of a dictionary of weights in place."""
    gradients = torch.autograd.grad(loss, list(state.values()), retain_graph=True)
    for (name, weights), gradient in zip(state.items(), gradients, strict=True):
        velocity[name] = UNLIKE["momentum"] * velocity.get(name, 0.0) + gradient
        state[name] = (weights - rate * velocity[name]).detach().requires_grad_()


def examples_of(done, client):
    """A client's training examples: transformed inputs in float64, and labels."""
    part = client_setup.data_of(done.info(client)).train
    return client_setup.dataset_of(done.config).transform(part.inputs[:]).double(), part.labels


def mean_of(sent, weights):
    """The weighted mean of the clients' states."""
    names, total = next(iter(sent.values())), sum(weights[client] for client in sent)
    return {name: sum(weights[c] * sent[c][name].detach() for c in sent) / total for name in names}


def assert_equal(found, expected):
    """Nine digits of two states agree."""
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], torch.as_tensor(tensor).detach(), rtol=1e-9, atol=1e-9, err_msg=name)
