"""Reconstruction of single examples from differences between rounds and runs, by a server that knows the seed.

The node trains a linear network on 40 digits, each a 3 or an 8, with momentum, so that the steps of a round count
unequally in it. A server that knows which example is in which step fits images to the changes of the weights by
simulating the training. At a node with `allow` it does not know the batches. Here it is even told the node's secret.
"""

import json
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from fedhet.algorithms.alignment.targets import unpack, unpack_all
from fedhet.client.secret import groups_of
from fedhet.data import PublicDataset
from fedhet.flower.messages import decode_arrays
from fedhet.messages import Payload, Request, to_arrays
from fedhet.messages.protocol import HANDSHAKE, with_public_dataset
from fedhet.training.training import batches, grouped_batches
from fedhet.utils.randomness import SecretStream, derive_seed, seed_everything, torch_generator

from .reading import TRAIN, Victim, nearest

SIZE, RATE, MOMENTUM = 10, 0.01, 0.9
TRAINING = {"batch-size": SIZE, "learning-rate": RATE, "momentum": MOMENTUM, "local-epochs": 1}
SCALES = torch.linspace(1, 2, 32)
LARGEST = 50.0  # within what a node with a policy accepts as public inputs, twice this
UNITS = PublicDataset(torch.cat([*(LARGEST * scale * torch.eye(64) for scale in SCALES), torch.zeros(1, 64)]))
"""Public examples whose outputs are the weights of a linear network, at many scales, since outputs are rounded."""
LABELLED = PublicDataset(
    UNITS.inputs.repeat(10, 1) * (10 / LARGEST), torch.arange(10).repeat_interleave(len(UNITS.inputs))
)
"""The same once for each class, at scales where float32 tells improbable classes apart."""
BLOCK = {"fedharm.blocks": "1", "fedharm.slots": "10", "optimizer": "sgd", "lr-schedule": "constant"}
KERNELS = {"fedhenn.target": "kernel", "representation": "1", "weight-decay": 0.0}
"""Settings with which the outputs of the last layer are sent as representations."""


def linear(client=None):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))


def from_weights(victim, rounds):
    """Yield the weights (10, 64) before and after each round, which all start from zero."""
    zeros = torch.zeros(10, 64)
    for reply in replies(victim, Payload({"model": to_arrays({"1.weight": zeros})}), rounds):
        yield zeros.double(), torch.tensor(decode_arrays(reply["model"])["1.weight"]).double()


def from_outputs(request, name):
    """Return a function that yields the same for each round but the first, from outputs for `UNITS`, sent as `name`."""

    def told(victim, rounds):
        rows = Payload({request: {"rows": torch.arange(len(UNITS.inputs)).numpy()}})
        sent = replies(victim, rows, rounds, UNITS)
        yield from pairwise(weights_of(unpack(decode_arrays(reply[name]))) for reply in sent)

    return told


def from_descriptors(victim, rounds):
    """Yield the same from descriptors of `LABELLED`, whose first slot is the output of the label."""
    told = replies(victim, Payload(values={"tell": True}), rounds, LABELLED)
    slots = (unpack_all(decode_arrays(reply["sent"]), 1)[0][:, 0] for reply in told)
    yield from pairwise(weights_of(first.view(10, -1).T, 10) for first in slots)


def replies(victim, payload, rounds, public=None):
    """Yield the node's replies to one message of training after another."""
    further = {"public": public.digest} if public else {}
    if public:
        victim.ask("query", with_public_dataset(public), Request(question=HANDSHAKE))
    for round in range(1, rounds + 1):
        further |= {"expected": round - 1} if public and round > 1 else {}
        yield victim.ask("train", payload, Request(round=round, epochs=1, **further))


def weights_of(outputs, scale=LARGEST):
    """Return the weights (10, 64) that outputs (n, 10) for units at these scales tell."""
    outputs = outputs.double()
    each = (outputs[:-1] - outputs[-1]).view(len(SCALES), 64, 10) / (scale * SCALES.double()[:, None, None])
    return each.mean(0).T


KINDS = {
    "weights": ("fedavg", {}, from_weights, 1),
    "posteriors": ("feddf", {}, from_outputs("next-rows", "scores"), 2),
    "features": ("fedhenn", KERNELS, from_outputs("next-rad", "features"), 2),
    "descriptors": ("fedharm", BLOCK, from_descriptors, 2),
}
"""For each kind: a method that sends it, its settings, what its rounds tell, and the first round that tells it."""


def unmixed(seed, folder, kind, rounds, **node):
    """Return what is read, (n, 64), the images (n, 64), and the rows of each of the node's groups; see above."""
    method, further, told, first = KINDS[kind]
    victim = Victim(
        seed, folder, {"method": method, "seed": seed, **TRAINING, **further}, network=linear, digits=(3, 8), **node
    )
    before, after = map(torch.stack, zip(*told(victim, rounds), strict=True))
    images, labels, groups = victim.inputs[:TRAIN].double(), victim.labels[:TRAIN], []
    if "allow" in node:
        secret = json.loads((folder / "nodes" / "0.json").read_text())["seed"]
        groups = groups_of(labels, SIZE, SecretStream.of(secret, "groups"), by_class=True)
    steps = []
    for number in range(len(before)):
        purpose = "batches", "0", first + number
        if groups:
            order = grouped_batches(groups, SIZE, SecretStream.of(secret, seed, *purpose))
        else:
            order = batches(TRAIN, SIZE, torch_generator(seed, *purpose), least=SIZE)
        shares = torch.zeros(TRAIN, TRAIN).double()  # more steps than any round has
        for place, rows in enumerate(order):
            shares[place, rows] = 1 / len(rows)
        steps.append(shares)
    return fitted(before, after - before, torch.stack(steps), F.one_hot(labels, 10).double()), images, groups


def fitted(initial, changes, steps, labels):
    """Return the images (n, 64) with which training from the initial weights changes them so, by least squares.

    Args:
        initial: (rounds, 10, 64) weights before each round.
        changes: (rounds, 10, 64) how a round changes them.
        steps: (rounds, steps, n) the weight of each image's loss in each step.
        labels: (n, 10) of 0 and 1.
    """
    images = torch.zeros(len(labels), 64, dtype=torch.float64, requires_grad=True)
    used = [place for place in range(steps.shape[1]) if steps[:, place].any()]
    optimizer = torch.optim.LBFGS([images], max_iter=400, history_size=20, line_search_fn="strong_wolfe")

    def distance():
        optimizer.zero_grad()
        change, velocity = torch.zeros_like(initial), torch.zeros_like(initial)
        for place in used:
            wrong = (images @ (initial + change).transpose(1, 2)).softmax(2) - labels
            gradient = (wrong * steps[:, place, :, None]).transpose(1, 2) @ images
            velocity = MOMENTUM * velocity + gradient
            change = change - RATE * velocity
        loss = (change - changes).square().sum() / changes.square().sum()
        loss.backward()
        return loss

    optimizer.step(distance)
    return images.detach()


def from_runs(seed, folder, few, many, **node):
    """Return what prototypes of runs with more and more examples tell, (units, 64); None where a run is refused.

    The network is the one that the client starts from, which the seed tells. A mean times its number, minus that of a
    run with one example less, is the example.
    """
    seed_everything(derive_seed(seed, "initial weights", "0"))
    weight = wide()[1].weight.detach().double()
    read, before = [], {}
    for number in range(few, many):
        settings = {"method": "fedproto", "seed": seed, "samples-per-client": number, "clients": 2, "local-epochs": 0}
        victim = Victim(seed, folder, settings, network=wide, own_data=False, **node)
        reply = victim.ask("train", Payload(), Request(round=1, run=str(number)))
        if reply is None:
            return None
        sent = {name: torch.tensor(array) for name, array in decode_arrays(reply["prototypes"]).items()}
        sums = {int(c): m.double() * n for c, m, n in zip(sent["classes"], sent["means"], sent["counts"], strict=True)}
        for label in {*sums} & {*before}:
            if (difference := sums[label] - before[label]).abs().max() > 1e-3:
                read.append(torch.linalg.solve(weight, difference))
        before = sums
    return torch.stack(read)


def wide(client=None):
    """Return a network whose representation tells its input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64, bias=False), nn.Linear(64, 10))


def compared(seeds):
    """Yield for each attack the mean correlation of a private image with what is read nearest to it.

    Yields the attack's name, the figure at a node without a policy, the one at a node with `allow`, and that of the
    mean of the image's group in the place of what is read.
    """
    found = {f"rounds (`{kind}`)": [] for kind in KINDS}
    for seed in seeds:
        for kind in KINDS:
            with TemporaryDirectory() as one, TemporaryDirectory() as other:
                before = nearest(*unmixed(seed, Path(one), kind, 60)[:2])
                read, images, groups = unmixed(seed, Path(other), kind, 60, allow=kind)
                means = torch.stack([images[rows].mean(0) for rows in groups])
                figures = before, nearest(read, images), nearest(means, images)
                found[f"rounds (`{kind}`)"].append([float(each.mean()) for each in figures])
    for attack, figures in found.items():
        yield attack, *(sum(column) / len(column) for column in zip(*figures, strict=True))
    with TemporaryDirectory() as folder:
        read = nearest(torch.tensor(load_digits().data / 16), from_runs(seeds[0], Path(folder), 150, 190))
    yield "runs (`prototypes`; refused with `allow`)", float(read.mean()), None, None
