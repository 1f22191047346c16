"""FedHARM (Kastellos et al., 2024)."""

from dataclasses import dataclass
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.method import METRICS, STRUCTURE, Drawing, Method, Traits
from fedhet.options import Config, Parameters, option

BETWEEN = "aligned"
"""What the evaluation between the two phases goes by: after the shared one, before the private one."""

ALIGNED = "aligned"
"""The value of `blocks` by which they are chosen to be like those of the first architecture."""

ERROR = 0.002
"""Of CKA's gradient, which compressed outputs of blocks aim at; 0: they travel whole."""

DTYPE: Literal["float16", "float32"] = "float16"
"""Of what clients tell of the shared images, and of targets, on the wire."""


@dataclass(frozen=True)
class FedHARMParameters(Parameters):
    """FedHARM's own keys, with the paper's values."""

    align: Literal["cosine", "cka", "spectral"] = option(
        "cosine",
        "what is aligned on the shared set: descriptors by their cosine (the paper's), block outputs by CKA, or Phi "
        "with how the class posteriors cluster the set",
        choices=("cosine", "cka", "spectral"),
    )
    alpha: float = option(
        0.5, "weight of the task's loss on the shared set, beside 1 - alpha of the distance", at_least=0, at_most=1
    )
    divide: bool = option(
        False, "divide the shared set's loss by alpha, so that alpha does not weaken the task's loss as well"
    )
    labels: bool = option(
        True, "the shared set has labels; else the class is what a network predicts, and the task's loss is left out"
    )
    blocks: str = option(
        "last-four",
        "blocks of a network: last-four or stride (torchvision's families; of others their stages), stages (by spatial "
        "size), aligned (those most like the blocks of the first of `architectures`, both untrained), or modules by "
        "name: a,b,c,d; lists for other networks follow after semicolons",
        needs={"align": ("cosine", "cka")},
    )
    slots: str = option(
        "128,256,512,1024",
        "as many numbers as blocks, from shallow to deep: the length of each one's part of a descriptor, the "
        "activations with the largest gradients",
        needs={"align": ("cosine", "cka")},
    )
    public_steps: int = option(
        0, "gradient steps on the shared set in a round; 0: as many epochs as on private data", at_least=0
    )

    def __post_init__(self) -> None:
        """Check what goes together.

        Raises:
            ConfigError: what does not.
        """
        if self.divide and not self.alpha:
            raise ConfigError("fedharm.divide divides by fedharm.alpha, which is 0: leave one of them out")
        if not self.labels and self.alpha == 1:
            raise ConfigError("fedharm.labels = false with fedharm.alpha = 1 leaves nothing to train on the shared set")
        if not all(part.strip().isdecimal() and int(part) for part in self.slots.split(",")):
            raise ConfigError(f"fedharm.slots = {self.slots!r}: must be positive whole numbers separated by commas")

    @property
    def lengths(self) -> tuple[int, ...]:
        """`slots` as numbers."""
        return tuple(map(int, self.slots.split(",")))

    @property
    def aligns(self) -> bool:
        """Whether the distance weighs anything."""
        return self.alpha < 1

    @property
    def parts(self) -> int:
        """How many parts a client tells of the shared images."""
        return 1 if self.align == "spectral" else len(self.lengths)

    @property
    def weight(self) -> float:
        """Of the distance, in the loss on the shared set."""
        return (1 - self.alpha) / (self.alpha if self.divide else 1.0)

    @property
    def task_weight(self) -> float:
        """Of the task's own loss there."""
        return (1.0 if self.divide else self.alpha) if self.labels else 0.0

    def idle(self, config: Config) -> dict[str, str]:
        """Without a distance nothing is aligned."""
        names = () if self.aligns else ("align", "divide", "blocks", "slots")
        return {f"fedharm.{name}": "fedharm.alpha" for name in names}


def traits(parameters: FedHARMParameters) -> Traits:
    """The answers to the six questions."""
    told = {"cka": "features", "spectral": "posteriors"}.get(parameters.align, "descriptors")
    tells = dict.fromkeys(("slots", "blocks", "reference", "chosen", "alignment"), STRUCTURE)
    tells |= {"distance": METRICS} | ({"told": told} if parameters.aligns else {})
    if parameters.aligns and parameters.align != "spectral":
        tells["heat"] = "descriptors"
    public: Literal["labelled", "inputs"] = "labelled" if parameters.labels else "inputs"
    # CKA does not see the size of what a client tells, and posteriors have one size.
    combined: Literal["entries", ""] = "entries" if tells.get("told") == "descriptors" else ""
    return Traits(keeps="model", scored="trained", public=public, combined=combined, tells=tells)


method = Method(
    "fedharm",
    traits=traits,
    Parameters=FedHARMParameters,
    server="fedhet.strategies.fedharm:FedHARM",
    client="fedhet.client_apps.fedharm:FedHARM",
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
    drawings={
        "cosines": Drawing(
            "fedhet.results.drawings:cosines_figure",
            "Cosine between a client's descriptors and the mean of the others', for the same image and for different "
            "ones, by round and block.",
        ),
        "block-alignment": Drawing(
            "fedhet.results.drawings:block_alignment_figure",
            "Angle and Kullback-Leibler divergence between blocks of the first architecture and those of the others, "
            "untrained; circles are the blocks that were chosen.",
        ),
        "grad-cam": Drawing(
            "fedhet.results.drawings:heat_maps_figure",
            "Grad-CAM of one image of the shared set, block by block, for a client of each architecture.",
        ),
    },
)
