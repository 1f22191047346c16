"""FedHARM (Kastellos et al., 2024)."""

from dataclasses import dataclass
from math import isqrt
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.method import METRICS, STRUCTURE, Drawing, Method, Traits
from fedhet.options import Config, Parameters, option

BETWEEN = "aligned"
"""What the evaluation between the two phases goes by: after the shared one, before the private one."""

ALIGNED = "aligned"
"""The value of `blocks` by which they are chosen to be like those of the first architecture."""

SHUFFLE = "shuffled images"
"""What draws the order of `whose = shuffled` in a round."""


@dataclass(frozen=True)
class FedHARMParameters(Parameters):
    """FedHARM's own keys, with the paper's values."""

    align: Literal["cosine", "cosine-block", "cka", "spectral"] = option(
        "cosine",
        "what is aligned on the shared set: descriptors by their cosine (the paper's), each block scaled to length one "
        "before the mean and the cosine, block outputs by CKA, or Phi with how the class posteriors cluster the set",
        choices=("cosine", "cosine-block", "cka", "spectral"),
    )
    whose: Literal["peers", "own", "shuffled"] = option(
        "peers",
        "whose target: that of all clients, or as controls the client's own, or that of all for other images",
        choices=("peers", "own", "shuffled"),
    )
    leave_out_own: bool = option(False, "a client's own part is left out of its target")
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
    )
    descriptor: Literal["gradients", "average-pool", "max-pool", "attention-map"] = option(
        "gradients",
        "a block's part of a descriptor: activations with the largest gradients, adaptive pooling (the paper's first "
        "attempts), or the mean square of the channels by position, whose slots are a square",
        choices=("gradients", "average-pool", "max-pool", "attention-map"),
    )
    slots: str = option(
        "128,256,512,1024",
        "as many numbers as blocks, from shallow to deep: the length of each one's part of a descriptor",
    )
    refresh: str = option(
        "round",
        "how often places of activations are chosen anew: once a round, or before every epoch on the shared set",
        choices=("round", "epoch"),
    )
    public_steps: int = option(
        0, "gradient steps on the shared set in a round; 0: as many epochs as on private data", at_least=0
    )
    clusters: int = option(0, "columns of the spectral target, as fedhenn.clusters", at_least=0)
    target_error: float = option(
        0.002, "error of CKA's gradient that compression aims at, as fedhenn.target-error", at_least=0
    )
    target_dtype: Literal["float16", "float32", "int8"] = option(
        "float16",
        "dtype on the wire; int8, with a scale an image and block, is for descriptors",
        choices=("float16", "float32", "int8"),
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
        if self.refresh == "epoch" and self.public_steps:
            raise ConfigError(
                "fedharm.refresh = 'epoch' needs epochs on the shared set: leave out fedharm.public-steps"
            )
        if self.target_dtype == "int8" and not self.describes:
            raise ConfigError(
                f"fedharm.target-dtype = 'int8' is for descriptors, and fedharm.align = {self.align!r} sends none"
            )
        if not all(part.strip().isdecimal() and int(part) for part in self.slots.split(",")):
            raise ConfigError(f"fedharm.slots = {self.slots!r}: must be positive whole numbers separated by commas")
        if (
            self.describes
            and self.descriptor == "attention-map"
            and any(isqrt(length) ** 2 != length for length in self.lengths)
        ):
            raise ConfigError(
                f"fedharm.slots = {self.slots!r}: an attention map has a square of positions, as in 16,16,16,16"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """`slots` as numbers."""
        return tuple(map(int, self.slots.split(",")))

    @property
    def aligns(self) -> bool:
        """Whether the distance weighs anything."""
        return self.alpha < 1

    @property
    def describes(self) -> bool:
        """Whether what is aligned are descriptors."""
        return self.align in ("cosine", "cosine-block")

    @property
    def travels(self) -> bool:
        """Whether clients tell the server anything."""
        return self.aligns and self.whose != "own"

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
        """What another alignment, or none, has no use for."""
        descriptors = ["descriptor", "refresh"]
        reasons: dict[str, list[str]] = {"align": []}
        if not self.describes:
            reasons["align"] += descriptors
        if self.align != "cka":
            reasons["align"] += ["target_error"]
        if self.align != "spectral":
            reasons["align"] += ["clusters"]
        else:
            reasons["align"] += ["blocks", "slots"]
        if self.describes and self.descriptor != "gradients":
            reasons["descriptor"] = ["refresh"]
        if self.whose == "own":
            reasons["whose"] = ["leave_out_own", "target_dtype"]
        if not self.aligns:
            everything = ["align", "whose", "leave_out_own", "divide", "blocks", "slots", *descriptors]
            reasons = {"alpha": [*everything, "clusters", "target_error", "target_dtype"]}
        return self.set_in_vain("fedharm", reasons)


def _traits(parameters: FedHARMParameters) -> Traits:
    told = {"cka": "features", "spectral": "posteriors"}.get(parameters.align, "descriptors")
    tells = dict.fromkeys(("slots", "blocks", "reference", "chosen", "alignment"), STRUCTURE)
    tells |= {"distance": METRICS} | ({"told": told} if parameters.travels else {})
    if parameters.aligns and parameters.align != "spectral":
        tells["heat"] = "descriptors"
    pool: Literal["labelled", "inputs"] = "labelled" if parameters.labels else "inputs"
    # CKA does not see the size of what a client tells, and posteriors have one size.
    combined: Literal["entries", ""] = "entries" if parameters.travels and parameters.describes else ""
    return Traits(keeps="model", scored="trained", pool=pool, combined=combined, tells=tells)


method = Method(
    "fedharm",
    traits=_traits,
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
