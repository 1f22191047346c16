"""FedRep, server half: the clients' bodies are averaged (Collins et al., ICML 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedhet.config import Value, option
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
