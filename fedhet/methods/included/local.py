"""Local training without communication."""

from dataclasses import dataclass
from typing import Literal

from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, option


@dataclass(frozen=True)
class LocalOptions(Options):
    """Local training's own configuration key."""

    public: Literal["unused", "mixed"] = option(
        "unused",
        "labelled public examples: unused, or mixed into the client's training batches",
        choices=("unused", "mixed"),
    )


def _traits(options: LocalOptions) -> Traits:
    public: Literal["labelled", "none"] = "labelled" if options.public == "mixed" else "none"
    return Traits(keeps="model", scored="trained", public=public, communicates=False)


method = Method("local", traits=_traits, Options=LocalOptions)
