"""BatchNorm's statistics, taken anew from examples."""

import pytest
import torch
from torch import nn

from fedhet.training import BATCH, reestimate


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3, momentum=0.25), nn.Linear(3, 2), nn.BatchNorm1d(2))


def inputs_of(count):
    return 5 + 2 * torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def double(inputs):
    return 2 * inputs


def test_mean_over_all_examples():
    model, inputs = network(), inputs_of(BATCH + 100)
    model[0].running_mean.fill_(77)
    reestimate(model, inputs, double)
    shares = torch.tensor([[BATCH], [100]]) / len(inputs)
    variances = torch.stack([batch.var(0) for batch in (2 * inputs).split(BATCH)])
    torch.testing.assert_close(model[0].running_mean, 2 * inputs.mean(0))
    torch.testing.assert_close(model[0].running_var, (shares * variances).sum(0))
    assert model[0].num_batches_tracked == 2
    assert [layer.momentum for layer in (model[0], model[2])] == [0.25, 0.1]
    assert not any(module.training for module in model.modules())


def test_only_chosen_layers_change():
    model = network()
    reestimate(model, inputs_of(20), double, lambda name: name == "2.running_mean")
    assert model[0].running_mean.tolist() == [0, 0, 0]
    assert model[2].num_batches_tracked == 1
    assert model[0].num_batches_tracked == 0


def test_constant_units():
    model, inputs = network(), inputs_of(20)
    inputs[:, 1] = 4
    reestimate(model, inputs, double)
    assert (model[0].running_mean[1], model[0].running_var[1]) == (8, 1)
    assert model[0].running_var[0] > 1


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_examples(count):
    model, before = network(), network().state_dict()
    reestimate(model, inputs_of(count), double)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_instance_norm_and_frozen_layers():
    model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.BatchNorm1d(3))
    model[1].train = lambda mode=True: nn.Module.train(model[1], False)
    inputs = torch.randn(20, 3, 5, generator=torch.Generator().manual_seed(1))
    reestimate(model, inputs, double)
    torch.testing.assert_close(model[0].running_mean, 2 * inputs.mean((0, 2)))
    assert model[1].running_mean.tolist() == [0, 0, 0]
