"""MNIST and CIFAR-10, from files in the layouts that torchvision and their authors use."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fedhet.data.examples import DataSet, Examples
from fedhet.data.files import cache_folder, check_labels, check_may_download, locate, read_cifar, read_idx
from fedhet.data.registry import load, register_dataset
from fedhet.data.transforms import Normalise, crop_and_flip, flip_crop_brighten_blur
from fedhet.errors import DataError
from fedhet.task import get_task

MNIST_FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
MNIST_FOLDERS = ("", "MNIST/raw", "mnist/MNIST/raw")
CIFAR10_TRAIN = [f"data_batch_{batch}" for batch in range(1, 6)]
CIFAR10_FILES = [*CIFAR10_TRAIN, "test_batch"]
CIFAR10_FOLDERS = ("", "cifar-10-batches-py", "cifar10/cifar-10-batches-py")


def _found(folder: Path | None, subfolders: Sequence[str], files: Sequence[str], torchvision_name: str) -> Path:
    """The folder with the files; without a folder from the user, the cache folder, filled by torchvision if need be."""
    if folder is not None:
        return locate(folder, subfolders, files, torchvision_name)
    cache = cache_folder()
    try:
        return locate(cache, subfolders, files, torchvision_name)
    except DataError:
        check_may_download(torchvision_name, cache)
        _download(cache, torchvision_name)
    return locate(cache, subfolders, files, torchvision_name)


def _download(cache: Path, torchvision_name: str) -> None:
    try:
        import torchvision  # late: only a download needs it, and it fails where its build is not torch's

        getattr(torchvision.datasets, torchvision_name)(root=cache, download=True)
    except (OSError, RuntimeError, ImportError) as error:
        raise DataError(
            f"{torchvision_name} is not in {cache} and cannot be downloaded ({' '.join(str(error).split())}); "
            "if you have it elsewhere, name its folder: --data DIR"
        ) from error


@register_dataset("mnist")
def mnist(folder: Path | None) -> DataSet:
    """MNIST (LeCun et al., 1998): 60,000 and 10,000 grey images of 28 x 28 of 10 digits, idx files, also packed.

    Raises:
        DataError: The files are missing or damaged, or cannot be downloaded.
    """
    place = _found(folder, MNIST_FOLDERS, MNIST_FILES, "MNIST")
    parts = []
    for part in ("train", "t10k"):
        images, labels = (read_idx(place / f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
            raise DataError(
                f"{place}/{part}-*: expected images of 28 x 28 and a label each, got {tuple(images.shape)} "
                f"and {tuple(labels.shape)}"
            )
        check_labels(place / f"{part}-labels-idx1-ubyte", labels, 10)
        parts.append(Examples(images[:, None], labels.long()))
    return DataSet(
        name="mnist",
        train=parts[0],
        test=parts[1],
        classes=10,
        task=get_task("classification"),
        input_shape=(1, 28, 28),
        transform=Normalise(255.0, mean=(0.1307,), std=(0.3081,)),
    )


@register_dataset("cifar10", augments=True)
def cifar10(folder: Path | None) -> DataSet:
    """CIFAR-10 (Krizhevsky, 2009): 50,000 and 10,000 colour images of 32 x 32 of 10 classes, python version.

    Mean, standard deviation and augmentation (reflected borders of 4, random crop, flip) are those of FedMA's code.

    Raises:
        DataError: The files are missing or damaged, or cannot be downloaded.
    """
    place = _found(folder, CIFAR10_FOLDERS, CIFAR10_FILES, "CIFAR10")
    images, labels = zip(*(read_cifar(place / file) for file in CIFAR10_TRAIN), strict=True)
    return DataSet(
        name="cifar10",
        train=Examples(torch.cat(images), torch.cat(labels)),
        test=Examples(*read_cifar(place / "test_batch")),
        classes=10,
        task=get_task("classification"),
        input_shape=(3, 32, 32),
        transform=Normalise(
            255.0,
            mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
            std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
        ),
        augment=crop_and_flip,
    )


@register_dataset("cifar10-fedhenn", augments=True)
def cifar10_fedhenn(folder: Path | None) -> DataSet:
    """CIFAR-10 as the code of FedHeNN's authors has it: ImageNet's mean and standard deviation, black borders.

    Raises:
        DataError: As for `cifar10`.
    """
    return replace(
        load("cifar10", folder),
        name="cifar10-fedhenn",
        transform=Normalise(255.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        augment=partial(crop_and_flip, reflect=False),
    )


@register_dataset("cifar10-fedharm", augments=True)
def cifar10_fedharm(folder: Path | None) -> DataSet:
    """CIFAR-10 with FedHARM's augmentation, and ImageNet's mean and standard deviation as in its authors' code.

    Raises:
        DataError: As for `cifar10`.
    """
    return replace(
        load("cifar10", folder),
        name="cifar10-fedharm",
        transform=Normalise(255.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        augment=flip_crop_brighten_blur,
    )
