"""Local training: each client trains its own network, the baseline of every comparison."""

from dataclasses import dataclass
from typing import Literal

from fedhet.server import FederatedStrategy, Options, State, Traits, method, option


@dataclass(frozen=True)
class Keys(Options):
    public: Literal["unused", "mixed"] = option(
        "unused", "labelled public examples: unused, or mixed into the client's training batches"
    )


@method(
    "local",
    lambda keys: Traits(keeps="model", public="labelled" if keys.public == "mixed" else "none", inside=""),
    Keys,
    client="fedhet.client_apps.local:Local",
)
class Local(FederatedStrategy[Keys, State]):
    """Local training: clients train their own networks and send nothing."""
