"""FedMD (Li and Wang, 2019): clients learn each other's mean class scores on a public dataset."""

from dataclasses import dataclass

from fedhet.methods.method import METRICS, STRUCTURE, Method, Traits
from fedhet.methods.options import Options, Value, option


class ScoresOptions(Options):
    """Attributes of methods whose clients send class scores for a public dataset; subclasses can make them keys.

    Attributes:
        public_batch: public examples in a mini-batch.
        subset: public examples whose scores are exchanged in a round, at most all.
    """

    public_batch: int
    subset: int


@dataclass(frozen=True)
class FedMDOptions(ScoresOptions):
    """FedMD's own configuration keys, with the values of the authors' code.

    The common key `local-epochs` is the number of epochs on the client's examples in each round ("revisit").
    """

    public_batch: int = option(256, "number of public examples per mini-batch", at_least=1)
    subset: int = option(5000, "maximum number of public examples whose scores are exchanged in a round", at_least=1)
    public_epochs: int = option(
        20,
        "number of epochs on the labelled public dataset in a client's first round; 0: no labels are needed",
        at_least=0,
        at_need=(0,),
    )
    private_epochs: int = option(
        25, "number of epochs on private examples in a client's first round; 0: local-epochs", at_least=0
    )
    digest_epochs: int = option(1, "number of epochs per round on the mean scores", at_least=1)

    def suited(self, *, own_models: bool, unlabelled: bool) -> dict[str, tuple[Value, str]]:
        """Set the number of epochs on public labels to 0 if the public examples have no labels."""
        without = unlabelled and self.public_epochs
        return {"public-epochs": (0, "since the public examples have no labels")} if without else {}


def _traits(options: FedMDOptions) -> Traits:
    return Traits(
        keeps="model",
        scored="trained",
        public="labelled" if options.public_epochs else "inputs",
        other_arrays="mean",
        sends={"scores": "posteriors", "classes": STRUCTURE, "tokens": STRUCTURE, "distance": METRICS},
    )


method = Method(
    "fedmd",
    traits=_traits,
    Options=FedMDOptions,
    common={"rounds": 20, "local-epochs": 2, "batch-size": 5, "optimizer": "adam", "learning-rate": 0.001},
)
