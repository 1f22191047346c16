"""ScaleFL (Ilhan et al., CVPR 2023): a client has the first d blocks of a network, narrower, with an exit after each.

A client of depth d has the fraction r_d of the units of each hidden layer, and exits with predictions p_1, ..., p_d:

    client i:  L = 2 / (d (d + 1)) sum_j j (CE(p_j, y) + gamma T^2 KL(p_d || p_j)), with T = 3 for p in KL
    server:    averages each entry over the clients that have it

KL is left out in the first quarter of the rounds, and p_d is a constant in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from fedhet.errors import ConfigError
from fedhet.methods.options import listed
from fedhet.server import method, option

from .families.submodels import PARTS, ByDepth, DepthKeys, SubmodelState


@dataclass(frozen=True)
class Keys(DepthKeys):
    temperature: ClassVar[float] = 3.0
    widths: str = option(
        "1,0.75,0.7,0.7", "fraction of each hidden layer's units for each of `depths`; 1 for the largest"
    )
    gamma: float = option(0.05, "weight of the distillation from the last exit to the others", at_least=0)

    @cached_property
    def all_sizes(self) -> tuple[float, ...]:
        """Clients' sizes in configured order, depth - 1 + width: 2.7 is 3 blocks with 0.7 of the units."""
        depths = super().all_sizes
        try:
            widths = [float(width) for width in listed(self.widths)]
        except ValueError:
            widths = []
        of_largest = [width for depth, width in zip(depths, widths, strict=False) if depth == max(depths)]
        if len(widths) != len(depths) or not all(0 < width <= 1 for width in widths) or {*of_largest} != {1}:
            fitting = "set a fraction for each depth, above 0 and at most 1, and 1 for the largest"
            raise ConfigError(f"widths: {self.widths!r} does not fit depths = {self.depths!r}: {fitting}")
        return tuple(depth - 1 + width for depth, width in zip(depths, widths, strict=True))

    @property
    def largest(self) -> int:
        """The depth of the whole network."""
        return int(max(self.all_sizes))

    def width_at(self, node_config: Mapping[str, Any]) -> float | None:
        """Return the size of the node config's `depth` as a fraction of the largest; None if it is not set."""
        depth = node_config.get(self.size_name)
        sizes = {str(math.ceil(size)): size for size in self.sizes}
        if depth is not None and str(depth) not in sizes:
            raise ConfigError(f"the node's depth: {depth!r} is none of scalefl.depths: set one of {', '.join(sizes)}")
        return None if depth is None else sizes[str(depth)] / self.largest


@method(
    "scalefl",
    replace(PARTS, predicts="the mean of the client's exits"),
    Keys,
    client="fedhet.client_apps.scalefl:ScaleFL",
    own={"scalefl.depths": "2,1", "scalefl.widths": "1,0.7"},
)
class ScaleFL(ByDepth[Keys, SubmodelState]):
    """ScaleFL: a network with exits, of which clients have narrower first blocks; entries are averaged over clients."""

    def size_of(self, client: str) -> str:
        text = super().size_of(client)
        depth, *_ = self._widths(client) if text else (0,)
        width = {math.ceil(size): size - math.ceil(size) + 1 for size in self.options.sizes}.get(depth, 1)
        return f"depth {depth}, width {width:g}" if text else ""
