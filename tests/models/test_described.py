"""The text by which a user's model is compared with that of an earlier process."""

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
