import pytest
import torch
from torch import nn

from fedhet import models
from fedhet.errors import ModelError

DIGITS, MNIST, CIFAR10, SHAKESPEARE = (1, 8, 8), (1, 28, 28), (3, 32, 32), (80,)
IMAGE_MODELS = [name for name in models.names() if "lstm" not in name and name != "token-bag"]
LARGE = ["vgg9", *(name for name in IMAGE_MODELS if name.startswith("flha-") and not name.startswith("flha-small"))]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "input_shape", "classes", "expected"),
    [
        ("cnn", CIFAR10, 10, 307_842),  # FedHeNN
        ("cnn-1-1", CIFAR10, 10, 4_864 + 125_450),  # Phi of 64 x 14 x 14 = 12,544
        ("vgg9", CIFAR10, 10, 3_491_530),  # FedMA, table 7
        ("lenet", MNIST, 10, 431_080),  # FedMA, "431k"
        ("fedavg-cnn", MNIST, 10, 582_026),  # HtFLlib's FedAvgCNN with dim=1024
        ("char-lstm", SHAKESPEARE, 80, 293_584),  # FedMA, table 6
        ("word-lstm-2", (25, 300), 2, 160_800 + 80_800 + 3_030 + 62),  # LSTMs of 100 units, layers of 30 and 2
    ],
)
def test_published_sizes(name: str, input_shape: tuple[int, ...], classes: int, expected: int) -> None:
    assert parameters(models.build(name, input_shape, classes)) == expected


@pytest.mark.parametrize("name", ["resnet8", "mlp-20", "fedavg-cnn"])
def test_a_representation_is_pooled_before_the_head(name: str) -> None:
    torch.manual_seed(0)
    plain, pooled = (models.build(each, DIGITS, 10).eval() for each in (name, f"{name}:5"))
    pooled.load_state_dict(plain.state_dict(), strict=False)  # all but the head, which is another
    assert sorted(set(plain.state_dict()) - set(pooled.state_dict())) == ["head.bias", "head.weight"]
    inputs = torch.randn(3, *DIGITS)
    head = pooled.get_submodule("head.head")
    assert isinstance(head, nn.Linear)
    expected = head(torch.nn.functional.adaptive_avg_pool1d(plain.get_submodule("body")(inputs), 5))
    assert torch.equal(pooled(inputs), expected)


def test_a_width_stands_behind_models_and_families() -> None:
    assert models.expand("mlp-widths:7, lenet") == ["mlp-100:7", "mlp-150:7", "mlp-200:7", "lenet"]
    for wrong in ("mlp:", "mlp:0", "mlp:x"):
        with pytest.raises(ModelError, match="whole number from 1 to 65536"):
            models.expand(wrong)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in IMAGE_MODELS]
)
def test_every_image_model_takes_images(name: str) -> None:
    for input_shape in (DIGITS, CIFAR10, (1, 9, 14)):
        model = models.build(name, input_shape, 7)
        seen: list[torch.Tensor] = []
        model.head.register_forward_hook(lambda head, inputs, output, seen=seen: seen.append(inputs[0]))
        logits = model.eval()(inputs := torch.randn(3, *input_shape))
        with torch.no_grad():  # pooling without gradients is computed in another way
            torch.testing.assert_close(model(inputs), logits)
        assert logits.shape == (3, 7)
        assert [module for module in model.modules() if isinstance(module, nn.Linear)][-1] is model.head
        assert seen[0].shape == (3, model.head.in_features)
        logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_char_lstm_reads_the_whole_text() -> None:
    model = models.build("char-lstm", SHAKESPEARE, 80)
    texts = torch.randint(80, (2, 80))
    logits = model(texts)
    assert logits.shape == (2, 80)
    texts[:, -1] = (texts[:, -1] + 1) % 80
    assert not torch.allclose(model(texts), logits)


@pytest.mark.parametrize(
    ("name", "input_shape"),
    [("char-lstm", CIFAR10), ("word-lstm-1", CIFAR10), ("cnn", SHAKESPEARE), ("vgg9", (1, 7, 7))],
)
def test_model_that_does_not_fit_its_input_says_so(name: str, input_shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=rf"model '{name}': (the model|a .* LSTM) needs"):
        models.build(name, input_shape, 10)


def test_architectures_are_assigned() -> None:
    assert models.deal("mlp, cnn,mlp", "round-robin", 4, 0) == ("mlp", "cnn", "mlp", "mlp")
    assert models.deal("mlp,cnn", "blocks", 5, 0) == ("mlp", "mlp", "mlp", "cnn", "cnn")
    first = models.deal("mlp,cnn,lenet", "random", 300, 4)
    assert first != models.deal("mlp,cnn,lenet", "random", 300, 5)
    models.deal.cache_clear()
    assert first == models.deal("mlp,cnn,lenet", "random", 300, 4)
    assert all(60 < first.count(name) < 140 for name in ("mlp", "cnn", "lenet"))
    with pytest.raises(ModelError, match="has no model"):
        models.deal(" ", "random", 2, 0)
