"""Phi from models with odd heads, and forward passes that leave no trace."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.errors import ModelError
from fedhet.models.representation import Output, RandomStream, Representation, head_name, isolated


class Odd(nn.Module):
    """Registers its head first, calls it by keyword, and goes on after it."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.after = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(input=self.body(x))
        self.after += 1
        return F.log_softmax(out, 1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def test_head_name() -> None:
    assert head_name(mlp()) == "2"
    assert head_name(Odd()) == "body.0"
    assert head_name(Odd(), "classifier") == "classifier"
    assert head_name(nn.Linear(3, 2)) == ""
    assert head_name(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 1, 1))) == "2"
    assert head_name(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), "1") == "1"


def test_missing_head() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no nn.Linear or convolution .* only"):
        head_name(nn.Sequential(nn.PReLU(), nn.ReLU()))
    with pytest.raises(ValueError, match=r"Odd has no module 'fc' .* classifier, body, body.0"):
        Representation(Odd(), "fc")


def test_phi_is_the_input_of_the_head() -> None:
    model, x = Odd().eval(), torch.randn(7, 4)
    representation = Representation(model, "classifier")
    for _ in range(2):
        torch.testing.assert_close(representation(x), model.body(x))
    assert model.after == 0
    assert not model.classifier._forward_pre_hooks


def test_an_output_that_is_changed_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    for site in (Output(model, "0"), Representation(model, what="0")):
        with site.capture() as captured, pytest.raises(ModelError, match="changes the output of .*'0'"):
            model(torch.ones(3, 4)), captured()


def noisy() -> nn.Module:
    class Counter(nn.Module):
        """A buffer that is replaced, not written to."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x

    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)),
        Counter(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64, 8),
        nn.Linear(8, 2),
    )


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("training", [True, False])
def test_isolated_protects_buffers_and_generators(training: bool) -> None:
    model = noisy().train(training)
    x = torch.randn(5, 1, 8, 8)
    stream = RandomStream(3)
    before, buffers, state = snapshot(model), dict(model.named_buffers()), torch.get_rng_state()
    with isolated(model, stream):
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match="channels"), isolated(model, stream):
        model(x.expand(5, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
