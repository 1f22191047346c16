"""Loaders of digits, MNIST, Fashion-MNIST, CIFAR-100 and CIFAR-10, also with other augmentations or grey images.

The digits are part of scikit-learn. Other loaders read the original files in `folder` or, if it is None, in the cache
folder, to which they download missing files. They raise a `DataError` if a file is missing or damaged.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.data.examples import (
    Augment,
    DataSet,
    Examples,
    Indices,
    Normalise,
    Owners,
    Transform,
    crop_and_flip,
    flip_crop_brighten_blur,
    load,
    register_dataset,
)
from fedhet.data.files import check_labels, locate, read_cifar, read_idx
from fedhet.errors import DataError
from fedhet.tasks import Task
from fedhet.utils.randomness import numpy_generator

MNIST_FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
MNIST_FOLDERS = ("", "MNIST/raw", "mnist/MNIST/raw")
FASHION_FOLDERS = ("FashionMNIST/raw", "fashionmnist/FashionMNIST/raw", "fashion-mnist")
CIFAR10_TRAIN = [f"data_batch_{batch}" for batch in range(1, 6)]
CIFAR100_FILES = ("train", "test")
CIFAR100_FOLDERS = ("", "cifar-100-python", "cifar100/cifar-100-python")
CIFAR10_FOLDERS = ("", "cifar-10-batches-py", "cifar10/cifar-10-batches-py")


def _images(
    name: str, parts: Sequence[Examples], transform: Transform, *, augment: Augment | None = None, classes: int = 10
) -> DataSet:
    train, test = parts
    task = Task("classification")
    shape = tuple(train.inputs[:1].shape[1:])
    return DataSet(name, train, test, classes, task, shape, transform, augment=augment)


@register_dataset("digits", included=True)
def digits(folder: Path | None) -> DataSet:
    """Load scikit-learn's digits (UCI, 1998): 1,797 grey images, 8 x 8 pixels, 355 for tests; `folder` is ignored."""
    try:
        # `sklearn.datasets.load_digits` reads the same file, but importing scikit-learn takes seconds.
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        table = torch.from_numpy(np.loadtxt(str(file), delimiter=",", dtype=np.int64))
    except (ImportError, OSError, ValueError) as error:
        raise DataError(f"scikit-learn's embedded digits cannot be read ({error}): reinstall scikit-learn") from error
    examples = Examples(table[:, :-1].to(torch.uint8).view(-1, 1, 8, 8), table[:, -1].clone())
    occurrence = torch.nn.functional.one_hot(examples.labels).cumsum(0).gather(1, examples.labels[:, None])[:, 0]
    test = occurrence % 5 == 0
    return _images("digits", (examples.subset(~test), examples.subset(test)), Normalise(16.0))


@register_dataset("mnist")
def mnist(folder: Path | None) -> DataSet:
    """Load MNIST (LeCun et al., 1998): 70,000 grey images of digits, 28 x 28; downloads it if `folder` is None."""
    place = locate(folder, MNIST_FOLDERS, MNIST_FILES, "MNIST")
    return _from_idx("mnist", place, Normalise(255.0, mean=(0.1307,), std=(0.3081,)))


@register_dataset("fashion-mnist")
def fashion_mnist(folder: Path | None) -> DataSet:
    """Load Fashion-MNIST (Xiao et al., 2017): 70,000 grey images, 28 x 28; downloads it if `folder` is None."""
    place = locate(folder, FASHION_FOLDERS, MNIST_FILES, "FashionMNIST")
    return _from_idx("fashion-mnist", place, Normalise(255.0, mean=(0.2860,), std=(0.3530,)))


def _from_idx(name: str, place: Path, transform: Normalise) -> DataSet:
    parts = []
    for part in ("train", "t10k"):
        images, labels = (read_idx(place / f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
            sizes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
            raise DataError(f"in {place}, {part} images must be 28 x 28 with labels, not {sizes}: download them again")
        check_labels(place / f"{part}-labels-idx1-ubyte", labels, 10)
        parts.append(Examples(images[:, None], labels.long()))
    return _images(name, parts, transform)


@register_dataset("cifar10", augments=True)
def cifar10(folder: Path | None) -> DataSet:
    """Load CIFAR-10 (Krizhevsky, 2009), normalised and augmented as in FedMA; download it if `folder` is None."""
    place = locate(folder, CIFAR10_FOLDERS, [*CIFAR10_TRAIN, "test_batch"], "CIFAR10")
    images, labels = zip(*(read_cifar(place / file) for file in CIFAR10_TRAIN), strict=True)
    train = Examples(torch.cat(images), torch.cat(labels))
    test = Examples(*read_cifar(place / "test_batch"))
    transform = Normalise(255.0, (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255))
    return _images("cifar10", (train, test), transform, augment=crop_and_flip)


@register_dataset("cifar100", augments=True)
def cifar100(folder: Path | None) -> DataSet:
    """Load CIFAR-100 (Krizhevsky, 2009), augmented in the same way as CIFAR-10; downloads it if `folder` is None."""
    place = locate(folder, CIFAR100_FOLDERS, CIFAR100_FILES, "CIFAR100")
    parts = [Examples(*read_cifar(place / file, "fine_labels", 100)) for file in CIFAR100_FILES]
    transform = Normalise(255.0, (129.3 / 255, 124.1 / 255, 112.4 / 255), (68.2 / 255, 65.4 / 255, 70.4 / 255))
    return _images("cifar100", parts, transform, augment=crop_and_flip, classes=100)


@register_dataset("cifar10-fedhenn", augments=True)
def cifar10_fedhenn(folder: Path | None) -> DataSet:
    """Load CIFAR-10 (see `cifar10`) as FedHeNN's authors do, with ImageNet's mean and std, and padding with zeros."""
    return _by_imagenet("cifar10-fedhenn", folder, partial(crop_and_flip, reflect=False))


@register_dataset("cifar10-fedharm", augments=True)
def cifar10_fedharm(folder: Path | None) -> DataSet:
    """Load CIFAR-10 (see `cifar10`) with FedHARM's augmentation, normalised by ImageNet's mean and std."""
    return _by_imagenet("cifar10-fedharm", folder, flip_crop_brighten_blur)


def _by_imagenet(name: str, folder: Path | None, augment: Augment) -> DataSet:
    transform = Normalise(255.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return replace(load("cifar10", folder), name=name, transform=transform, augment=augment)


def grey(images: Tensor) -> Tensor:
    """Convert colour images (n, 3, height, width) uint8 to their luminance (ITU-R BT.601) in all three channels."""
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True).round().to(torch.uint8).expand_as(images)


def _with_grey(examples: Examples, shares: np.ndarray, rng: np.random.Generator) -> Examples:
    images = examples.inputs[:].clone()
    for label, share in enumerate(shares.tolist()):
        of_class = torch.nonzero(examples.labels == label)[:, 0].numpy()
        chosen = rng.permutation(of_class)[: round(share * len(of_class))]
        images[chosen] = grey(images[chosen])
    return Examples(images, examples.labels)


@register_dataset("cifar10-domains", augments=True)
def cifar10_domains(folder: Path | None) -> DataSet:
    """Load CIFAR-10 (see `cifar10`) with the colour bias of FedMA, section 3 ("Handling data bias").

    In five random classes, 95 % of the training images are grey, in the other five 5 %; half of the test images are
    grey. The partition `natural` has two clients, one for each of these halves of the classes.
    """
    return _domains("cifar10-domains", folder, 0.95)


@register_dataset("cifar10-domains-balanced", augments=True)
def cifar10_domains_balanced(folder: Path | None) -> DataSet:
    """Load CIFAR-10 (see `cifar10`) with half of each class's images grey, the control for `cifar10_domains`."""
    return _domains("cifar10-domains-balanced", folder, 0.5)


def _domains(name: str, folder: Path | None, share: float) -> DataSet:
    colourful = load("cifar10", folder)
    rng = numpy_generator(0, "domains")
    grey_classes = rng.choice(colourful.classes, colourful.classes // 2, replace=False)
    shares = np.where(np.isin(np.arange(colourful.classes), grey_classes), share, 1 - share)

    def domain(examples: Examples) -> Indices:
        return (~np.isin(examples.labels.numpy(), grey_classes)).astype(np.int64)

    return replace(
        colourful,
        name=name,
        train=_with_grey(colourful.train, shares, rng),
        test=_with_grey(colourful.test, np.full_like(shares, 0.5), rng),
        groups=Owners(domain(colourful.train), domain(colourful.test)),
    )
