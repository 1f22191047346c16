"""FedCon's losses and second networks, against plain computations."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedhet.strategies.fedcon import decay, follow, labelled_loss, ramp
from tests.strategies.test_views import N, assert_same, side_and_step

DECAY = 0.9


def cosine(first, second):
    return (first * second).sum(1) / first.norm(dim=1) / second.norm(dim=1)


def test_loss_of_a_client():
    term, step = side_and_step("fedcon", decay=DECAY)
    before = {name: parameter.detach().clone() for name, parameter in step.parameters.items()}
    assert set(term.constants["second"]) == {"0.weight", "0.bias"}
    second = {name: torch.randn_like(before[name]) for name in term.constants["second"]}
    term.constants["second"].update({name: array.clone() for name, array in second.items()})
    step.number = 1  # the second network follows before the step
    moved = {name: DECAY * second[name] + (1 - DECAY) * before[name] for name in second}
    target = torch.tanh(F.linear(step.inputs, moved["0.weight"], moved["0.bias"]))
    phi = torch.tanh(step.model[0](step.inputs))
    predicted = step.model[2].projector(phi)
    loss = -cosine(predicted[:N], target[N:]).mean() / 2 - cosine(predicted[N:], target[:N]).mean() / 2
    assert_same(term, step, loss)
    for name, array in moved.items():
        torch.testing.assert_close(term.constants["second"][name], array)


def test_loss_of_the_server():
    _, step = side_and_step("fedcon", decay=DECAY)
    step.labels = torch.tensor([0, 1, 2, 1, 0])
    weight, other = 0.3, copy.deepcopy(step.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    outputs = step.outputs
    wanted = other(step.inputs).softmax(1).detach()
    expected = F.cross_entropy(outputs[:N], step.labels) / 2 + F.cross_entropy(outputs[N:], step.labels) / 2
    for here, there in ((outputs[:N], wanted[N:]), (outputs[N:], wanted[:N])):
        expected = expected + weight / 2 * (there * (there.log() - here.log_softmax(1))).sum(1).mean()
    others = step.by({name: parameter.detach() for name, parameter in other.named_parameters()})
    loss = labelled_loss(step, others, weight)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    parameters = [parameter for name, parameter in step.parameters.items() if "projector" not in name]
    for one, two in zip(
        *(torch.autograd.grad(each, parameters, retain_graph=True) for each in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_schedules():
    assert (ramp(0), ramp(100), ramp(500)) == (pytest.approx(0.006738, rel=1e-4), 1, 1)
    assert (decay(0, 0), decay(20, 0), decay(10, 0)) == (1 - 4e-4, 1, pytest.approx(1 - 2e-4))
    target = {"a": torch.ones(2)}
    follow(target, {"a": torch.zeros(2)}, 0.75)
    assert target["a"].tolist() == [0.75, 0.75]


def test_the_second_network_and_the_projection_head_stay_at_the_client(federate):
    done = federate("fedcon", public_samples=40, **{"fedcon.width": 8})
    assert done.failures == []
    sent = done.sent[2, "0"]["model"]
    assert "head.head.weight" in sent
    assert not any("projector" in name for name in sent)
    kept = done.kept("0", 2)
    assert {"head.projector.0.weight", "memory/body.1.weight"} <= set(kept)
    assert not torch.equal(kept["memory/body.1.weight"], torch.from_numpy(sent["body.1.weight"]))
    assert [row["metrics"]["server_loss"] > 0 for row in done.rows[1:3]] == [True, True]
