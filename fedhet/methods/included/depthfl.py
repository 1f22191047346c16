"""DepthFL (Kim et al., ICLR 2023): clients have the first blocks of one network, with a classifier after each block."""

from dataclasses import dataclass

from fedhet.errors import ConfigError
from fedhet.methods.included._counted import CountedOptions
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config, Value, option
from fedhet.methods.sharing import FIRST_UNITS


@dataclass(frozen=True)
class DepthOptions(CountedOptions):
    """Configuration keys of methods whose clients have the first blocks of one network."""

    depths: str = option(
        "4,3,2,1", "numbers of blocks per client, assigned as `assign` says; a node may set its own as depth"
    )
    blocks: str = option("", "names of the modules that end blocks, separated by commas; empty: found by spatial size")

    def suited(self, *, own_models: bool, unlabelled: bool) -> dict[str, tuple[Value, str]]:
        """Reset `blocks` for the user's own models, since a preset names the modules of its own network."""
        return {"blocks": ("", "since a preset's are modules of its own network")} if own_models and self.blocks else {}

    def check(self, config: Config) -> None:
        """Check the depths, and that `shared-init` is set, so that the whole network has initial weights."""
        _ = self.all_sizes
        if not config.shared_init:
            raise ConfigError(
                f"shared-init = false: {config.method} needs initial weights of the whole network: "
                "set shared-init = true"
            )


@dataclass(frozen=True)
class DepthFLOptions(DepthOptions):
    """DepthFL's own configuration keys, with the paper's values."""

    counted = "depthfl.depths"

    ramp_up: int = option(
        300, "rounds until the distillation weight exp(-5 (1 - t / ramp-up)^2) reaches 1; 0: none", at_least=0
    )


traits = Traits(networks="equal", shares=FIRST_UNITS, common_init=True)

method = Method("depthfl", traits=traits, Options=DepthFLOptions, own={"depthfl.depths": "2,1", "depthfl.ramp-up": 0})
