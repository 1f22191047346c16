"""Families of networks from two papers, FLHA-GHN (`flha`, `flha-small`) and FedHARM (`fedharm-small`).

FLHA-GHN (Litany et al., 2022, appendices A and B): networks of ResNet-18's layer types. The paper gives the numbers of
layers (without 1 x 1 shortcuts) and of skip connections, but not their order, which is chosen here. `flha-small` has
narrower stages, for training without a GPU. Each stage that is wider than the previous one has a stride of 2.

FedHARM (Kastellos et al., 2024): small ResNets, EfficientNets and MobileNetV3s for CPUs. Blocks, activations and gates
are as in the papers of the families. Widths and depths are chosen for fedhet, and dropout and stochastic depth are left
out. Networks whose names end with "b" are wider and deeper.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.models.networks import Activation, Classifier, ResidualBlock, Shape, convolution, image_shape
from fedhet.models.registry import FAMILIES, register_model

LARGE = 128  # least height and width, in pixels, of images that need a 7 x 7 stem (FLHA-GHN's c1_64_k7_s2) and pooling
WIDTHS = {"flha": (64, 128, 256, 512), "flha-small": (8, 16, 32, 32)}

# Layers between stem and head: `conv`, or `add` and `concat` (two convolutions and a skip), and the stage of each.
_RESNET18 = tuple(("add", stage) for stage in (0, 0, 1, 1, 2, 2, 3, 3))
_LAYOUTS: dict[str, tuple[tuple[str, int], ...]] = {
    "arch-0": _RESNET18,
    "arch-1": tuple(("conv", stage) for stage in (0, 1, 1, 2, 2, 3, 3, 3)),
    "arch-2": (("add", 0), ("add", 1), ("add", 1), ("add", 2), ("conv", 3), ("conv", 3)),
    "arch-3": (("conv", 0), ("conv", 1), ("add", 1), ("add", 2), ("add", 3), ("add", 3)),
    "hybrid-1": (*_RESNET18[:1], ("concat", 0), *_RESNET18[2:]),
    "hybrid-2": (*_RESNET18[:3], ("concat", 1), *_RESNET18[4:]),
    "hybrid-3": (*_RESNET18[:1], ("concat", 0), *_RESNET18[2:3], ("concat", 1), *_RESNET18[4:]),
    "cnn-4": (("conv", 1), ("conv", 2)),
}


class FLHANetwork(Classifier):
    """A network of FLHA-GHN: a stem, layers, global average pooling, and a head, for images of at least 4 x 4.

    `layout` has each layer's kind (`conv`, residual `add`, or `concat`) and stage; `widths` are the stages' channels.
    """

    def __init__(self, input_shape: Shape, classes: int, *, layout: Sequence[tuple[str, int]], widths: Sequence[int]):
        channels, height, width = image_shape(input_shape, smallest=4)
        layers: list[nn.Module]
        if min(height, width) >= LARGE:
            layers = [convolution(channels, widths[0], 2, kernel=7), nn.MaxPool2d(3, stride=2, padding=1)]
        else:
            layers = [convolution(channels, widths[0])]
        channels = widths[0]
        for kind, stage in layout:
            if kind == "concat":
                layers.append(ConcatBlock(channels, channels))
                channels *= 2
            else:
                stride = 1 if widths[stage] == channels else 2
                layers.append((ResidualBlock if kind == "add" else convolution)(channels, widths[stage], stride))
                channels = widths[stage]
        super().__init__([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1)], channels, classes)


class ConcatBlock(ResidualBlock):
    """A block that concatenates its input with the output of two 3 x 3 convolutions, followed by 2 x 2 pooling."""

    def forward(self, maps: Tensor) -> Tensor:
        """Map (n, channels, height, width) to (n, 2 channels, height / 2, width / 2), rounded up."""
        return F.max_pool2d(torch.cat([F.relu(self.convolved(maps)), maps], 1), 2, ceil_mode=True)


for _size, _widths in WIDTHS.items():
    _names = {name: f"{_size}-{name}".replace("small-arch", "small") for name in _LAYOUTS}
    for _name, _layout in _LAYOUTS.items():
        _family = _size if _name.startswith("arch") else None
        register_model(_names[_name], family=_family)(partial(FLHANetwork, layout=_layout, widths=_widths))
    FAMILIES[f"{_size}-hybrids"] = tuple(_names[name] for name in ("arch-0", "hybrid-1", "hybrid-2", "hybrid-3"))
    # The ablation without messages: all layers but the first and last have one type, with 64 (small: 16) channels and
    # no stride. The paper mentions no pooling, so there is only the mean at the end.
    for _layers in (4, 7, 10, 13):
        register_model(f"{_size}-plain-{_layers}", family=f"{_size}-plain")(
            partial(FLHANetwork, layout=(("conv", 0),) * (_layers - 2), widths=(64 if _size == "flha" else 16,))
        )


Block = Callable[[int, int, int, int], nn.Module]
"""Function that builds a block from the index of its stage, input channels, output channels and stride."""


class SqueezeExcitation(nn.Module):
    """Squeeze and excitation: scale channels by factors computed from all channels' means (Hu et al., CVPR 2018).

    The hidden layer has `squeezed` channels and the `activation`; `gate` is the activation of the factors.
    """

    def __init__(self, channels: int, squeezed: int, activation: Activation, gate: Activation):
        super().__init__()
        layers = [nn.Conv2d(channels, squeezed, 1), activation(), nn.Conv2d(squeezed, channels, 1), gate()]
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), *layers)

    def forward(self, maps: Tensor) -> Tensor:
        """Return feature maps (n, channels, height, width), with each channel multiplied by a factor."""
        return maps * self.scale(maps)


class InvertedResidual(nn.Module):
    """An inverted residual block (Sandler et al., CVPR 2018): 1 x 1, depthwise and 1 x 1 convolutions.

    There is a shortcut if input and output have the same shape. `widths` are the channels of input, depthwise
    convolution (of this `stride` and `kernel` size) and output. `gate` builds the squeeze and excitation, if any.
    """

    def __init__(
        self, widths: Sequence[int], stride: int, kernel: int, activation: Activation, gate: Activation | None
    ):
        super().__init__()
        fan_in, expanded, fan_out = widths
        layers = [] if expanded == fan_in else [convolution(fan_in, expanded, kernel=1, activation=activation)]
        layers.append(convolution(expanded, expanded, stride, kernel=kernel, groups=expanded, activation=activation))
        gates = [] if gate is None else [gate()]
        self.body = nn.Sequential(*layers, *gates, convolution(expanded, fan_out, kernel=1, activation=None))
        self.residual = stride == 1 and fan_in == fan_out

    def forward(self, maps: Tensor) -> Tensor:
        """Map (n, fan_in, height, width) to (n, fan_out, height / stride, width / stride)."""
        narrowed: Tensor = self.body(maps)
        return maps + narrowed if self.residual else narrowed


class StagedNetwork(nn.Module):
    """A network of a stem, four stages, an expanding 1 x 1 convolution, global average pooling, and `head`.

    Images must be at least 8 x 8. `widths` and `depths` are the numbers of channels and blocks of stages; the stem has
    the first stage's width. `family` is `resnet` (without the expanding convolution), `efficientnet` or `mobilenet`.
    """

    def __init__(self, input_shape: Shape, classes: int, *, widths: Sequence[int], depths: Sequence[int], family: str):
        super().__init__()
        block, activation, widened = _FAMILIES[family]
        channels = image_shape(input_shape, smallest=8)[0]
        width = widened * widths[-1]
        self.stem = convolution(channels, widths[0], activation=activation)
        last = convolution(widths[-1], width, kernel=1, activation=activation) if widened > 1 else nn.Identity()
        stages: list[nn.Module] = []
        for stage, (fan_in, fan_out) in enumerate(pairwise((widths[0], *widths))):
            first = block(stage, fan_in, fan_out, 2 if stage else 1)
            stages.append(nn.Sequential(first, *(block(stage, fan_out, fan_out, 1) for _ in range(depths[stage] - 1))))
        self.stages = nn.Sequential(*stages)
        self.last = last
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes) of images (n, channels, height, width)."""
        return self.head(self.mean(self.last(self.stages(self.stem(images)))))


def _mbconv(stage: int, fan_in: int, fan_out: int, stride: int) -> nn.Module:
    expansion, kernel = ((1, 3), (4, 3), (4, 5), (4, 3))[stage]
    expanded = expansion * fan_in
    gate = partial(SqueezeExcitation, expanded, fan_in // 4, nn.SiLU, nn.Sigmoid)
    return InvertedResidual((fan_in, expanded, fan_out), stride, kernel, nn.SiLU, gate)


def _mobile(stage: int, fan_in: int, fan_out: int, stride: int) -> nn.Module:
    expansion, kernel = ((1, 3), (4, 3), (4, 5), (6, 5))[stage]
    expanded = expansion * fan_in
    activation = nn.ReLU if stage < 2 else nn.Hardswish
    gate = None if stage == 1 else partial(SqueezeExcitation, expanded, expanded // 4, nn.ReLU, nn.Hardsigmoid)
    return InvertedResidual((fan_in, expanded, fan_out), stride, kernel, activation, gate)


_FAMILIES: Mapping[str, tuple[Block, Activation, int]] = {
    "resnet": (lambda stage, *shape: ResidualBlock(*shape), nn.ReLU, 1),  # ResNet-18 (He et al., CVPR 2016)
    "efficientnet": (_mbconv, nn.SiLU, 4),  # Tan and Le, ICML 2019
    "mobilenet": (_mobile, nn.Hardswish, 6),  # MobileNetV3 (Howard et al., ICCV 2019)
}
# Block, activation, and factor by which the last convolution multiplies the channels (1: no such convolution).

# The first three are one of each family.
for _size, _widths, _depths in (("a", (8, 12, 16, 24), (1, 1, 1, 1)), ("b", (8, 16, 24, 40), (1, 1, 2, 1))):
    for _name in _FAMILIES:
        register_model(f"small-{_name}-{_size}", family="fedharm-small")(
            partial(StagedNetwork, widths=_widths, depths=_depths, family=_name)
        )
