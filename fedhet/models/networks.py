"""Networks for images of (channels, height, width) and for texts, and the generator of FedGen.

Texts are given as characters (characters,), words (words,) or word vectors (words, width). Networks end in `head`, an
`nn.Linear`, whose input is the representation (n, d). They raise a `ModelError` for inputs of other shapes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.errors import ModelError
from fedhet.models.registry import register_model
from fedhet.models.representation import by_name, mask_of

Activation = Callable[[], nn.Module]
Shape = tuple[int, ...]


def image_shape(input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return channels, height and width of an image; raise a `ModelError` if a side is below `smallest` pixels."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        size = f"{smallest} x {smallest} pixels"
        raise ModelError(f"the model needs images (channels, height, width) of {size} or more, not shape {input_shape}")
    channels, height, width = input_shape
    return channels, height, width


def _linear_stack(widths: Sequence[int]) -> list[nn.Module]:
    return [layer for fan_in, fan_out in pairwise(widths) for layer in (nn.Linear(fan_in, fan_out), nn.ReLU())]


class Classifier(nn.Module):
    """A classifier `head(body(inputs))`, where `body` computes the representation and `head` is linear."""

    def __init__(self, body: Sequence[nn.Module], width: int, classes: int):
        super().__init__()
        self.body, self.head = nn.Sequential(*body), nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (n, classes) of inputs (n, *input_shape)."""
        return self.head(self.body(inputs))


class MaxPool(nn.MaxPool2d):
    """Max pooling of 2 x 2 fields. On a CPU without gradients, it compares rows, then columns, several times faster."""

    def forward(self, maps: Tensor) -> Tensor:
        """Return the maxima (..., height // 2, width // 2) of maps (..., height, width)."""
        if torch.is_grad_enabled() or maps.device.type != "cpu" or torch.compiler.is_exporting():
            return super().forward(maps)
        height, width = (size // 2 * 2 for size in maps.shape[-2:])
        rows = torch.maximum(maps[..., :height:2, :], maps[..., 1:height:2, :])
        return torch.maximum(rows[..., :width:2], rows[..., 1:width:2])


class ConvNet(Classifier):
    """A CNN: for each of `channels`, a convolution with ReLU and 2 x 2 max pooling; then linear layers.

    Images must be at least 4 x 4. Convolutions are 5 x 5 without padding while maps are at least 12 x 12, as in LeNet,
    and 3 x 3 with padding otherwise. Maps smaller than 4 x 4 are not pooled. `hidden` has the widths of linear layers.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, channels: Sequence[int], hidden: Sequence[int]):
        filters, height, width = image_shape(input_shape, smallest=4)
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise((filters, *channels)):
            large = min(height, width) >= 12
            layers += [nn.Conv2d(fan_in, fan_out, 5) if large else nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.ReLU()]
            if large:
                height, width = height - 4, width - 4
            if min(height, width) >= 4:
                layers.append(MaxPool(2))
                height, width = height // 2, width // 2
        widths = (channels[-1] * height * width, *hidden)
        super().__init__([*layers, nn.Flatten(1), *_linear_stack(widths)], widths[-1], classes)


@register_model("cnn")
def cnn(input_shape: tuple[int, ...], classes: int, *, convolutions: int = 2, layers: int = 3) -> nn.Module:
    """Return FedHeNN's CNN: `convolutions` convolutional layers, then `layers` linear layers, including the head."""
    # 64 filters and 120 and 64 units are FedHeNN's (307,842 parameters on CIFAR-10); an image of 8 x 8 needs fewer.
    small = max(input_shape[1:], default=0) < 16
    filters, hidden = (32, (64, 32)) if small else (64, (120, 64))
    return ConvNet(input_shape, classes, (filters,) * convolutions, hidden[: layers - 1])


# FedHeNN's heterogeneous clients: "5 CNNs, 1 conv + 1 fc to 3 conv + 3 fc"; fedhet chose the three in between.
for _convolutions, _layers in ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3)):
    _builder = partial(cnn, convolutions=_convolutions, layers=_layers)
    register_model(f"cnn-{_convolutions}-{_layers}", family="cnn-family")(_builder)


@register_model("lenet")
def lenet(input_shape: tuple[int, ...], classes: int, *, filters: int = 20) -> nn.Module:
    """Return FedMA's LeNet: 20 (`filters`) and 50 filters of 5 x 5, 500 hidden units; 431,080 parameters on MNIST."""
    return ConvNet(input_shape, classes, (filters, filters * 5 // 2), (25 * filters,))


@register_model("fedavg-cnn")
def fedavg_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the four-layer CNN of McMahan et al. (AISTATS 2017) for images, with 582,026 parameters on MNIST."""
    return ConvNet(input_shape, classes, (32, 64), (512,))


@register_model("mlp")
class MLP(Classifier):
    """An MLP with two hidden layers of 200 `units`, the 2NN of McMahan et al. (AISTATS 2017), for any input shape."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, units: int = 200):
        super().__init__([nn.Flatten(1), *_linear_stack((prod(input_shape), units, units))], units, classes)


# One graph in several widths, for methods that match units; mlp-200 is the MLP.
register_model("lenet-10")(partial(lenet, filters=10))
for _units in (100, 150, 200):
    register_model(f"mlp-{_units}", family="mlp-widths")(partial(MLP, units=_units))
for _units in (20, 30):  # for quick tests with digits
    register_model(f"mlp-{_units}")(partial(MLP, units=_units))


@register_model("vgg9")
class VGG9(Classifier):
    """FedMA's VGG-9 (table 4), for images of at least 8 x 8; without BatchNorm, 3,491,530 parameters on CIFAR-10."""

    def __init__(self, input_shape: tuple[int, ...], classes: int):
        channels, height, width = image_shape(input_shape, smallest=8)
        layers: list[nn.Module] = []
        for first, second, dropout in ((32, 64, 0.0), (128, 128, 0.05), (256, 256, 0.1)):
            layers += [nn.Conv2d(channels, first, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), MaxPool(2)]
            if dropout:
                layers.append(nn.Dropout(dropout))
            channels = second
        widths = (channels * (height // 8) * (width // 8), 512, 512)
        super().__init__([*layers, nn.Flatten(1), *_linear_stack(widths), nn.Dropout(0.1)], widths[-1], classes)


def convolution(
    fan_in: int,
    fan_out: int,
    stride: int = 1,
    *,
    kernel: int = 3,
    groups: int = 1,
    activation: Activation | None = nn.ReLU,
) -> nn.Sequential:
    """Return a 2D convolution with padding `kernel // 2`, BatchNorm, and the activation unless it is None."""
    layers: list[nn.Module] = [
        nn.Conv2d(fan_in, fan_out, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(fan_out),
    ]
    return nn.Sequential(*layers, *([] if activation is None else [activation()]))


class ResidualBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions and, where the shape changes, a 1 x 1 shortcut, with BatchNorm."""

    def __init__(self, fan_in: int, fan_out: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = convolution(fan_in, fan_out, stride, kernel=1, activation=None)

    def forward(self, maps: Tensor) -> Tensor:
        """Map (n, fan_in, height, width) to (n, fan_out, height / stride, width / stride)."""
        return F.relu(self.convolved(maps) + self.shortcut(maps))

    def convolved(self, maps: Tensor) -> Tensor:
        """Return the output of the two convolutions for `maps` (n, fan_in, height, width), without the shortcut."""
        return self.norm2(self.conv2(F.relu(self.norm1(self.conv1(maps)))))


@register_model("resnet8")
class ResNet8(Classifier):
    """A ResNet for CIFAR (He et al., 2016) of 3 blocks (16, 32 and 64 channels), for images of at least 4 x 4."""

    def __init__(self, input_shape: tuple[int, ...], classes: int):
        channels, _, _ = image_shape(input_shape, smallest=4)
        layers: list[nn.Module] = [*convolution(channels, 16)]
        layers += [ResidualBlock(16, 16), ResidualBlock(16, 32, stride=2), ResidualBlock(32, 64, stride=2)]
        super().__init__([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1)], 64, classes)


VOCABULARY = 10_000
"""Number of words that `WordLSTM` embeds; texts have indices below it."""


class CharLSTM(nn.Module):
    """FedMA's LSTM (table 5), which predicts the next character; 293,584 parameters for a vocabulary of 80."""

    def __init__(self, vocabulary: int, embedding: int = 8, units: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.head = nn.Linear(units, vocabulary)

    def forward(self, texts: Tensor) -> Tensor:
        """Return logits (n, vocabulary) of the next character for int64 texts (n, characters)."""
        states, _ = self.lstm(self.embedding(texts))
        return self.head(states[:, -1])


@register_model("char-lstm")
def char_lstm(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return FedMA's character LSTM for texts (characters,) from a vocabulary of `classes` characters."""
    if len(input_shape) != 1:
        raise ModelError(f"a character LSTM needs inputs of shape (characters,), not {input_shape}: use another model")
    return CharLSTM(classes)


class WordLSTM(nn.Module):
    """An LSTM of `layers` layers and two linear layers (FedHeNN, section 4.1), with the widths of LEAF's code.

    Words of texts (words,) are embedded; word vectors (words, width) are passed to the LSTM directly.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, layers: int, units: int = 100, hidden: int = 30):
        super().__init__()
        if len(input_shape) not in (1, 2):
            raise ModelError(
                "a word LSTM needs word indices of shape (words,) or word vectors of shape (words, width), not inputs "
                f"of shape {input_shape}: use another model"
            )
        words = len(input_shape) == 1
        self.embedding = nn.Embedding(VOCABULARY, units) if words else nn.Identity()
        self.lstm = nn.LSTM(units if words else input_shape[1], units, num_layers=layers, batch_first=True)
        self.hidden = nn.Sequential(nn.Linear(units, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Return logits (n, classes) for int64 texts (n, words) or word vectors (n, words, width)."""
        states, _ = self.lstm(self.embedding(texts))
        return self.head(self.hidden(states[:, -1]))


for _layers in (1, 2):
    register_model(f"word-lstm-{_layers}", family="word-lstm-family")(partial(WordLSTM, layers=_layers))


@register_model("token-bag")
class TokenBag(nn.Module):
    """A linear classifier of the mean embedding of a text's tokens, whose ids are taken modulo `embeddings`.

    The mean leaves out padding, if an `attention_mask` among the inputs or the attribute `config` says what it is.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, embeddings: int = 4096, width: int = 32):
        super().__init__()
        if len(input_shape) != 1:
            raise ModelError(f"the model needs token ids of shape (tokens,), not {input_shape}: use another model")
        self.embedding = nn.Embedding(embeddings, width)
        self.head = nn.Linear(width, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Return logits (n, classes) for int64 texts (n, tokens), or for `Inputs` whose first tensor has the texts."""
        inputs = by_name((texts,), {})
        tokens = next(iter(inputs.values()))
        mask = mask_of(self, inputs)
        weights = (torch.ones_like(tokens) if mask is None else mask.long())[:, :, None]
        vectors = self.embedding(tokens % self.embedding.num_embeddings)
        return self.head((vectors * weights).sum(1) / weights.sum(1).clamp_min(1))


# ---- the generator of FedGen, which generates representations from a class and noise (Zhu et al., ICML 2021)

NOISE, HIDDEN = 32, 256  # length of its noise vector and number of hidden units, as in the authors' code for MNIST


class Generator(nn.Module):
    """FedGen's generator: a network that maps noise and a class to a representation of `width` features."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        self.hidden, self.norm = nn.Linear(NOISE + classes, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.output = nn.Linear(HIDDEN, width)

    def forward(self, drawn: Tensor) -> Tensor:
        """Return representations (n, width) for inputs (n, NOISE + 1) of noise and, in the last column, classes."""
        classes = F.one_hot(drawn[:, -1].long(), self.classes).to(drawn.dtype)
        return self.output(F.relu(self.norm(self.hidden(torch.cat([drawn[:, :-1], classes], 1)))))


def draw(counts: Tensor, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw inputs (rows, NOISE + 1) of a `Generator`: noise, and classes in proportion to `counts` (classes,)."""
    classes = torch.multinomial(counts.double(), rows, replacement=True, generator=generator)
    noise = torch.rand(rows, NOISE, generator=generator, dtype=torch.float64)
    return torch.cat([noise, classes[:, None].double()], 1).to(dtype)
