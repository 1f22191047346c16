"""How much of a private image a server reads from losses and scores that it is sent.

`python tests/robustness/reading.py [SEEDS]`. A node holds digits and deploys an MLP; the server skips the handshake,
sends `evaluate` messages with weights of its choice and looks at the losses that come back. Two attacks:

- `pixel by pixel`: the network's outputs are one pixel, 64 times, which reads an image where a loss is of one example;
- `one example`: hidden units that only one example of the part reaches, by a threshold that is searched for first.

In a third one, `last batch`, a node without a policy deploys a linear network and tells posteriors. A weight decay of
1 / learning-rate makes training forget all batches but the last one, whose examples by class are the weights, which the
scores of unit vectors are. `unmixing.py` has attacks by differences between rounds and runs, at a node without a policy
and at one with `allow`.
"""

import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from sklearn.datasets import load_digits
from torch import nn

from fedhet.algorithms.alignment.targets import unpack
from fedhet.client.app import make_client_app
from fedhet.config import configuration
from fedhet.data import PublicDataset
from fedhet.flower.grid import FIRST_NODE
from fedhet.flower.insides import RUN_ID, be_server, identify
from fedhet.flower.messages import Encoder, decode_arrays, write_request
from fedhet.messages import Payload, Request, to_arrays
from fedhet.messages.protocol import HANDSHAKE, with_public_dataset

TRAIN, TEST, HIDDEN = 40, 30, 4
AMPLIFIED = 1e4


def model(client=None):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def linear(client=None):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Victim:
    """A node elsewhere with digits of its own; `loss` is what a server is told under weights of its choice."""

    def __init__(self, seed, folder, settings=None, *, network=model, own_data=True, digits=range(10), **node):
        images, classes = load_digits(return_X_y=True)
        pool = np.flatnonzero(np.isin(classes, digits))
        chosen = np.random.default_rng(seed).permutation(pool)[: TRAIN + TEST]
        self.inputs, self.labels = torch.tensor(images[chosen] / 16).float(), torch.tensor(classes[chosen])
        self.app = make_client_app(model=network, data=self._data if own_data else None)
        chosen = {"method": "fedavg", "batch-norm": "local", "test-on": "local", "threads-per-client": 1}
        self.config = configuration.resolve({**chosen, **(settings or {})}, strict=False)
        node_config = {"partition-id": 0, "num-partitions": 2, "state-dir": str(folder), **node}
        self.context = Context(RUN_ID, FIRST_NODE, node_config, RecordDict(), {})
        self.refusals = []

    def _data(self, client):
        return (self.inputs[:TRAIN], self.labels[:TRAIN]), (self.inputs[TRAIN:], self.labels[TRAIN:])

    @property
    def evaluated(self):
        """The images of the part whose losses are asked for."""
        return self.inputs[TRAIN:]

    def loss(self, first, bias, second, *, part="received"):
        """The loss of a part of the data; None where the node tells none."""
        network = model()
        with torch.no_grad():
            for tensor, values in zip(network.parameters(), (first, bias, second, torch.zeros(10)), strict=True):
                tensor.copy_(values)
        sent = Payload({"model": to_arrays(network.state_dict())})
        reply = self.ask("evaluate", sent, Request(round=1, evaluate=True))
        return None if reply is None else reply["metrics"].get(f"{part}-loss")

    def ask(self, type, payload, request):
        """The records of the reply to a message; None for a refusal."""
        record = Encoder()(payload)
        write_request(record, request, self.config.text)
        be_server()
        message = Message(record, self.context.node_id, type, group_id="1")
        identify(message, count(1))
        reply = self.app(message, self.context).content
        if "refusal" in reply["report"]:
            self.refusals.append(str(reply["report"]["refusal"]))
            return None
        return reply


def pixel_by_pixel(victim, part="received"):
    """An image by 64 losses: logit 0 is `AMPLIFIED` times a pixel, so that the loss is, but for the label, linear."""
    image = torch.zeros(64)
    second = torch.zeros(10, HIDDEN)
    second[0, 0] = 30.0
    for pixel in range(64):
        first = torch.zeros(HIDDEN, 64)
        first[0, pixel] = 1.0
        loss = victim.loss(first, torch.zeros(HIDDEN), second, part=part)
        if loss is None:
            return None
        image[pixel] = loss
    return image


def one_example(victim):
    """An image by hidden units that only the example furthest in a direction reaches, and that image."""
    direction = torch.randn(64, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    nothing = victim.loss(torch.zeros(HIDDEN, 64), torch.zeros(HIDDEN), torch.zeros(10, HIDDEN))
    if nothing is None:
        return None, None

    def told(threshold, steep=AMPLIFIED):
        """The loss where a unit is open for examples beyond a threshold."""
        first, bias, second = torch.zeros(HIDDEN, 64), torch.zeros(HIDDEN), torch.zeros(10, HIDDEN)
        first[0], bias[0], second[0, 0] = direction, -threshold, steep
        return victim.loss(first, bias, second)

    low, high = -8.0, 8.0
    for _ in range(24):  # the furthest example
        middle = (low + high) / 2
        low, high = (middle, high) if told(middle) > nothing + 1e-3 else (low, middle)
    threshold, gate = high - 0.02, 200.0
    second = torch.zeros(10, HIDDEN)
    second[0, 0] = AMPLIFIED
    first, bias = torch.zeros(HIDDEN, 64), torch.zeros(HIDDEN)
    first[0], bias[0] = gate * direction, -gate * threshold
    base = victim.loss(first, bias, second)
    image = torch.zeros(64)
    for pixel in range(64):
        opened = first.clone()
        opened[0, pixel] += 1.0
        image[pixel] = victim.loss(opened, bias, second) - base
    return image, victim.evaluated[int((victim.evaluated @ direction).argmax())]


def last_batch(seed, folder):
    """The images that scores tell of a last batch, (10, 64) by class, and those that the node trains on, (n, 64)."""
    forgetting = {"method": "feddf", "batch-size": 10, "learning-rate": 0.5, "weight-decay": 2.0}
    victim = Victim(seed, folder, forgetting, network=linear)
    units = PublicDataset(torch.cat([torch.eye(64), torch.zeros(1, 64)]))
    victim.ask("query", with_public_dataset(units), Request(question=HANDSHAKE))
    rows = Payload({"next-rows": {"rows": np.arange(len(units))}})
    reply = victim.ask("train", rows, Request(round=1, epochs=1, public=units.digest))
    scores = unpack(decode_arrays(reply["scores"]))
    weights = (scores[:64] - scores[64]).T
    return weights - weights[weights.sum(1).argmin()], victim.inputs[:TRAIN]  # a class that the batch lacks


def correlation(one, other):
    """Pearson's, of two images."""
    return float(np.corrcoef(one.numpy(), other.numpy())[0, 1])


def nearest(read, images):
    """The largest correlation of any image that was read, where it is not blank, with each private one, (n,)."""
    shown = read[read.std(1) > 0].double()
    return torch.corrcoef(torch.cat([shown, images.double()]))[: len(shown), len(shown) :].abs().amax(0)


def selected(seeds) -> Iterator[tuple[str, float, float]]:
    """For each attack by losses the correlation with a private image of what it reads, and of the mean image."""
    found = {"pixel by pixel": [], "one example": []}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            victim = Victim(seed, Path(folder))
            mean = victim.evaluated.mean(0)
            read = pixel_by_pixel(victim)
            found["pixel by pixel"] += [
                (correlation(read, image), correlation(mean, image)) for image in victim.evaluated
            ]
            read, image = one_example(victim)
            found["one example"].append((correlation(read, image), correlation(mean, image)))
    for attack, pairs in found.items():
        yield attack, *(float(np.mean(column)) for column in zip(*pairs, strict=True))


if __name__ == "__main__":
    from tests.robustness.unmixing import compared  # which needs what is above

    torch.set_num_threads(1)
    seeds = range(int(sys.argv[1]) if sys.argv[1:] else 5)
    print("| attack | correlation with a private image | of the mean of the node's images |\n| --- | ---: | ---: |")
    for attack, read, mean in selected(seeds):
        print(f"| {attack} | {read:.3f} | {mean:.3f} |", flush=True)
    print("\n| attack | without a policy | with `allow` | mean of the image's group |\n| --- | ---: | ---: | ---: |")
    for attack, *figures in compared(seeds):
        print(
            f"| {attack} | {' | '.join('refused' if each is None else f'{each:.3f}' for each in figures)} |", flush=True
        )
