"""LoRA: low-rank adapters on a frozen network, whose ranks differ between clients.

HetLoRA (Cho et al., EMNLP 2024), FlexLoRA (Bai et al., NeurIPS 2024) and FLoRA (Wang et al., NeurIPS 2024).
"""

from dataclasses import dataclass

from fedhet.errors import ConfigError
from fedhet.methods.included._counted import CountedOptions
from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import Config, option
from fedhet.methods.sharing import TRAINED

A, B = "lora_a", "lora_b"
"""Suffixes of the names of an adapter's arrays, (rank, in) and (out, rank)."""


@dataclass(frozen=True)
class LoRAOptions(CountedOptions):
    """The own configuration keys of the method `lora`."""

    counted = "lora.ranks"

    aggregate: str = option(
        "truncate",
        "aggregation of adapters: truncate (HetLoRA), svd (FlexLoRA) or stack (FLoRA)",
        choices=("truncate", "svd", "stack"),
    )
    ranks: str = option("16,8,4", "ranks of the adapters, assigned as `assign` says; a node may set its own as rank")
    layers: str = option(
        "", "names of the nn.Linear layers to adapt, where * matches any part; empty: all but the head"
    )
    train_head: bool = option(False, "train and average the head as well")

    def check(self, config: Config) -> None:
        """Check the ranks, and that `shared-init` is set, so that all clients have the same frozen network."""
        _ = self.all_sizes
        if not config.shared_init:
            raise ConfigError(
                "shared-init = false: lora needs the same frozen network for all clients: set shared-init = true"
            )


method = Method(
    "lora",
    traits=Traits(networks="equal", shares=TRAINED, keeps="nothing", common_init=True, sends={"backbone": STRUCTURE}),
    Options=LoRAOptions,
    own={"lora.train-head": True},
)
