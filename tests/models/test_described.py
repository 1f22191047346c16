"""The text by which a user's model is compared with that of an earlier process."""

import torch.fx
from torch import nn

from fedhet.models.copies import described


class Applied(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = lambda inputs: inputs

    def extra_repr(self):
        return repr(self.function)


def test_a_models_text_does_not_change_with_addresses():
    models = [nn.Sequential(nn.Linear(2, 2), Applied()) for _ in range(2)]
    assert repr(models[0]) != repr(models[1])
    assert described(models[0]) == described(models[1])
    assert described(models[0]) != described(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_a_network_that_torch_fx_wrote_has_a_text():
    relu, tanh = (torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), layer)) for layer in (nn.ReLU(), nn.Tanh()))
    assert described(relu) != described(tanh)
