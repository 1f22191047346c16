"""FedGen, against a plain computation from its paper."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.errors import FedhetError
from fedhet.setup import client_setup
from fedhet.strategies import fedgen
from fedhet.utils.randomness import seeded, torch_generator
from tests.strategies.by_hand import UNLIKE, WHO, assert_equal, live, rounds_of, stepped

WEIGHT, DIVERSITY, RATE, STEPS, BATCH = 0.7, 0.4, 0.01, 3, 12
SETTINGS = UNLIKE | {"batch_size": BATCH}
KEYS = {"weight": WEIGHT, "diversity": DIVERSITY, "server-learning-rate": RATE, "server-steps": STEPS}


def own_network(client):
    """Tanh networks that are as wide as the client's number says, with six features."""
    with torch.random.fork_rng():
        torch.manual_seed(client.partition_id)
        width = 8 + client.partition_id
        body = nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 6), nn.Tanh()
        return nn.Sequential(*body, nn.Linear(6, 10)).double()


def features(state, inputs):
    for layer in ("1", "3"):
        inputs = torch.tanh(inputs.flatten(1) @ state[f"{layer}.weight"].T + state[f"{layer}.bias"])
    return inputs


def drawn(counts, rows, stream):
    """Classes, and noise with the classes as vectors beside it."""
    classes = torch.multinomial(counts, rows, replacement=True, generator=stream)
    noise = torch.rand(rows, 32, generator=stream, dtype=torch.float64)
    return classes, noise, torch.cat([noise, F.one_hot(classes, 10)], 1)


def generated(weights, inputs, mean, variance):
    """The generator, with these statistics of its BatchNorm."""
    hidden = inputs @ weights["hidden.weight"].T + weights["hidden.bias"]
    hidden = (hidden - mean) / (variance + 1e-5).sqrt() * weights["norm.weight"] + weights["norm.bias"]
    return hidden.clamp(min=0) @ weights["output.weight"].T + weights["output.bias"]


def server_trained(done, round, weights, statistics, counts, head):
    """Adam, from a state of its own in every round."""
    classes, noise, inputs = drawn(counts, STEPS * BATCH, torch_generator(done.config.seed, "noise", round))
    order = torch_generator(done.config.seed, "server", round)
    optimizer = torch.optim.Adam(weights.values(), RATE)
    for rows in torch.randperm(len(classes), generator=order).split(BATCH):
        hidden = inputs[rows] @ weights["hidden.weight"].T + weights["hidden.bias"]
        mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
        outputs = generated(weights, inputs[rows], mean, variance)
        apart = (noise[rows][:, None] - noise[rows]).square().mean(2) * (outputs[:, None] - outputs).abs().mean(2)
        loss = F.cross_entropy(outputs @ head["weight"].T + head["bias"], classes[rows])
        loss = loss + DIVERSITY * (-apart).mean().exp()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        statistics["mean"] = 0.9 * statistics["mean"] + 0.1 * mean.detach()
        statistics["variance"] = 0.9 * statistics["variance"] + 0.1 * variance.detach() * BATCH / (BATCH - 1)


def client_trained(done, client, round, state, generator, counts):
    part, transform = client_setup.data_of(done.info(client)).train, client_setup.dataset_of(done.config).transform
    inputs, labels = transform(part.inputs[:]).double(), part.labels
    order, velocity, number = torch_generator(done.config.seed, "batches", client, round), {}, 0
    for _ in range(done.config.local_epochs):
        for rows in torch.randperm(len(labels), generator=order).split(done.config.batch_size):
            loss = F.cross_entropy(features(state, inputs[rows]) @ state["5.weight"].T + state["5.bias"], labels[rows])
            if generator:
                stream = torch_generator(done.config.seed, "generated", number, client, round)
                classes, _, drawn_inputs = drawn(counts, len(rows), stream)
                made = generator(drawn_inputs).detach()
                loss = loss + WEIGHT * F.cross_entropy(made @ state["5.weight"].T + state["5.bias"], classes)
            number += 1
            stepped(state, velocity, loss)
    return len(labels)


@pytest.mark.parametrize("who", WHO)
def test_three_rounds_by_hand(federate, who):
    keys = {f"fedgen.{name}": value for name, value in KEYS.items()}
    done = federate("fedgen", model=own_network, **SETTINGS, **keys, **WHO[who])
    assert done.failures == []
    own = {client: live(own_network(done.info(client)).state_dict()) for client in "012"}
    labels = torch.cat([client_setup.data_of(done.info(client)).train.labels for client in own])
    counts = torch.bincount(labels, minlength=10).double()
    with seeded(done.config.seed, "initial weights", "server"):
        hidden, output = nn.Linear(42, 256), nn.Linear(256, 6)
    ones, zeros = torch.ones(256, dtype=torch.float64), torch.zeros(256, dtype=torch.float64)
    weights = live(
        {"hidden.weight": hidden.weight.double(), "hidden.bias": hidden.bias.double()}
        | {"norm.weight": ones, "norm.bias": zeros}
        | {"output.weight": output.weight.double(), "output.bias": output.bias.double()}
    )
    statistics, generator = {"mean": zeros, "variance": ones}, None
    head = {name: torch.from_numpy(done.received[1, "0"]["model"][f"head.{name}"]) for name in ("weight", "bias")}
    for round, present in enumerate(rounds_of(done), 1):
        examples = {}
        for client in present:
            own[client] |= live({f"5.{name}": tensor for name, tensor in head.items()})
            examples[client] = client_trained(done, client, round, own[client], generator, counts)
        total = sum(examples.values())
        for name in head:
            head[name] = sum(count * own[client][f"5.{name}"].detach() for client, count in examples.items()) / total
        server_trained(done, round, weights, statistics, counts, head)
        generator = lambda inputs: generated(weights, inputs, *statistics.values())  # noqa: E731
    for client, state in own.items():
        assert_equal(done.saved(client), state)
    expected = {**weights, "norm.running_mean": statistics["mean"], "norm.running_var": statistics["variance"]}
    for name, tensor in expected.items():
        found = done.state.generator[name]
        np.testing.assert_allclose(found, tensor.detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=name)
    assert set(done.received[1, "0"]) == {"model"}
    assert done.received[2, "1"]["classes"]["counts"].tolist() == counts.tolist()


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 10), nn.Linear(64, 10)
        self.head.weight = self.first.weight

    def forward(self, inputs):
        return self.head(inputs.flatten(1))


def test_a_head_with_a_tied_weight(federate):
    with pytest.raises(FedhetError, match="first.weight and head.weight are one array, but the method shares"):
        federate("fedgen", model=lambda client: TiedHead(), rounds=2)


def test_a_step_of_the_generator_has_few_examples_however_large_batches_are(federate, monkeypatch):
    sizes, loss = [], fedgen.alike
    monkeypatch.setattr(fedgen, "MOST", 7)
    monkeypatch.setattr(fedgen, "alike", lambda noise, outputs: sizes.append(len(noise)) or loss(noise, outputs))
    federate("fedgen", model=own_network, **SETTINGS, **{"fedgen.server-steps": STEPS})
    assert set(sizes) == {7}
