"""Fashion-MNIST of clients with labels for a tenth of their images, for a comparison of `fedharm.toml`.

The environment variable `FASHION_MNIST` names the folder with the data set's files.
"""

import os
from typing import Any

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, pad
from torchvision.datasets import FashionMNIST

from fedhet import models

IMAGES, LABELS, PUBLIC = 500, 50, 250
"""Training images of a client, how many of them have a label, and labelled images that all share."""

WITHOUT_LABELS = ("fedsimclr", "fedsimsiam", "fedca", "fedcon")
"""Methods that train on images without labels, too."""


def data(client: Any) -> dict[str, Any]:
    """Return a client's images (n, 1, 16, 16), of which methods that need labels get only the labelled ones."""
    config = client.config
    inputs, labels = _images(train=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(config.seed))
    start = PUBLIC + client.partition_id * IMAGES
    public, mine = order[:PUBLIC], order[start : start + IMAGES]
    known = labels[mine].clone()
    known[LABELS:] = -1
    used = IMAGES if config.method in WITHOUT_LABELS else LABELS
    return {
        "train": (inputs[mine[:used]], known[:used]),
        "test": _images(train=False),
        "public": (inputs[public], labels[public]),
    }


def _images(*, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    images = FashionMNIST(os.environ["FASHION_MNIST"], train=train)
    return avg_pool2d(pad(images.data[:, None] / 255, (2, 2, 2, 2)), 2), images.targets


def model(client: Any) -> nn.Module:
    """Return a LeNet-5 without the name of an architecture, equal at all clients."""
    return models.build("lenet-10", (1, 16, 16), 10)
