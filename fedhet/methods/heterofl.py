"""HeteroFL (Diao et al., ICLR 2021): clients have the first units of each hidden layer of one network."""

from dataclasses import dataclass
from functools import partial

from fedhet.errors import ConfigError
from fedhet.method import Method, Traits
from fedhet.options import Config, Parameters, option
from fedhet.sharing import FIRST_UNITS, Sharing


@dataclass(frozen=True)
class SizedParameters(Parameters):
    """The key of all methods whose clients have parts of one network."""

    uses = ("assign",)

    widths: str = option(
        "1,0.5,0.25,0.125,0.0625",
        "shares of each hidden layer's units that clients have, dealt as assign says; a node may say its own (width)",
    )

    def check(self, config: Config) -> None:
        """Check the widths, and that all entries of the whole network have a value from the start."""
        _ = self.all_widths
        if not config.shared_init:
            raise ConfigError(
                f"shared-init = false: {config.method_name} needs first weights of the whole network, since some of "
                "them may be nobody's in a round"
            )


@dataclass(frozen=True)
class HeteroFLParameters(SizedParameters):
    """HeteroFL's own keys, with the paper's values."""

    scaler: bool = option(True, "divide what a hidden layer gives by the client's width")
    masked_loss: bool = option(
        True,
        "a client's loss takes outputs of classes that it has no examples of for 0, and the server averages the rows "
        "of the head over those who have their class",
    )


def traits(shares: Sharing, parameters: HeteroFLParameters) -> Traits:
    """The traits of a method that trains as HeteroFL does."""
    sends = {"rows": "statistics"} if parameters.masked_loss else {}
    return Traits(networks="equal", shares=shares, common_init=True, sends=sends)


method = Method(
    "heterofl",
    traits=partial(traits, FIRST_UNITS),
    Parameters=HeteroFLParameters,
    server="fedhet.strategies.heterofl:HeteroFL",
    client="fedhet.client_apps.heterofl:HeteroFL",
    common={"batch-norm": "re-estimate"},  # static BatchNorm
    own={"heterofl.widths": "1,0.25"},
)
