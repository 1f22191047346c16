"""Declarations of methods whose clients have submodels of one network: of smaller width, depth or rank."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from fedhet.errors import ConfigError
from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import Config, Options, Value, listed, option
from fedhet.methods.sharing import FIRST_UNITS, ROLLING_UNITS, TRAINED

A, B = "lora_a", "lora_b"
"""Suffixes of the names of a low-rank adapter's two matrices, of shapes (rank, in) and (out, rank)."""

LARGEST_COUNT = 2**16  # the largest depth (number of blocks) or rank that can be configured


class SubmodelOptions(Options):
    """Base class of the keys of methods whose clients have submodels, of different sizes, of one network.

    `size_name` says what a size is: a `width` (fraction of each hidden layer's units), a `depth` (number of the
    network's first blocks) or a `rank` (of low-rank adapters). `counted` is True for depths and ranks, which are whole
    numbers; the whole network then has the largest. The key with the plural name, such as `widths`, lists the sizes.
    """

    uses = ("assign",)
    size_name: ClassVar[str] = "width"
    counted: ClassVar[bool] = False

    @cached_property
    def all_sizes(self) -> tuple[float, ...]:
        """Clients' widths (fractions), depths (numbers of blocks) or ranks in configured order; checks their values."""
        key = f"{self.size_name}s"
        return tuple(self._size(each, key) for each in listed(getattr(self, key)) or [""])

    @property
    def largest(self) -> float:
        """The size of the whole network: the largest configured depth or rank, or 1 for widths."""
        return max(self.all_sizes) if self.counted else 1.0

    @property
    def sizes(self) -> tuple[float, ...]:
        """The different widths (fractions), depths (numbers of blocks) or ranks to assign to clients, largest first."""
        return tuple(sorted({*self.all_sizes}, reverse=True))

    @property
    def all_widths(self) -> tuple[float, ...]:
        """The widths, depths or ranks for clients in configured order, as fractions of the whole network's."""
        return tuple(size / self.largest for size in self.all_sizes)

    def width_at(self, node_config: Mapping[str, Any]) -> float | None:
        """Return the node config's `width`, `depth` or `rank` as a fraction of the largest; None if it is not set."""
        chosen, largest = node_config.get(self.size_name), self.largest
        return None if chosen is None else self._size(chosen, f"the node's {self.size_name}", largest) / largest

    def _size(self, value: object, name: str, most: float = math.inf) -> float:
        most = min(most, LARGEST_COUNT if self.counted else 1)
        with suppress(ValueError):
            if 0 < (size := int(str(value)) if self.counted else float(str(value))) <= most:
                return size
        valid = f"a whole number from 1 to {most:g}" if self.counted else "the fraction of units, above 0 and at most 1"
        raise ConfigError(f"{name}: {value!r} is not a valid {self.size_name}: set {valid}")

    def check(self, config: Config) -> None:
        """Check that sizes are valid and `shared-init` is true; raise a ConfigError otherwise."""
        try:
            _ = self.all_sizes
        except ConfigError as error:
            raise ConfigError(f"{config.family}.{error}") from error
        if not config.shared_init:
            raise ConfigError(f"{config.method_name}'s clients start from parts of one network: set shared-init = true")


@dataclass(frozen=True)
class SizedOptions(SubmodelOptions):
    widths: str = option(
        "1,0.5,0.25,0.125,0.0625",
        "fractions of each hidden layer's units per client, assigned as `assign` says; a node may set its own as width",
    )


@dataclass(frozen=True)
class FjORDOptions(SizedOptions):
    # The values are the paper's. Each step draws one of the widths up to the client's.
    distil: bool = option(True, "smaller networks learn from the outputs of the client's widest network")


_traits = Traits(networks="equal", shares=FIRST_UNITS, common_init=True)

heterofl = Method(
    "heterofl",
    replace(_traits, sends={"rows": "statistics"}),
    SizedOptions,
    common={"batch-norm": "re-estimate"},  # static BatchNorm
    own={"heterofl.widths": "1,0.25"},
)

fedrolex = Method(
    "fedrolex",
    replace(_traits, shares=ROLLING_UNITS, sends={"rows": "statistics"}),
    SizedOptions,
    client="fedhet.client_apps.submodels:HeteroFL",
    common={"batch-norm": "re-estimate"},
    own={"fedrolex.widths": "1,0.25"},
)

fjord = Method("fjord", _traits, FjORDOptions, common={"batch-norm": "re-estimate"}, own={"fjord.widths": "1,0.5,0.25"})


@dataclass(frozen=True)
class DepthOptions(SubmodelOptions):
    size_name, counted = "depth", True  # clients have the first blocks of one network

    depths: str = option("4,3,2,1", "numbers of blocks, assigned as `assign` says; a node may set its own as depth")
    blocks: str = option("", "names of the modules that end blocks, separated by commas; empty: found by spatial size")

    def suited(self) -> dict[str, tuple[Value, str]]:
        """Return {"blocks": ("", reason)}: users' models get blocks by spatial size; {} if `blocks` is empty."""
        return {"blocks": ("", "since the preset names modules of its network, not of yours")} if self.blocks else {}


@dataclass(frozen=True)
class DepthFLOptions(DepthOptions):
    ramp_up: int = option(
        300, "rounds until distillation's weight exp(-5 (1 - t / ramp-up)^2) is 1; 0: none", at_least=0
    )


_exits = replace(_traits, predicts="the mean of the client's exits")

depthfl = Method("depthfl", _exits, DepthFLOptions, own={"depthfl.depths": "2,1", "depthfl.ramp-up": 0})


@dataclass(frozen=True)
class InclusiveFLOptions(DepthOptions):
    momentum: float = option(0.2, "beta, the share of deeper clients' update in the last block", at_least=0, below=1)


_exit = replace(_traits, predicts="the exit at the client's depth")

inclusivefl = Method("inclusivefl", _exit, InclusiveFLOptions, own={"inclusivefl.depths": "2,1"})


@dataclass(frozen=True)
class LoRAOptions(SubmodelOptions):
    # HetLoRA: Cho et al., EMNLP 2024; FlexLoRA: Bai et al., NeurIPS 2024; FLoRA: Wang et al., NeurIPS 2024.
    size_name, counted = "rank", True

    aggregate: Literal["truncate", "svd", "stack"] = option(
        "truncate", "aggregation of adapters: truncate (HetLoRA), svd (FlexLoRA) or stack (FLoRA)"
    )
    ranks: str = option("16,8,4", "ranks of the adapters, assigned as `assign` says; a node may set its own as rank")
    layers: str = option("", "nn.Linear layers to adapt, where * matches any part of a name; empty: all but the head")
    train_head: bool = option(False, "train and average the head as well")


lora = Method(
    "lora",
    Traits(networks="equal", shares=TRAINED, keeps="nothing", common_init=True, sends={"backbone": STRUCTURE}),
    LoRAOptions,
    own={"lora.train-head": True},
)
