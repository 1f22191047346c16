"""FedRep, server half: the clients' bodies are averaged (Collins et al., ICML 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedhet.config import Value, option
from fedhet.errors import ConfigError
from fedhet.server import FederatedStrategy


@dataclass(frozen=True)
class Parameters:
    """FedRep's own keys; `local-epochs` are the head's and the body's epochs together."""

    body_epochs: int = option(1, "how many of a round's epochs train the body; the others train the head", at_least=1)


class FedRep(FederatedStrategy):
    """Averages as FedAvg does, but only what travels: everything except the head."""

    name = "fedrep"
    Parameters = Parameters
    common: ClassVar[Mapping[str, Value]] = {"local-epochs": 11}
    equal_architectures = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Check that the head is trained at all.

        Raises:
            ConfigError: it is not.
        """
        super().__init__(*args, **settings)
        if 0 < self.config.local_epochs <= self.parameters.body_epochs:
            raise ConfigError(
                f"fedrep.body-epochs = {self.parameters.body_epochs} of local-epochs = {self.config.local_epochs} "
                "leave none for the head: the head's and the body's epochs together are local-epochs"
            )
