"""DepthFL (Kim et al., ICLR 2023): clients have the first blocks of one network, with an exit behind each."""

from dataclasses import dataclass

from fedhet.errors import ConfigError
from fedhet.method import Method, Traits
from fedhet.options import Config, Value, option
from fedhet.sharing import FIRST_UNITS

from ._counted import CountedParameters


@dataclass(frozen=True)
class DepthParameters(CountedParameters):
    """Which blocks clients have."""

    depths: str = option(
        "4,3,2,1",
        "numbers of blocks that clients have, dealt as assign says; the largest is all; a node may say its own (depth)",
    )
    blocks: str = option(
        "",
        "modules that end all blocks but the last, separated by commas; empty: blocks of one spatial size each, or of "
        "about equal numbers of layers if there are too few of these",
    )

    def suited(self, *, own_models: bool, unlabelled: bool) -> dict[str, tuple[Value, str]]:
        """Find the blocks of models of a user's own: a preset names modules of its network."""
        return {"blocks": ("", "since a preset's are modules of its own network")} if own_models and self.blocks else {}

    def check(self, config: Config) -> None:
        """Check the depths, and that all arrays of the whole network have a value from the start."""
        _ = self.all_sizes
        if not config.shared_init:
            raise ConfigError(f"shared-init = false: {config.method} needs first weights of the whole network")


@dataclass(frozen=True)
class DepthFLParameters(DepthParameters):
    """DepthFL's own keys, with the paper's values."""

    counted = "depthfl.depths"

    ramp_up: int = option(
        300,
        "rounds over which the weight of distillation among exits grows to 1, as exp(-5 (1 - t / ramp-up)^2); 0: none",
        at_least=0,
    )


traits = Traits(networks="equal", shares=FIRST_UNITS, common_init=True)

method = Method(
    "depthfl",
    traits=traits,
    Parameters=DepthFLParameters,
    own={"depthfl.depths": "2,1", "depthfl.ramp-up": 0},
)
