"""The comparability of networks that were trained apart, image by image: `python comparability.py RUN...`.

Each RUN is the directory of a run of `local` on the configuration of FedHARM's digits, whose clients never met. For
each way to describe an image the table has the cosine between a client's description and the mean of the others' for
the same image, and how far that is above the one for different images: leave-one-out, mean over images and clients
(`fedhet.representations.descriptors.agreement`). Training cannot align what is not comparable to begin with.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedhet import config as configuration
from fedhet import population
from fedhet.data import PublicDataset
from fedhet.graphs import blocks as blocks_of
from fedhet.learning import read
from fedhet.representations.descriptors import agreement, channel_means, describe, summarised

SLOTS = (128, 256, 256, 96)
GRID = 4
Blocks = list[Tensor]


def networks_of(run: Path) -> tuple[list[nn.Module], PublicDataset, Callable[[Tensor], Tensor]]:
    """The clients' trained networks, the public dataset, and the transformation of its images."""
    config = configuration.resolve(configuration.read(run / "config.toml"), strict=False)
    public = population.public_dataset(config)
    assert public is not None, f"{run} has no public dataset"
    networks = []
    for number in range(config.clients):
        network = population.model_of(population.ClientInfo(str(number), number, config.clients, config))
        network.load_state_dict(load_file(run / "models" / f"{number}.safetensors"))
        networks.append(network.eval())
    return networks, public, population.dataset_of(config).transform


def pooled(public: Callable[[Tensor, int], Tensor]) -> Callable[[int, Tensor], Tensor]:
    """A block's activations, flattened and adaptively pooled to as many as it has slots."""

    def pooled(block: int, output: Tensor) -> Tensor:
        units = output.flatten(1)
        return public(units[:, None], min(SLOTS[block], units.shape[1]))[:, 0]

    return pooled


def moments(_: int, output: Tensor) -> Tensor:
    """Mean, standard deviation, and the roots of the third and fourth central moments of a block's activations."""
    units = output.flatten(1)
    about = units - units.mean(1, keepdim=True)
    third = about.pow(3).mean(1)
    parts = units.mean(1), about.square().mean(1).sqrt(), third.sign() * third.abs().pow(1 / 3), about.pow(4).mean(1)
    return torch.stack([*parts[:3], parts[3].pow(0.25)], 1)


def positions(_: int, output: Tensor) -> Tensor:
    """How strong activations are at each place of the image, on a grid."""
    energy = output.square().mean(1, keepdim=True)
    return F.adaptive_avg_pool2d(energy, min(GRID, energy.shape[-1])).flatten(1)


def centred(clients: Sequence[Blocks]) -> list[Blocks]:
    """Each number less its mean over the images."""
    return [[block - block.mean(0) for block in blocks] for blocks in clients]


def matched(clients: Sequence[Blocks]) -> list[Blocks]:
    """Channels in the order of the first client's that they go with: matched on half of the images, of the others."""
    half = len(clients[0][0]) // 2
    found: list[Blocks] = []
    for blocks in clients:
        ordered = []
        for own, reference in zip(blocks, clients[0], strict=True):
            one, other = (F.normalize(each[:half] - each[:half].mean(0), dim=0) for each in (reference, own))
            _, columns = linear_sum_assignment(-(one.T @ other).numpy())
            scaled = (own - own[:half].mean(0)) / (own[:half] - own[:half].mean(0)).norm(dim=0).clamp_min(1e-8)
            ordered.append(scaled[half:, torch.from_numpy(columns)])
        found.append(ordered)
    widths = [min(blocks[b].shape[1] for blocks in found) for b in range(len(found[0]))]
    return [[block[:, :width] for block, width in zip(blocks, widths, strict=True)] for blocks in found]


def relations(clients: Sequence[Blocks]) -> list[Blocks]:
    """The cosines of an image with all the others, in each client's own features: what CKA compares.

    Those with itself are left out: they are 1 for everybody, and would make the same image alike by themselves.
    """
    unit = [[F.normalize(block, dim=1) for block in blocks] for blocks in centred(clients)]
    return [[(block @ block.T).fill_diagonal_(0.0) for block in blocks] for blocks in unit]


def described(run: Path) -> dict[str, list[Blocks]]:
    """All descriptions of the shared images, by name: of each client, for each block (images, numbers)."""
    networks, public, transform = networks_of(run)
    names = [blocks_of(network, transform(public.inputs[:1])) for network in networks]

    def of_all(summary: Callable[[int, Tensor], Tensor]) -> list[Blocks]:
        return [
            summarised(net, own, public.inputs, transform, summary) for net, own in zip(networks, names, strict=True)
        ]

    largest = [
        describe(net, own, public.inputs, public.labels, SLOTS, transform)[0]
        for net, own in zip(networks, names, strict=True)
    ]
    sizes = [[block.sort(1, descending=True).values for block in blocks] for blocks in largest]
    channels = of_all(lambda _, output: channel_means(output))
    return {
        "largest gradients (the paper's)": largest,
        "the same, centred": centred(largest),
        "the same, in order of size, centred": centred(sizes),
        "average pooling, centred": centred(of_all(pooled(F.adaptive_avg_pool1d))),
        "max pooling, centred": centred(of_all(pooled(F.adaptive_max_pool1d))),
        "moments, centred": centred(of_all(moments)),
        f"energy by position ({GRID} x {GRID}), centred": centred(of_all(positions)),
        "channel means, matched to one client's": matched(channels),
        "relations to the other images (CKA)": relations(channels),
        "class posteriors (`spectral`, `fedmd`)": [
            [read(net, public.inputs, transform).softmax(1)] for net in networks
        ],
    }


def main(runs: Sequence[str]) -> None:
    """Print the table."""
    same: dict[str, list[float]] = {}
    gap: dict[str, list[float]] = {}
    for run in runs:
        for name, clients in described(Path(run)).items():
            alike, other = agreement(clients)
            same.setdefault(name, []).append(alike[-1])
            gap.setdefault(name, []).append(alike[-1] - other[-1])
    print("| description of an image | same image | above different images |\n| --- | ---: | ---: |")
    for name, values in gap.items():
        spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
        print(f"| {name} | {mean(same[name]):.3f} | {mean(values):+.3f}{spread} |")


if __name__ == "__main__":
    main(sys.argv[1:])
