"""HeteroFL (Diao et al., ICLR 2021): clients have the first units of each hidden layer of one network."""

from dataclasses import dataclass

from fedhet.errors import ConfigError
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config, Options, option
from fedhet.methods.sharing import FIRST_UNITS


@dataclass(frozen=True)
class SizedOptions(Options):
    """Configuration key of methods whose clients have a fraction of the units of each hidden layer of one network."""

    uses = ("assign",)

    widths: str = option(
        "1,0.5,0.25,0.125,0.0625",
        "fractions of each hidden layer's units per client, assigned as `assign` says; a node may set its own as width",
    )

    def check(self, config: Config) -> None:
        """Check the widths, and that `shared-init` is set, so that the whole network has initial weights."""
        _ = self.all_widths
        if not config.shared_init:
            raise ConfigError(
                f"shared-init = false: {config.method_name} needs initial weights of the whole network, because "
                "some of them may not be trained by any client: set shared-init = true"
            )


TRAITS = Traits(networks="equal", shares=FIRST_UNITS, common_init=True, sends={"rows": "statistics"})
"""Traits of methods that train as HeteroFL does."""

method = Method(
    "heterofl",
    traits=TRAITS,
    Options=SizedOptions,
    common={"batch-norm": "re-estimate"},  # static BatchNorm
    own={"heterofl.widths": "1,0.25"},
)
