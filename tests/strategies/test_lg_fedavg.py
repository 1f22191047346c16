"""LG-FedAvg: a head that is shared, on bodies of one's own of whatever architecture."""

import numpy as np
import torch
from torch import nn

from fedhet.data import load

WIDTH = 12


class Plain(nn.Module):
    """Its head is `classifier`."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU())
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, images):
        return self.classifier(self.features(images))


class Deep(nn.Module):
    """Its head is `out.last`."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.one, self.two = nn.Linear(64, 20), nn.Linear(20, width)
        self.out = nn.ModuleDict({"last": nn.Linear(width, 10)})

    def forward(self, images):
        return self.out["last"](self.two(self.one(images.flatten(1)).relu()).relu())


HEADS = {"0": "classifier", "1": "out.last", "2": "classifier"}


def unlike(client):
    return Deep() if client.name == "1" else Plain()


def data_of(client):
    digits, count = load("digits", None), 20 + 10 * int(client.name)
    inputs, labels = digits.train.inputs.float() / 16, digits.train.labels
    return (inputs[:count], labels[:count]), (inputs[-20:], labels[-20:])


def head_of(tensors, client):
    return {kind: tensors[f"{HEADS[client]}.{kind}"] for kind in ("weight", "bias")}


def test_heads_of_any_name_are_averaged_and_bodies_stay(federate, phases):
    done = federate("lg-fedavg", model=unlike, data=data_of)
    assert done.failures == []
    trained = {client: head_of(after, client) for client, (*_, after) in zip("012", phases[:3], strict=True)}
    started = {client: head_of(before, client) for client, (_, before, _) in zip("012", phases[3:], strict=True)}
    for kind in ("weight", "bias"):
        own = [trained[client][kind].double().numpy() for client in "012"]
        assert not np.array_equal(own[0], own[1])
        expected = np.average(own, axis=0, weights=[20, 30, 40])
        for client in "012":
            assert torch.equal(started[client][kind], started["0"][kind])
            np.testing.assert_allclose(started[client][kind].numpy(), expected, rtol=1e-5, atol=1e-7)
    head = 4 * (10 * WIDTH + 10)
    for arrays in (*done.sent.values(), *done.received.values()):
        assert arrays.keys() == {"model"}
        assert sum(array.nbytes for array in arrays["model"].values()) == head
    assert [(row["bytes_up"], row["bytes_down"]) for row in done.rows[1:3]] == [(3 * head, 3 * head)] * 2
    assert done.rows[0]["bytes_up"] <= 3 * head  # of three clients, from one of which all start
    # Each body goes on from where its own client left it.
    for client, (*_, after), (_, before, _) in zip("012", phases[:3], phases[3:], strict=True):
        body = {name for name in after if not name.startswith(HEADS[client])}
        assert len(body) == (4 if client == "1" else 2)
        assert all(torch.equal(before[name], after[name]) for name in body)
