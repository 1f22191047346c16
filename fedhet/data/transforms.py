"""Transforms of a batch of images before a model sees it."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.utils.machine import brought


class Normalise:
    """Convert images to float32 and normalise each channel: `(images / scale - mean) / std`."""

    def __init__(self, scale: float, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)):
        # A scalar for one channel, because broadcasting costs more than the addition.
        shape = (-1, 1, 1) if len(mean) > 1 else ()
        self._factor = torch.tensor([1 / (scale * s) for s in std]).view(shape)
        self._offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(shape)

    def __call__(self, images: Tensor) -> Tensor:
        """Return normalised images as a new tensor."""
        floats = images.to(torch.float32, copy=True)
        if self._factor.device != images.device:  # copying them for each batch would make a GPU wait
            self._factor, self._offset = self._factor.to(images.device), self._offset.to(images.device)
        return floats.mul_(self._factor).add_(self._offset)


def resized(images: Tensor, transform: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Return transformed images resized to (n, channels, size, size): bilinear, with antialiasing."""
    return F.interpolate(transform(images), size=(size, size), mode="bilinear", antialias=True)


def crop_and_flip(images: Tensor, generator: torch.Generator, *, reflect: bool = True) -> Tensor:
    """Augment images (n, channels, height, width) as usual for CIFAR: pad by 4 pixels, crop at random, flip half.

    The padding is the reflected image, or zeros without `reflect`. The generator is on the CPU, so that results do not
    depend on the device.
    """
    n, channels, height, width = images.shape
    shifts = torch.randint(-4, 5, (2, n, 1), generator=generator)
    drawn = torch.cat([shifts, torch.randint(2, (1, n, 1), generator=generator)])
    down, right, flips = brought(drawn, images.device)
    rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
    rows, columns = rows + down, torch.where(flips.bool(), columns.flip(0), columns) + right
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    pixels = (_reflected(rows, height)[:, :, None] * width + _reflected(columns, width)[:, None, :]).view(n, 1, -1)
    cropped = images.flatten(2).gather(2, pixels.expand(-1, channels, -1)).view_as(images)
    return cropped if reflect else cropped * inside[:, None]


def flip_crop_brighten_blur(images: Tensor, generator: torch.Generator) -> Tensor:
    """Augment images (n, channels, height, width) uint8 as FedHARM does; see `crop_and_flip` for the generator.

    This flips images horizontally and vertically, crops them, changes the brightness by up to 20 % and applies a
    Gaussian blur. The paper gives no probabilities: here each flip and the blur (3 x 3, standard deviation of 0.1 to 1
    pixel) affect half of the images.
    """
    n = len(images)
    cropped = crop_and_flip(images, generator)
    upside_down = torch.randint(2, (n,), generator=generator)
    brightness = 0.8 + 0.4 * torch.rand(n, generator=generator)
    deviation = 0.1 + 0.9 * torch.rand(n, generator=generator)
    beside = (-0.5 / deviation.square()).exp() * torch.randint(2, (n,), generator=generator)
    drawn = torch.stack([upside_down, brightness, 1 / (1 + 2 * beside), beside / (1 + 2 * beside)])
    flips, factors, centre, side = brought(drawn, images.device).view(4, n, 1, 1, 1)
    floats = torch.where(flips.bool(), cropped.flip(2), cropped) * factors
    padded = F.pad(floats, (1, 1, 1, 1), mode="reflect")
    rows = side * (padded[:, :, :-2] + padded[:, :, 2:]) + centre * padded[:, :, 1:-1]
    blurred = side * (rows[..., :-2] + rows[..., 2:]) + centre * rows[..., 1:-1]
    return blurred.round().clamp(0, 255).to(images.dtype)


def _reflected(positions: Tensor, size: int) -> Tensor:
    """Reflect positions outside 0 to size - 1 at the first and the last pixel."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()
