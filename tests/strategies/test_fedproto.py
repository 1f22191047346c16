"""FedProto against plain computations."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.config import configuration
from fedhet.methods import registry
from fedhet.models.representation import Representation
from fedhet.setup import client_setup
from fedhet.utils.randomness import derive_seed, seed_everything, torch_generator


def test_unknown_classes_in_the_common_test_set(federate):
    few = {"partition": "classes", "classes-per-client": 2, "fedproto.predict": "prototype"}
    done = federate("fedproto", **few, **{"test-on": "both"})
    assert not any(row["failures"] for row in done.rows)
    assert [row["common"]["trained"]["accuracy"]["max"] <= 0.25 for row in done.rows[1:]] == [True, True, True]


def test_different_widths_are_refused(federate):
    (failure,) = federate("fedproto", architectures="cnn-1-1,mlp", rounds=1).rows[0]["failures"]
    assert failure["client"] == "1"
    assert "the client's representation width is 200, and the other clients have 512" in failure["reason"]
    assert "fedproto.width" in failure["reason"]


class Nested(nn.Module):
    """A network whose head lies deeper and is not the last layer that is made."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"top": nn.Linear(6, 10, bias=False), "body": nn.Linear(64, 6)})

    def forward(self, images):
        return self.parts["top"](self.parts["body"](images.flatten(1)).relu())


@pytest.mark.parametrize(
    ("make", "head", "name"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)), "", "3"),
        (Nested, "parts.top", "parts.top"),
        (lambda: nn.Linear(64, 10), "", ""),
    ],
    ids=["sequential", "nested", "linear"],
)
def test_projection_of_any_network(make, head, name):
    config = configuration.resolve({"method": "fedproto", "fedproto.width": 5, "head": head})
    side = registry.client_side("fedproto")
    torch.manual_seed(3)
    model = make()
    old = model.get_submodule(name)
    projection, narrower = nn.Linear(old.in_features, 5), nn.Linear(5, 10)
    before = Representation(make(), name)
    before.model.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    adapted = side.adapt(make(), config)
    inputs = torch.randn(4, 64)
    phi = Representation(adapted, side.head_of(config))(inputs)
    torch.testing.assert_close(phi, projection(before(inputs)))
    torch.testing.assert_close(adapted(inputs), narrower(phi))
    F.cross_entropy(adapted(inputs), torch.arange(4)).backward()
    prefix = f"{name}." if name else ""
    assert adapted.get_parameter(f"{prefix}projection.weight").grad.abs().sum() > 0
    assert f"{prefix}head.weight" in adapted.state_dict()


@pytest.mark.parametrize(("width", "predict"), [(0, "prototype"), (7, "all-prototypes")])
def test_two_rounds_by_hand(federate, width, predict):
    settings = {"fedproto.width": width, "fedproto.weight": 0.7, "partition": "classes", "classes-per-client": 4}
    settings["fedproto.predict"] = predict
    done = federate("fedproto", momentum=0.5, **settings)
    config, transform = done.config, client_setup.dataset_of(done.config).transform
    networks, prototypes = {}, {}
    for name in "012":
        seed_everything(derive_seed(config.seed, "initial weights", name))
        networks[name] = client_setup.model_of(done.info(name))
        if width:
            projection, head = nn.Linear(networks[name].head.in_features, width), nn.Linear(width, 10)
            networks[name].head = nn.Sequential(OrderedDict(projection=projection, head=head))

    def phi_of(network, inputs):
        phi = network.body(inputs)
        return network.head.projection(phi) if width else phi

    for round in (1, 2):
        sums, counts = {}, {}
        for name, network in networks.items():
            train = client_setup.data_of(done.info(name)).train
            order = torch_generator(config.seed, "batches", name, round)
            optimizer = torch.optim.SGD(network.parameters(), lr=config.learning_rate, momentum=0.5)
            for _ in range(config.local_epochs):
                for rows in torch.randperm(len(train), generator=order).split(config.batch_size):
                    inputs, labels = transform(train.inputs[rows]), train.labels[rows]
                    phi = phi_of(network, inputs)
                    outputs = (network.head.head if width else network.head)(phi)
                    loss = F.cross_entropy(outputs, labels)
                    apart = [
                        (phi[i] - prototypes[label]).square().mean()
                        for i, label in enumerate(labels.tolist())
                        if label in prototypes
                    ]
                    if apart:
                        loss = loss + 0.7 * sum(apart) / len(apart)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                for one, label in zip(phi_of(network, transform(train.inputs)), train.labels.tolist(), strict=True):
                    sums[label] = sums.get(label, 0) + one
                    counts[label] = counts.get(label, 0) + 1
        prototypes |= {label: sums[label] / counts[label] for label in sums}
    for name, network in networks.items():
        saved = done.saved(name)
        assert {name for name in saved if not name.startswith("method/")} == network.state_dict().keys()
        for key, tensor in network.state_dict().items():
            torch.testing.assert_close(saved[key], tensor, rtol=0, atol=1e-6)
    known = done.state.prototypes
    assert known["classes"].tolist() == sorted(prototypes)
    for label, mean in zip(known["classes"], known["means"], strict=True):
        torch.testing.assert_close(torch.tensor(mean), prototypes[int(label)], rtol=0, atol=1e-6)
    # What is scored is the prediction among a client's own classes, or all, by the prototypes of the last round.
    for name, network in networks.items():
        data = client_setup.data_of(done.info(name))
        own = [c for c in sorted(prototypes) if predict == "all-prototypes" or c in data.train.labels.tolist()]
        with torch.no_grad():
            distances = torch.cdist(
                phi_of(network, transform(data.test.inputs)), torch.stack([prototypes[c] for c in own])
            )
        predicted = torch.tensor(own)[distances.argmin(1)]
        accuracy = [row.accuracy for row in done.clients if row.client == name][-1]
        assert accuracy == pytest.approx((predicted == data.test.labels).double().mean().item())
