"""pFedHN against a plain computation."""

import numpy as np
import torch
from torch import nn

from fedhet.algorithms.hypernets.personal import PersonalHypernetwork

OWN = {"architectures": "mlp,cnn-1-1", "local_epochs": 1}


def test_round_is_a_step_of_adam(federate):
    one = federate("pfedhn", "one", rounds=1, **OWN)
    two = federate("pfedhn", "two", rounds=2, **OWN)
    assert one.failures == two.failures == []
    # The reference: the mean over clients of |theta_i(phi) - target_i|^2 / 2, whose gradient is the method's.
    hypernetwork = PersonalHypernetwork({}, one.config.seed, 1)
    shapes = {client: {name: a.shape for name, a in one.received[1, client]["model"].items()} for client in "012"}
    for client in "012":
        hypernetwork.write(client, shapes[client])
    optimizer = torch.optim.Adam(hypernetwork.tensors.values(), lr=0.01, weight_decay=0.001)
    for round in (1, 2):
        loss = torch.zeros(())
        for client in "012":
            written = hypernetwork.write(client, shapes[client])
            delta = two.sent[round, client]["delta"]
            for name, own in written.items():
                torch.testing.assert_close(torch.from_numpy(two.received[round, client]["model"][name]), own.detach())
                target = own.detach() + torch.from_numpy(delta[name])
                loss = loss + (own - target).square().sum() / 6
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hypernetwork.tensors.values(), 50.0)
        optimizer.step()
        state = (one, two)[round - 1].state
        assert state.hypernetwork.keys() == hypernetwork.tensors.keys()
        for name, own in hypernetwork.tensors.items():
            np.testing.assert_allclose(state.hypernetwork[name], own.detach(), rtol=1e-4, atol=1e-5)


def test_clients_send_changes(federate, phases):
    done = federate("pfedhn", clients=1, rounds=1, architectures="mlp")
    _, before, after = phases[0]
    delta = done.sent[1, "0"]["delta"]
    assert delta.keys() == before.keys()
    for name, change in delta.items():
        assert np.array_equal(done.received[1, "0"]["model"][name], before[name].numpy())
        np.testing.assert_allclose(change, (after[name] - before[name]).numpy(), atol=1e-7)
        assert np.abs(change).max() > 0


def test_no_generated_statistics(federate):
    done = federate("pfedhn", clients=2, rounds=1, architectures="flha-small-cnn-4", batch_norm="aggregate")
    assert not any("running" in name for name in done.received[1, "0"]["model"])
    assert "body.0.1.running_mean" in done.saved("0")


def test_embeddings_of_absent_and_late_clients(federate):
    settings = {"clients": 3, "rounds": 2, "architectures": "mlp"}
    done = federate("pfedhn", since={2: 2}, **settings)
    assert done.rows[1]["participants"] == ["0", "1"]
    assert {name for name in done.state.hypernetwork if name.startswith("embedding/")} == {
        f"embedding/{client}" for client in "012"
    }
    steps = {name: float(value) for name, value in done.state.moments.items() if name.endswith(":step")}
    assert steps["embedding/0:step"] == steps["head:step"] == 2
    assert steps["embedding/2:step"] == 1
    assert done.state.hypernetwork["embedding/2"].shape == done.state.hypernetwork["embedding/0"].shape


class Gains(nn.Module):
    """A network with a gain and a tiny layer scale of its own, a PReLU, and weights that start at 0.02."""

    def __init__(self):
        super().__init__()
        self.first, self.slope, self.head = nn.Linear(64, 16), nn.PReLU(16), nn.Linear(16, 10)
        self.gain, self.scale = nn.Parameter(torch.ones(16, 1)), nn.Parameter(torch.full((16,), 1e-6))
        nn.init.normal_(self.first.weight, std=0.002)

    def forward(self, inputs):
        values = self.first(inputs.flatten(1)) * self.gain[:, 0]
        return self.head(values + self.scale * self.slope(values))


def test_arrays_start_as_in_the_network(federate):
    done = federate("pfedhn", model=lambda info: Gains(), rounds=1)
    received = done.received[1, "0"]["model"]
    assert done.failures == []
    for name, (value, apart) in {"gain": (1, 0.4), "scale": (0, 0.04), "slope.weight": (0.25, 0.1)}.items():
        assert np.abs(received[name] - value).max() < apart
    assert 0.001 < received["first.weight"].std() < 0.004
    assert done.state.starts["0"].keys() == {"gain", "scale", "slope.weight", "first.weight"}
