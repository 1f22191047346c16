"""FedRep (Collins et al., ICML 2021): clients share the body of a network, and each has its own head."""

from dataclasses import dataclass

from fedhet.errors import ConfigError
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config, Options, option
from fedhet.methods.sharing import BODY


@dataclass(frozen=True)
class FedRepOptions(Options):
    """FedRep's own configuration keys.

    The common key `local-epochs` is the number of epochs of head and body together; after the last round, only the head
    is trained, for `closing-epochs`.
    """

    body_epochs: int = option(
        1, "number of epochs per round that train the body; the others train the head", at_least=1
    )

    def check(self, config: Config) -> None:
        """Check that epochs are left for the head."""
        if 0 < config.local_epochs <= self.body_epochs:
            raise ConfigError(
                f"fedrep.body-epochs = {self.body_epochs} of local-epochs = {config.local_epochs} leave none for the "
                "head: set body-epochs below local-epochs, which counts the epochs of both"
            )


method = Method(
    "fedrep",
    traits=Traits(networks="equal", shares=BODY, keeps="rest", scored="received", common_init=True),
    Options=FedRepOptions,
    common={"local-epochs": 11, "closing-epochs": 10},
    own={"fedrep.body-epochs": 2},
)
