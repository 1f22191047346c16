"""Declaration of FedHARM (Kastellos et al., 2024): networks learn similar descriptors of public images."""

from dataclasses import dataclass
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.methods.method import METRICS, Method, Traits
from fedhet.methods.options import Options, option


@dataclass(frozen=True)
class FedHARMOptions(Options):
    uses = ("batch-norm",)  # statistics are re-estimated after the shared phase

    align: Literal["cosine", "spectral"] = option(
        "cosine",
        "what is aligned: descriptors by cosine (the paper's), or representations by FedHeNN's spectral target",
        needs={"alpha": {"below": 1}},
        at_need="spectral",
    )
    alpha: float = option(
        0.5,
        "weight of the task's loss on the public dataset, 1 - alpha of the distance; 0: no labels are needed",
        at_least=0,
        at_most=1,
        at_need=0.0,
    )
    divide: bool = option(False, "divide the public dataset's loss by alpha", needs={"alpha": {"above": 0, "below": 1}})
    blocks: str = option(
        "stages",
        "blocks to align: stages (layers of one spatial size), or module names a,b,c,d;... with one list per network",
        needs={"align": ("cosine",), "alpha": {"below": 1}},
    )
    slots: str = option(
        "128,256,512,1024",
        "lengths of the blocks' parts of a descriptor, from shallow to deep",
        needs={"align": ("cosine",), "alpha": {"below": 1}},
    )
    public_steps: int = option(0, "number of public steps per round; 0: as many epochs as on private data", at_least=0)

    def __post_init__(self) -> None:
        if not all(part.strip().isdecimal() and int(part) for part in self.slots.split(",")):
            raise ConfigError(f"fedharm.slots = {self.slots!r}: must be positive whole numbers separated by commas")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of values that each block of the network contributes to a descriptor, from the key `slots`."""
        return tuple(map(int, self.slots.split(",")))

    @property
    def parts(self) -> int:
        """Number of arrays that a client sends: class scores (`align = spectral`), or the descriptors of each block."""
        return 1 if self.align == "spectral" else len(self.lengths)


def traits(options: FedHARMOptions) -> Traits:
    """Return what FedHARM needs and exchanges, which depends on the values of its keys."""
    sends = {"distance": METRICS}
    if options.alpha < 1:
        sends["sent"] = "posteriors" if options.align == "spectral" else "descriptors"
    public: Literal["labelled", "inputs"] = "labelled" if options.alpha else "inputs"
    other_arrays: Literal["mean", ""] = "mean" if sends.get("sent") == "descriptors" else ""
    return Traits(keeps="model", public=public, other_arrays=other_arrays, sends=sends)


fedharm = Method(
    "fedharm",
    traits,
    FedHARMOptions,
    common={
        "rounds": 10,
        "local-epochs": 25,
        "closing-epochs": 25,
        "batch-size": 128,
        "optimizer": "adam",
        "learning-rate": 0.01,
        "lr-schedule": "one-cycle",
        "public-samples": 5000,
    },
    own={"closing-epochs": 5, "fedharm.divide": True},
)
