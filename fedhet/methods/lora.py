"""Low-rank adapters of unlike ranks on a frozen network.

HetLoRA (Cho et al., EMNLP 2024), FlexLoRA (Bai et al., NeurIPS 2024) and FLoRA (Wang et al., NeurIPS 2024).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedhet.errors import ConfigError
from fedhet.method import STRUCTURE, Method, Traits
from fedhet.options import Config, Parameters, listed, option
from fedhet.sharing import TRAINED

A, B = "lora_a", "lora_b"
"""Last parts of the names of an adapter's arrays, (rank, in) and (out, rank)."""


@dataclass(frozen=True)
class LoRAParameters(Parameters):
    """The method's own keys."""

    aggregate: str = option(
        "truncate",
        "adapters are averaged, filled up with zeros (truncate: HetLoRA); or their products are, and are factored for "
        "each rank (svd: FlexLoRA), or added to the frozen network, with new adapters in each round (stack: FLoRA)",
        choices=("truncate", "svd", "stack"),
        tries=("truncate", "svd", "stack"),
    )
    ranks: str = option("16,8,4", "ranks of clients' adapters, dealt as assign says; a node may say its own (rank)")
    layers: str = option("", "nn.Linear layers to adapt, with * for any part of a name; empty: all but the head")
    train_head: bool = option(False, "the head is trained, too, and averaged as it is; else it is frozen like the rest")
    scale: float = option(1.0, "s of W + s B A", above=0)
    weights: str = option(
        "examples",
        "weights of clients in the average: their numbers of examples, or the Frobenius norms of B A (HetLoRA)",
        choices=("examples", "norm"),
        needs={"aggregate": ("truncate",)},
    )

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        """The ranks to assign to clients; raises a ConfigError for a wrong one."""
        return tuple(_rank(each, "lora.ranks") for each in listed(self.ranks)) or (_rank("", "lora.ranks"),)

    @property
    def all_widths(self) -> tuple[float, ...]:
        """The ranks as shares of the largest."""
        return tuple(rank / max(self.all_ranks) for rank in self.all_ranks)

    def width_at(self, node_config: Mapping[str, Any]) -> float | None:
        """Return the rank that a node's config sets as a share of the largest; None without one."""
        most = max(self.all_ranks)
        return _rank(node_config["rank"], "the node's rank", most) / most if "rank" in node_config else None

    def check(self, config: Config) -> None:
        """Check the ranks, and that all clients have one frozen network."""
        _ = self.all_ranks
        if not config.shared_init:
            raise ConfigError("shared-init = false: lora's clients need one frozen network, with the same weights")


def _rank(value: object, name: str, most: int = 2**16) -> int:
    """Read a rank; raises a ConfigError that names the setting."""
    text = str(value)
    if not (text.isdecimal() and text.isascii() and 0 < int(text) <= most):
        raise ConfigError(f"{name}: {value!r} is no rank: it must be a whole number from 1 to {most}")
    return int(text)


method = Method(
    "lora",
    traits=Traits(networks="equal", shares=TRAINED, keeps="nothing", common_init=True, sends={"backbone": STRUCTURE}),
    Parameters=LoRAParameters,
    server="fedhet.strategies.lora:LoRA",
    client="fedhet.client_apps.lora:LoRA",
)
