"""Random views of examples without labels: SimCLR's for images, noise and masking for tables."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedhet.data.examples import Augment
from fedhet.errors import DataError

LARGE = 64
"""Width or height from which images are changed as SimCLR changes ImageNet, and smaller ones as it changes CIFAR-10."""

NOISE, MASKED = 0.1, 0.2
"""Standard deviation of a table's noise, as a multiple of its column's, and the fraction of entries that are masked."""


def two_views(augment: Augment) -> Augment:
    """Return a function of raw inputs (n, ...) and a generator that returns (2n, ...): first all first views."""

    def views(inputs: Tensor, generator: torch.Generator) -> Tensor:
        return torch.cat([augment(inputs, generator), augment(inputs, generator)])

    return views


def random_views(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random view of each of `inputs`: images (n, 1 or 3, height, width) or rows (n, columns) of floats.

    Images, as bytes or as floats in [0, 1], are cropped and resized, flipped, and changed in colour (Chen et al., ICML
    2020, appendix A), those of at least 64 pixels also blurred. Rows get noise, and some entries are replaced by the
    batch's mean of the column. Raises a DataError for other inputs. The generator must be on the CPU.
    """
    if type(inputs) is Tensor and inputs.ndim == 4 and inputs.shape[1] in (1, 3):
        if inputs.is_floating_point() and (inputs.min() < 0 or inputs.max() > 1):
            raise DataError(
                "views of images as floats need values from 0 to 1, since their colours are changed: return images as "
                "bytes or from 0 to 1, and normalise them in the network, or return your own `augment` with the data"
            )
        return _views_of_images(inputs, generator)
    if type(inputs) is Tensor and inputs.ndim == 2 and inputs.is_floating_point():
        noise = torch.randn(inputs.shape, generator=generator).to(inputs)
        masked = torch.rand(inputs.shape, generator=generator).to(inputs.device) < MASKED
        return torch.where(masked, inputs.mean(0), inputs + NOISE * inputs.std(0, correction=0) * noise)
    raise DataError(
        "views are known for images (n, 1 or 3, height, width) and tables (n, columns) of floats: return a function "
        "`augment` with the data, which makes a random view of each example"
    )


def _views_of_images(images: Tensor, generator: torch.Generator) -> Tensor:
    transform = _simclr(images.shape[2], images.shape[3])
    seed = int(torch.randint(2**62, (), generator=generator))
    # The transforms draw from the global generator, one set of parameters in each call.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.stack([transform(image) for image in images])


@cache
def _simclr(height: int, width: int) -> Any:
    from torchvision.transforms import v2  # takes a second to import

    large = min(height, width) >= LARGE
    strength = 1.0 if large else 0.5
    jitter = v2.ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)
    steps: list[Any] = [
        v2.RandomResizedCrop((height, width), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([jitter], p=0.8),
        v2.RandomGrayscale(p=0.2),
    ]
    if large:
        kernel = min(height, width) // 20 * 2 + 1
        steps.append(v2.RandomApply([v2.GaussianBlur(kernel, (0.1, 2.0))], p=0.5))
    return v2.Compose(steps)
