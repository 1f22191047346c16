"""pFedHN's hypernetwork, which maps an embedding of each client to the client's weights (Shamsian et al., ICML 2021).

    f_i = MLP(v_i),    theta_i = b + s * reshape((C_a diag(f_i)) W)

v_i is the embedding of client i, and a is its architecture. In the paper, the head of an architecture is a matrix with
a row for each weight. Here weights are generated in chunks of c weights: row j of C_a (chunks x width) weights the
features for chunk j, and W (width x c) is shared by all architectures. The base b and the scale s are fixed (see
`begin_of`). Embeddings start close together, because clients with distant embeddings hardly learn from each other.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedhet.algorithms.hypernets.design import scale_of
from fedhet.models.copies import Start, starts_of
from fedhet.utils.randomness import seeded, torch_generator

SPREAD = 0.1  # standard deviation of initial embeddings, small enough for clients to start with similar weights
VECTORS = 0.1  # scale s of arrays with one axis, such as biases and weights of normalisation layers
FAR, SMALL = 3.0, 2.0  # ratio beyond which Kaiming's scale does not suit a network, and small outputs (`calibrated`)
LEAST = 0.1  # an array that is a constant c in a new network has s = VECTORS * max(|c|, LEAST * Kaiming's scale)


@dataclass(frozen=True)
class PersonalHypernetwork:
    """pFedHN's hypernetwork; `write` adds the parameters for new clients and new architectures to `tensors`.

    `tensors` has the parameters by name, and `seed` determines their initial values. Clients' embeddings have the width
    `embedding`, the MLP has `layers` hidden layers of width `hidden`, and `chunk` weights are generated at once.
    """

    tensors: dict[str, Tensor]
    seed: int
    embedding: int
    hidden: int = 100
    layers: int = 3
    chunk: int = 1024

    def write(
        self,
        client: str,
        shapes: Mapping[str, tuple[int, ...]],
        starts: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Generate the weights of a client's network, by name, as differentiable float32 tensors.

        `shapes` has the arrays' shapes by name; clients with equal `shapes` share all but their embeddings. An array is
        base + scale * generated values; `starts` has (base, scale) by name (default: `begin_of(name, shape)`).
        """
        features = self._features(client)
        first = replace(self, tensors={})._features(client).detach() if starts else features
        size = float(first.square().mean().sqrt()) if starts else 1.0
        sizes = [math.prod(shape) for shape in shapes.values()]
        architecture = sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]
        chosen = self._drawn(f"chunks/{architecture}", (math.ceil(sum(sizes) / self.chunk), self.hidden), 1.0)
        tile = self._drawn("head", (self.hidden, self.chunk), self.hidden**-0.5)
        flat = ((features * chosen) @ tile).flatten()[: sum(sizes)]
        written = {}
        for (name, shape), piece in zip(shapes.items(), flat.split(sizes), strict=True):
            base, scale = starts.get(name) or begin_of(name, shape)
            written[name] = base + scale / size * piece.view(shape)
        return written

    def _features(self, client: str) -> Tensor:
        features = self._drawn(f"embedding/{client}", (1, self.embedding), SPREAD)
        for layer in range(self.layers + 1):
            if layer:
                features = features.relu()
            fan_in = features.shape[1]
            # The last layer has no rectifier, so a variance of 1 / fan-in keeps the scale.
            gain = 2.0 if layer < self.layers else 1.0
            weight = self._drawn(f"mlp/{layer}/weight", (fan_in, self.hidden), math.sqrt(gain / fan_in))
            bias = self._drawn(f"mlp/{layer}/bias", (self.hidden,), 0.0 if layer else math.sqrt(gain))
            features = features @ weight + bias
        return features

    def _drawn(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        if name not in self.tensors:
            self.tensors[name] = std * torch.randn(shape, generator=torch_generator(self.seed, "pfedhn", name))
            self.tensors[name].requires_grad_()
        return self.tensors[name]


def begin_of(name: str, shape: tuple[int, ...], own: Start | None = None) -> tuple[float, float]:
    """Return (base, scale) of an array, which is generated as base + scale * the hypernetwork's output.

    By default, the base is 1 for weights of normalisation layers, else 0; the scale is Kaiming's sqrt(2 / fan-in) or,
    for vectors, 0.1. With `own`, the mean and standard deviation of the array in a new network, the scale is the
    standard deviation unless Kaiming's is close (`scale_of`), and the base is the mean if its magnitude exceeds the
    standard deviation, else 0. If the array is constant, the base is the constant, and the scale is a tenth of its
    magnitude, at least a tenth of `LEAST` times Kaiming's. Biases that are not constant have the defaults.
    """
    kaiming = math.sqrt(2 / math.prod(shape[1:])) if len(shape) > 1 else 1.0
    usual = float(len(shape) == 1 and name.endswith("weight")), kaiming if len(shape) > 1 else VECTORS
    if own is None or (own.std and name.endswith("bias")):
        return usual
    if not own.std:
        return own.mean, VECTORS * max(abs(own.mean), LEAST * kaiming)
    scale = scale_of(own, usual[1], shape) * usual[1] if len(shape) > 1 else own.std
    return own.mean if abs(own.mean) > own.std else 0.0, scale


def calibrated(model: nn.Module, inputs: Tensor) -> dict[str, Start]:
    """Return `starts_of` a newly built network, which are `exact` if Kaiming's scale does not suit the network.

    It does not if, with weights of this scale, the root mean square of the first outputs for `inputs` (n, ...), in
    training mode, is more than `FAR` times the network's own, or less than its `FAR`-th part. Values below `SMALL`
    count as `SMALL`, since PyTorch's default initialisation gives small outputs. The weights of `model` are changed.
    """
    starts = starts_of(model)
    # A network that cannot take the inputs is refused later, with the reason.
    with suppress(Exception), torch.no_grad():
        size = _size(model, inputs)
        for name, array in model.named_parameters():
            first = starts.get(name)
            _, scale = begin_of(name, tuple(array.shape), starts.get(name))
            if first and first.std and array.ndim > 1:
                array.mul_(scale / first.std)
            elif first and first.std and name.endswith("bias"):
                array.zero_()
        ratio = max(_size(model, inputs), SMALL) / max(size, SMALL)
        if size < float("inf") and not 1 / FAR <= ratio <= FAR:
            return {name: first._replace(exact=True) for name, first in starts.items()}
    return starts


def _size(model: nn.Module, inputs: Tensor) -> float:
    with seeded(0, "first outputs"):
        return float(model.train()(inputs).double().square().mean().sqrt())
