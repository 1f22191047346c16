"""Local training without communication."""

from dataclasses import dataclass
from typing import Literal

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Parameters, option


@dataclass(frozen=True)
class LocalParameters(Parameters):
    """Local training's own configuration key."""

    public: Literal["unused", "mixed"] = option(
        "unused",
        "labelled public examples: unused, or mixed into the client's training batches",
        choices=("unused", "mixed"),
    )


def _traits(parameters: LocalParameters) -> Traits:
    public: Literal["labelled", "none"] = "labelled" if parameters.public == "mixed" else "none"
    return Traits(keeps="model", scored="trained", public=public, communicates=False)


method = Method("local", traits=_traits, Parameters=LocalParameters)
