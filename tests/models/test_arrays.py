"""The kinds of a network's arrays."""

import pytest
import torch
from torch import nn
from torchvision.models import mnasnet0_5

from fedhet.models.copies import kinds_of, load_state, tied_names


class Everything(nn.Module):
    """A network with arrays of all kinds."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        for name, value in {"mask": torch.ones(3), "places": torch.arange(3), "scaled": torch.tensor(2.0)}.items():
            self.register_buffer(name, value)
        self.first = nn.Linear(3, 3).requires_grad_(False)
        self.norms = nn.ModuleList([nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True), Own()])
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4)
        self.head.weight = self.embedding.weight


class Own(nn.Module):
    """A normalisation with a statistic and a constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_scale", torch.ones(3))
        self.register_buffer("eps", torch.tensor(1e-5))


class Kept(nn.Sequential):
    """A network that trains with BatchNorm in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def test_each_array_has_its_kind():
    kinds = kinds_of(Everything())
    assert kinds.keys() == Everything().state_dict().keys()
    of = {kind: {name for name, each in kinds.items() if each == kind} for kind in kinds.values()}
    assert of["trained"] == {
        "scale", "embedding.weight", "head.weight", "head.bias", "norms.0.weight", "norms.0.bias",
    }  # fmt: skip
    assert of["frozen"] == {"first.weight", "first.bias"}
    tracked = {f"norms.{n}.{key}" for n in (0, 1) for key in ("running_mean", "running_var", "num_batches_tracked")}
    assert of["statistic"] == {*tracked, "norms.2.running_scale"}
    assert of["buffer"] == {"mask", "places", "scaled", "norms.2.eps"}
    assert tied_names(Everything()) == {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("training", [True, False])
def test_batchnorm_kept_in_evaluation_mode(training):
    model = Kept(nn.Linear(3, 3), nn.BatchNorm1d(3)).train(training)
    modes = [module.training for module in model.modules()]
    kinds = kinds_of(model)
    assert {kinds[f"1.{name}"] for name in ("running_mean", "running_var", "num_batches_tracked")} == {"buffer"}
    assert [module.training for module in model.modules()] == modes, "modes are as they were"


def test_arrays_of_modules_with_versions():
    model = mnasnet0_5(num_classes=3)
    arrays = {name: array + 1 for name, array in model.state_dict().items()}  # without the versions
    load_state(model, arrays)
    assert all(torch.equal(array, arrays[name]) for name, array in model.state_dict().items())
