"""Which examples a client trained on, guessed from what it sends: the figures of README.md.

`python tests/robustness/membership.py`. Five clients train on 60 digits each. The server holds these and 300 others,
which nobody trained on, and gives every one of them a score of how likely it is one of a client's; the figure is the
area under the curve, the share of pairs in which the client's own example has the higher score: 0.5 is no better than
a coin. Where examples are described, not weights, the 600 are the public dataset, in which examples of clients should
not be.
"""

import logging
import sys
import tempfile

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import fedhet
from fedhet import models
from fedhet.algorithms.alignment.targets import unpack
from fedhet.client.app import make_client_app
from fedhet.engines.running import LocalGrid
from fedhet.flower.messages import decode_arrays
from fedhet.messages import load_into
from fedhet.testing import Tampering

CLIENTS, OWN, OTHERS, TEST = 5, 60, 300, 300
COMMON = {
    "fraction_train": 1.0,
    "rounds": 10,
    "local_epochs": 5,
    "closing_epochs": 0,
    "batch_size": 10,
    "optimizer": "sgd",
    "momentum": 0.9,
}
PEERS = {"fedhenn.rad-size": CLIENTS * OWN + OTHERS, "fedhenn.rad-batch": 128}
KINDS = {
    "weights": ("FedAvg", "model", {}),
    "features": ("FedHeNN", "features", PEERS | {"fedhenn.target": "kernel"}),
    "posteriors": ("FedHeNN", "posteriors", PEERS | {"fedhenn.target": "spectral"}),
}


def model(client=None):
    return models.build("cnn-2-2", (1, 8, 8), 10)


class Digits:
    """The digits in an order of a seed's: the clients', others that nobody has, and some to test on."""

    def __init__(self, seed):
        order = np.random.default_rng(seed).permutation(1797)[: CLIENTS * OWN + OTHERS + TEST]
        digits = load_digits()
        self.inputs = torch.tensor(digits.images[order] / 16).float().unsqueeze(1)
        self.labels = torch.tensor(digits.target[order])
        self.public = slice(0, CLIENTS * OWN + OTHERS)

    def own(self, client):
        return slice(OWN * int(client), OWN * (int(client) + 1))

    def data(self, client):
        own, test = self.own(client.partition_id), slice(self.public.stop, None)
        train, test = ((self.inputs[rows], self.labels[rows]) for rows in (own, test))
        return {"train": train, "test": test, "public": self.inputs[self.public]}


def sent(kind, digits, seed):
    """Each client's last answer, with the public rows that it is of; and the accuracy on other digits."""
    method, group, own = KINDS[kind]
    last = {}

    def look(message, client, reply):
        if message.metadata.message_type == "train" and group in reply.content:
            rows = decode_arrays(message.content["next-rad"])["rows"] if "next-rad" in message.content else None
            last[client] = decode_arrays(reply.content[group]), rows

    app = Tampering(after=look)
    app.app = make_client_app(model=model, data=digits.data)
    with tempfile.TemporaryDirectory() as folder:
        strategy = getattr(fedhet, method)(learning_rate=0.03, seed=seed, state_dir=folder, **COMMON, **own)
        result = strategy.start(LocalGrid(app, CLIENTS))
    *_, metrics = result.train_metrics_clientapp.values()
    return last, metrics["trained-accuracy"]


def scores_of(kind, arrays, rows, digits):
    """How likely each of the public dataset's digits is one that the client trained on; higher is likelier."""
    inputs, labels = digits.inputs[digits.public], digits.labels[digits.public]
    if kind == "weights":  # the smaller the loss
        network = model()
        load_into(network.state_dict(), arrays)
        with torch.no_grad():
            return -torch.nn.functional.cross_entropy(network.eval()(inputs), labels, reduction="none")
    told = torch.empty_like(unpack(arrays))
    told[torch.from_numpy(rows).long()] = unpack(arrays)
    if kind == "posteriors":  # the surer of the right class
        return told.gather(1, labels[:, None])[:, 0]
    means = torch.stack([told[labels == number].mean(0) for number in range(10)])
    far = torch.cdist(told, means)  # the nearer to its own class than to the next
    own = far.gather(1, labels[:, None])[:, 0]
    return far.scatter(1, labels[:, None], torch.inf).min(1).values - own


def attack(kind, seed):
    """The mean over clients of the area under the curve, and the clients' accuracy on other digits."""
    digits = Digits(seed)
    told, accuracy = sent(kind, digits, seed)
    found = []
    for client, (arrays, rows) in told.items():
        scores = scores_of(kind, arrays, rows, digits).numpy()
        own, others = scores[digits.own(client)], scores[CLIENTS * OWN :]
        found.append(roc_auc_score([1] * len(own) + [0] * len(others), np.concatenate([own, others])))
    return float(np.mean(found)), accuracy


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    seeds = range(int(sys.argv[1]) if sys.argv[1:] else 5)
    print("| kind | area under the curve | the clients' accuracy on other digits |")
    print("| --- | ---: | ---: |")
    for kind in KINDS:
        areas, accuracies = zip(*(attack(kind, seed) for seed in seeds), strict=True)
        spread = f" ± {np.std(areas, ddof=1):.3f}" if len(areas) > 1 else ""
        print(f"| `{kind}` | {np.mean(areas):.3f}{spread} | {np.mean(accuracies):.3f} |", flush=True)
