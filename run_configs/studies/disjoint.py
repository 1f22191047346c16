"""Digits of clients with disjoint label sets and heads of 2, 3 and 5 outputs, for a comparison of `fedhenn.toml`."""

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from fedhet import models

LABELS = ((0, 1), (2, 3, 4), (5, 6, 7, 8, 9))
"""The label sets, assigned to clients in turn."""

PUBLIC, TEST, EXAMPLES = 500, 355, 25


def data(client: Any) -> dict[str, Any]:
    """Return a client's training and test examples of its own labels, and the unlabelled images of all clients."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(client.config.seed).permutation(len(images))
    images = torch.from_numpy(images[order]).float().reshape(-1, 1, 8, 8) / 16
    labels, own = torch.from_numpy(labels[order]), LABELS[client.partition_id % len(LABELS)]
    mine = torch.isin(labels, torch.tensor(own)).nonzero()[:, 0]
    test, rest = mine[(mine >= PUBLIC) & (mine < PUBLIC + TEST)], mine[mine >= PUBLIC + TEST]
    first = client.partition_id // len(LABELS) * EXAMPLES
    train = rest[first : first + EXAMPLES]
    parts = {name: (images[rows], labels[rows] - own[0]) for name, rows in (("train", train), ("test", test))}
    return {**parts, "public": images[:PUBLIC]}


def model(client: Any) -> nn.Module:
    """Return one of five CNNs, whose head has an output for each label of the client."""
    family = models.expand("cnn-family")
    labels = LABELS[client.partition_id % len(LABELS)]
    return models.build(family[client.partition_id % len(family)], (1, 8, 8), len(labels))
