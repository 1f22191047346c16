"""A shared pool of another data set's images, in the raw form of the clients' own."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhet.data.examples import DataSet, Pool
from fedhet.data.split import hold_out
from fedhet.errors import DataError


def pool_of(other: DataSet, own: DataSet, size: int, seed: int) -> Pool:
    """Training images of another data set as if they were raw images of the clients' own.

    They are resized (bilinear, with a filter against aliasing), made grey or three times the same channel where the
    other has another number of channels, and scaled so that white is white.

    Args:
        other: the data set that they are from.
        own: the clients' data set.
        size: number of images.
        seed: the same seed draws the same images, each class in its share.

    Returns:
        The pool, with labels where both data sets have as many classes of one kind of task; else without.

    Raises:
        DataError: one of the data sets is not of images, or the other has too few.
    """
    for dataset in (own, other):
        if len(dataset.input_shape) != 3:
            raise DataError(f"a pool of {other.name} for {own.name} needs images in both: {dataset.name} has none")
    drawn, _ = hold_out(other, size, seed)
    held = other.train.subset(drawn)
    alike = (other.classes, other.task.name) == (own.classes, own.task.name)
    return Pool(_like(held.inputs[:], own, own.white / other.white), held.labels if alike else None)


def _like(images: Tensor, own: DataSet, scale: float) -> Tensor:
    first = own.train.inputs[:1]
    _, channels, height, width = first.shape
    floats = images.to(torch.float32) * scale
    if floats.shape[1] != channels:
        floats = floats.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if floats.shape[2:] != (height, width):
        floats = F.interpolate(floats, size=(height, width), mode="bilinear", antialias=True)
    return (floats if first.is_floating_point() else floats.round().clamp(0, own.white)).to(first.dtype)
