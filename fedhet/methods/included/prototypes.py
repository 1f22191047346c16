"""Declarations of methods whose clients share prototypes, mean predictions of classes, or a head."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import Options, Value, option
from fedhet.methods.sharing import HEAD


@dataclass(frozen=True)
class WidthOptions(Options):
    """Configuration key of methods whose clients need representations of equal `width`."""

    width: int = option(
        0,
        "width to which a linear layer before the head projects representations; 0: no such layer",
        at_least=0,
        at_most=2**16,
        at_need=64,
    )

    def suited(self) -> dict[str, tuple[Value, str]]:
        """Return {"width": (`width`, reason)}, as a layer this wide is added to a user's models; {} if `width` is 0."""
        why = "the width of a linear layer that is added before the head of each model (0: no such layer)"
        return {"width": (self.width, why)} if self.width else {}

    @property
    def changes_heads(self) -> bool:  # type: ignore[override]
        """Whether heads are replaced: by a linear layer with `width` outputs, followed by a new head."""
        return self.width > 0


@dataclass(frozen=True)
class FedProtoOptions(WidthOptions):
    weight: float = option(1.0, "lambda, the weight of the distance to the global prototypes", at_least=0)
    predict: Literal["prototype", "all-prototypes", "head"] = option(
        "prototype", "prediction by the nearest prototype of the client's classes or of all classes, or by the head"
    )


_learner = Traits(
    keeps="model", other_arrays="whole", sends={"prototypes": "prototypes", "width": STRUCTURE}, noisy_sums=True
)
_by_nearest = replace(_learner, predicts="the nearest prototype")

fedproto = Method(
    "fedproto",
    lambda keys: replace(_learner if keys.predict == "head" else _by_nearest, other_arrays="entries"),
    FedProtoOptions,
    own={"fedproto.width": 32},
)


@dataclass(frozen=True)
class FDOptions(Options):
    weight: float = option(0.1, "weight of the cross entropy to the peers' mean prediction of the class", at_least=0)


fd = Method(
    "fd", Traits(keeps="model", other_arrays="mean", sends={"prototypes": "posteriors", "width": STRUCTURE}), FDOptions
)


@dataclass(frozen=True)
class LearnerOptions(WidthOptions):
    """Keys of methods such as FedGH, whose server trains a network on clients' mean representations."""

    server_epochs: ClassVar[int] = 1
    """Number of epochs that the server trains per round, fixed by the method (not a key)."""

    server_learning_rate: float = option(0.01, "learning rate of the server's SGD", above=0)


fedgh = Method("fedgh", _learner, LearnerOptions, own={"fedgh.width": 32, "fedgh.server-learning-rate": 0.1})


@dataclass(frozen=True)
class FedTGPOptions(LearnerOptions):
    server_epochs, threshold, predict = 100, 100.0, "all-prototypes"  # the authors'; threshold: tau, the maximum margin
    weight: float = option(0.1, "lambda, the weight of the distance to the global prototypes", at_least=0)


fedtgp = Method("fedtgp", _by_nearest, FedTGPOptions, own={"fedtgp.width": 32})


@dataclass(frozen=True)
class FedGenOptions(WidthOptions):
    # The weight is the paper's; other defaults are from the authors' code for MNIST.
    weight: float = option(1.0, "weight of the clients' loss on generated representations", at_least=0)
    diversity: float = option(1.0, "weight of the generator's diversity loss", at_least=0)
    server_steps: int = option(50, "number of steps per round in which the server trains the generator", at_least=1)
    server_learning_rate: float = option(3e-4, "learning rate of the server's Adam", above=0)


fedgen = Method(
    "fedgen",
    Traits(shares=HEAD, keeps="model", common_init=True, sends={"classes": "statistics"}),
    FedGenOptions,
    own={"fedgen.width": 32},
)
