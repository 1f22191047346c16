"""Reconstruction of single examples from differences between rounds and runs, by a server that knows the seed.

The node trains a linear network on 40 digits, each a 3 or an 8, with momentum, so that the steps of a round count
unequally in it. A server that knows which example is in which step solves for the gradient of each example, which is
the image, by least squares over many rounds. At a node with `allow` it does not know the batches. Here it is even told
the node's secret, and then solves for the node's groups.
"""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import nn

from fedhet.client.secret import groups_of
from fedhet.data import PublicDataset
from fedhet.flower import decode_arrays
from fedhet.learning.training import batches, grouped_batches
from fedhet.randomness import derive_seed, seed_everything, torch_generator
from fedhet.representations.packing import unpack
from fedhet.wire import Payload, Request, to_arrays
from fedhet.wire.protocol import HANDSHAKE, with_public_dataset

from .reading import TRAIN, Victim, linear, nearest

SIZE, RATE, MOMENTUM = 10, 0.01, 0.9
TRAINING = {"batch-size": SIZE, "learning-rate": RATE, "momentum": MOMENTUM, "local-epochs": 1}
SCALES = torch.linspace(1e3, 2e3, 32).double()
UNITS = PublicDataset(torch.cat([*(scale * torch.eye(64) for scale in SCALES.float()), torch.zeros(1, 64)]))
"""Public examples whose scores are the weights of a linear network, at many scales, since scores are rounded."""


def from_weights(victim, rounds):
    """Yield for each round, which starts from zero, the change of the weights (10, 64), and the initial ones."""
    zeros = Payload({"model": to_arrays({"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)})})
    for round in range(1, rounds + 1):
        reply = victim.ask("train", zeros, Request(round=round, epochs=1))
        yield torch.tensor(decode_arrays(reply["model"])["1.weight"]).double(), torch.zeros(10, 65).double()


def from_posteriors(victim, rounds):
    """Yield for each round but the first the same, from scores of `UNITS`; initial weights have the bias behind."""
    victim.ask("query", with_public_dataset(UNITS), Request(question=HANDSHAKE))
    before = None
    for round in range(1, rounds + 1):
        rows = Payload({"next-rows": {"rows": torch.arange(len(UNITS.inputs)).numpy()}})
        request = Request(round=round, epochs=1, public=UNITS.digest, expected=round - 1 if round > 1 else -1)
        scores = unpack(decode_arrays(victim.ask("train", rows, request)["scores"])).double()
        each = (scores[:-1] - scores[-1]).view(len(SCALES), 64, 10) / SCALES[:, None, None]
        after = torch.cat([each.mean(0), scores[-1:]]).T
        if before is not None:
            yield (after - before)[:, :64], before
        before = after


KINDS = {"weights": ("fedavg", from_weights, 1), "posteriors": ("feddf", from_posteriors, 2)}
"""For each kind of what leaves a node: a method, what its rounds tell, and the first round that tells something."""


def unmixed(seed, folder, kind, rounds, **node):
    """Return what is read, (units, 64), the images (n, 64), and the rows of each unit; see above."""
    method, told, first = KINDS[kind]
    settings = {"method": method, "seed": seed, **TRAINING}
    victim = Victim(seed, folder, settings, network=linear, digits=(3, 8), **node)
    changes, initial = map(torch.stack, zip(*told(victim, rounds), strict=True))
    labels, root, units = victim.labels[:TRAIN], seed, [torch.tensor([row]) for row in range(TRAIN)]
    if "allow" in node:
        secret = json.loads((folder / "nodes" / "0.json").read_text())["seed"]
        units = groups_of(labels, SIZE, torch_generator(secret, "groups"), by_class=True)
        root = derive_seed(secret, seed)
    unit_of = {row: number for number, rows in enumerate(units) for row in rows.tolist()}
    counted = torch.zeros(len(changes), len(units)).double()
    for number in range(len(changes)):
        stream = torch_generator(root, "batches", "0", first + number)
        known = grouped_batches(units, SIZE, stream) if "allow" in node else batches(TRAIN, SIZE, stream, least=SIZE)
        steps = list(known)
        for place, step in enumerate(steps):
            rest = sum(MOMENTUM**later for later in range(len(steps) - place))
            counted[number, [*{unit_of[row] for row in step.tolist()}]] += RATE * rest / len(step)
    wrong = torch.ones_like(counted)
    for _ in range(5):  # the gradient of an image is as long as its class is improbable, which the image tells
        solution = torch.linalg.lstsq(counted * wrong, changes.flatten(1), driver="gelsd").solution
        rows = solution.view(len(units), 10, 64)
        classes = rows.sum(2).argmax(1)
        images = rows[range(len(units)), classes]
        sizes = torch.tensor([len(rows) for rows in units]).double()[:, None]
        logits = torch.cat([images / sizes, torch.ones(len(units), 1)], 1) @ initial.transpose(1, 2)
        wrong = 1 - logits.softmax(2)[:, range(len(units)), classes]
    return images, victim.inputs[:TRAIN].double(), units


def from_runs(seed, folder, few, many, **node):
    """Return what prototypes of runs with more and more examples tell, (units, 64); None where a run is refused.

    The network is the one that the client starts from, which the seed tells. A mean times its number, minus that of a
    run with one example less, is the example.
    """
    seed_everything(derive_seed(seed, "initial weights", "0"))
    weight = wide()[1].weight.detach().double()
    read, before = [], {}
    for number in range(few, many):
        settings = {"method": "fedproto", "seed": seed, "samples-per-client": number, "clients": 2}
        victim = Victim(seed, folder, settings, network=wide, own_data=False, **node)
        reply = victim.ask("train", Payload(), Request(round=1, epochs=0, run=str(number)))
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
                read, images, units = unmixed(seed, Path(other), kind, 60, allow=kind)
                means = torch.stack([images[rows].mean(0) for rows in units])
                figures = before, nearest(read, images), nearest(means, images)
                found[f"rounds (`{kind}`)"].append([float(each.mean()) for each in figures])
    for attack, figures in found.items():
        yield attack, *(sum(column) / len(column) for column in zip(*figures, strict=True))
    with TemporaryDirectory() as folder:
        read = nearest(torch.tensor(load_digits().data / 16), from_runs(seeds[0], Path(folder), 150, 190))
    yield "runs (`prototypes`; refused with `allow`)", float(read.mean()), math.nan, math.nan
