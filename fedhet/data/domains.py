"""CIFAR-10 with a skew of domains: some classes mostly grey, the others mostly in colour."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhet.data.examples import DataSet, Examples, Groups, Indices
from fedhet.data.registry import load, register_dataset
from fedhet.randomness import numpy_generator

DOMAINS = ("grey", "colour")


def grey(images: Tensor) -> Tensor:
    """Luminance (ITU-R BT.601) of colour images (n, 3, height, width) uint8, repeated in the three channels."""
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True).round().to(torch.uint8).expand_as(images)


def _with_grey(examples: Examples, share: dict[int, float], rng: np.random.Generator) -> Examples:
    """Turn the given share of each class's images grey, chosen at random."""
    images = examples.inputs[:].clone()
    for label, fraction in share.items():
        of_class = torch.nonzero(examples.labels == label)[:, 0].numpy()
        chosen = rng.permutation(of_class)[: round(fraction * len(of_class))]
        images[chosen] = grey(images[chosen])
    return Examples(images, examples.labels)


@register_dataset("cifar10-domains", augments=True)
def cifar10_domains(folder: Path | None, *, skew: float = 0.95, domain_seed: int = 0) -> DataSet:
    """The skewed CIFAR-10 of FedMA, section 3 ("Handling data bias").

    A random half of the classes has 95 % of its training images grey, the other half 5 %; half of each class's test
    images are grey. The natural partition has two clients: the classes where grey dominates, the others.

    Args:
        folder: Where CIFAR-10 is.
        skew: Share of the dominant domain in a class's training images.
        domain_seed: Decides which classes and images are grey; not the run's seed, so that runs share one data set.

    Raises:
        DataError: As for `cifar10`.
    """
    colourful = load("cifar10", folder)
    rng = numpy_generator(domain_seed, "domains")
    grey_classes = set(rng.choice(colourful.classes, colourful.classes // 2, replace=False).tolist())
    train_share = {label: skew if label in grey_classes else 1 - skew for label in range(colourful.classes)}
    test_share = dict.fromkeys(range(colourful.classes), 0.5)

    def domain(examples: Examples) -> Indices:
        return (~np.isin(examples.labels.numpy(), list(grey_classes))).astype(np.int64)

    return replace(
        colourful,
        name="cifar10-domains",
        train=_with_grey(colourful.train, train_share, rng),
        test=_with_grey(colourful.test, test_share, rng),
        groups=Groups(DOMAINS, domain(colourful.train), domain(colourful.test)),
    )
