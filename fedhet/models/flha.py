"""The networks of FLHA-GHN (appendices A and B, sections 5.4 and 5.6), which use the layer types of ResNet-18.

The paper gives the numbers of layers (without 1 x 1 shortcuts) and of skip connections, but not their order, which is
chosen here. Stages have 64, 128, 256 and 512 channels, or 8, 16, 32 and 32 (`flha-small`, for training without a GPU).
Each stage that is wider than the previous one has a stride of 2. BatchNorm and ReLU follow all convolutions.
"""

from collections.abc import Sequence
from functools import partial

from torch import nn

from fedhet.models.images import Classifier, ResidualBlock, convolution, image_shape
from fedhet.models.registry import register_model

LARGE = 128
"""Smallest size of images with the stem for large images: 7 x 7, stride 2 (the paper's c1_64_k7_s2), and pooling."""

WIDTHS = {"flha": (64, 128, 256, 512), "flha-small": (8, 16, 32, 32)}

# Layers between stem and head: `conv`, or `add` (two convolutions and a skip), and the stage of each.
_LAYOUTS: dict[str, tuple[tuple[str, int], ...]] = {
    "arch-0": tuple(("add", stage) for stage in (0, 0, 1, 1, 2, 2, 3, 3)),
    "arch-1": tuple(("conv", stage) for stage in (0, 1, 1, 2, 2, 3, 3, 3)),
    "arch-2": (("add", 0), ("add", 1), ("add", 1), ("add", 2), ("conv", 3), ("conv", 3)),
    "arch-3": (("conv", 0), ("conv", 1), ("add", 1), ("add", 2), ("add", 3), ("add", 3)),
    "cnn-4": (("conv", 1), ("conv", 2)),
}


class FLHANetwork(Classifier):
    """A network of FLHA-GHN: a stem, layers, global average pooling, and a head, for images of at least 4 x 4.

    `layout` has a pair (kind, stage) for each layer, where the kind is `conv` or `add`. `widths` are the channels of
    each stage.
    """

    def __init__(
        self, input_shape: tuple[int, ...], classes: int, *, layout: Sequence[tuple[str, int]], widths: Sequence[int]
    ):
        channels, height, width = image_shape(input_shape, smallest=4)
        layers: list[nn.Module]
        if min(height, width) >= LARGE:
            layers = [convolution(channels, widths[0], 2, kernel=7), nn.MaxPool2d(3, stride=2, padding=1)]
        else:
            layers = [convolution(channels, widths[0])]
        channels = widths[0]
        for kind, stage in layout:
            stride = 1 if widths[stage] == channels else 2
            layers.append((ResidualBlock if kind == "add" else convolution)(channels, widths[stage], stride))
            channels = widths[stage]
        super().__init__([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1)], channels, classes)


for _size, _widths in WIDTHS.items():
    for _name, _layout in _LAYOUTS.items():
        _family = _size if _name.startswith("arch") else None
        register_model(f"{_size}-{_name}".replace("small-arch", "small"), family=_family)(
            partial(FLHANetwork, layout=_layout, widths=_widths)
        )
    # The ablation without messages: all layers but the first and last have one type, with 64 (small: 16) channels and
    # no stride. The paper mentions no pooling, so there is only the mean at the end.
    for _layers in (4, 7, 10, 13):
        register_model(f"{_size}-plain-{_layers}", family=f"{_size}-plain")(
            partial(FLHANetwork, layout=(("conv", 0),) * (_layers - 2), widths=(64 if _size == "flha" else 16,))
        )
