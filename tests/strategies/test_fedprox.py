"""FedProx against its formula, and against FedAvg."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedhet.messages import Payload
from fedhet.methods import registry
from fedhet.training import Step


def test_without_its_term_it_is_fedavg(federate):
    one = federate("fedprox", "prox", **{"fedprox.mu": 0.0})
    other = federate("fedavg", "avg")
    assert one.rows == other.rows
    name = "models/global.safetensors"
    assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()


def test_gradient_of_the_proximal_term():
    torch.manual_seed(0)
    model, mu = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), 0.3
    client = SimpleNamespace(model=model, config=SimpleNamespace(options=SimpleNamespace(mu=mu)))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    (term,) = registry.client_side("fedprox")(client).terms(Payload())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    none = torch.empty(0)
    value = term(Step(0, model, dict(model.named_parameters()), none, none, none, none))
    now = [parameter.detach() for parameter in model.parameters()]
    assert value.item() == pytest.approx(
        mu / 2 * sum((a - b).square().sum().item() for a, b in zip(now, start, strict=True))
    )
    for gradient, a, b in zip(torch.autograd.grad(value, list(model.parameters())), now, start, strict=True):
        torch.testing.assert_close(gradient, mu * (a - b))
