"""Averages of layers among unlike networks by `layer-average` and LG-FedAvg, against sums by hand."""

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from torch import nn

from fedhet.data import load

WIDTHS = {"0": (12, 12, 12), "1": (12, 12), "2": (12, 5, 12)}
"""Of each client's layers between the images and the ten classes."""


def network(client):
    widths = (64, *WIDTHS[client.name], 10)
    layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *layers[:1], nn.ReLU(), *layers[1:])


def of_unequal_numbers(client):
    digits, count = load("digits", None), 20 + 10 * int(client.name)
    inputs, labels = digits.train.inputs.float() / 16, digits.train.labels
    return (inputs[:count], labels[:count]), (inputs[-20:], labels[-20:])


# The layers that are averaged together: client and number of the layer, from 0.
TYPE_ORDER = [("00", "10", "20"), ("01", "11"), ("02",), ("21",), ("22",), ("03", "12", "23")]
HEADS = [("03", "12", "23")]
MAX_COMMON = [("00", "10", "20"), ("01", "11"), ("02",), ("12",), ("03",), ("21",), ("22",), ("23",)]


def layers(arrays):
    """Weight and bias of each layer, in the order of the network."""
    values = list(arrays.values())
    return list(zip(values[::2], values[1::2], strict=True))


@pytest.mark.parametrize(
    ("method", "own", "groups"),
    [
        ("layer-average", {"layer-average.by": "type-order"}, TYPE_ORDER),
        ("layer-average", {"layer-average.by": "max-common"}, MAX_COMMON),
        ("lg-fedavg", {}, HEADS),
    ],
)
def test_averages_of_layers(federate, method, own, groups):
    done = federate(method, model=network, data=of_unequal_numbers, **own)
    assert done.failures == []
    sent = {client: layers(done.sent[1, client]["model"]) for client in WIDTHS}
    received = {client: layers(done.received[2, client]["model"]) for client in WIDTHS}
    together = sorted(layer for group in groups for layer in group)
    assert {client: len(of) for client, of in sent.items()} == Counter(client for client, _ in together)
    for group in groups:
        places = [(client, int(place) - len(WIDTHS[client]) - 1) for client, place in group]  # from the last layer
        for part in (0, 1):  # weight and bias
            own = [sent[client][place][part].astype(np.float64) for client, place in places]
            expected = np.average(own, axis=0, weights=[20 + 10 * int(client) for client, _ in group])
            for client, place in places:
                np.testing.assert_allclose(received[client][place][part], expected, rtol=1e-5, atol=1e-7)
            assert not any(np.array_equal(one, other) for one, other in combinations(own, 2))


def test_averages_within_architectures(federate):
    mixed = federate(
        "layer-average", "mixed", clients=4, architectures="mlp,cnn-1-1", **{"layer-average.by": "architecture"}
    )
    assert mixed.failures == []
    for architecture, ours, others in (("mlp", "02", [1, 3]), ("cnn-1-1", "13", [0, 2])):
        apart = federate("fedavg", architecture, clients=4, architectures=architecture, since=dict.fromkeys(others, 99))
        assert apart.rows[1]["participants"] == list(ours)
        average = {name: tensor.numpy() for name, tensor in apart.saved("global").items()}
        found = {key: array for key, array in mixed.state.model.items() if key.startswith(f"{architecture}/")}
        assert found.keys() == {f"{architecture}/{name}" for name in average}
        for name, array in average.items():
            assert np.array_equal(found[f"{architecture}/{name}"], array)
        own = [(r.round, r.client, r.accuracy, r.loss, r.bytes_up, r.bytes_down) for r in apart.clients if r.round]
        beside = [(r.round, r.client, r.accuracy, r.loss, r.bytes_up, r.bytes_down) for r in mixed.clients if r.round]
        assert own == [row for row in beside if row[1] in ours]
