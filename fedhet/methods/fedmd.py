"""FedMD (Li and Wang, 2019): clients learn each other's mean class scores on a shared pool."""

from dataclasses import dataclass
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.method import METRICS, STRUCTURE, Method, Traits
from fedhet.options import Config, Parameters, option


@dataclass(frozen=True)
class FedMDParameters(Parameters):
    """FedMD's own keys, with the values of the authors' code; `local-epochs` are those of the revisits."""

    public_epochs: int = option(
        20, "epochs on the labelled pool when a client begins; 0: none, and the pool needs no labels", at_least=0
    )
    private_epochs: int = option(
        25, "epochs on its own examples when a client begins, instead of local-epochs; 0: local-epochs too", at_least=0
    )
    digest_epochs: int = option(1, "epochs of a round in which a client learns the mean scores", at_least=1)
    pool_batch: int = option(256, "examples of the pool in a mini-batch", at_least=1)
    subset: int = option(5000, "examples of the pool whose scores are exchanged in a round (at most all)", at_least=1)
    scores: Literal["logits", "probabilities"] = option(
        "logits",
        "what clients tell and learn: logits (the paper's) or probabilities",
        choices=("logits", "probabilities"),
    )
    match: Literal["absolute", "squared", "kl-divergence"] = option(
        "absolute",
        "how scores are learnt: by their mean absolute (the authors') or squared error, or by KL divergence",
        choices=("absolute", "squared", "kl-divergence"),
    )
    average: Literal["mean", "entropy-reduced"] = option(
        "mean",
        "the mean as it is, or the softmax of mean probabilities over a temperature (DS-FL)",
        choices=("mean", "entropy-reduced"),
    )
    temperature: float = option(0.1, "temperature of average = entropy-reduced", above=0)
    classes: Literal["all", "handled"] = option(
        "all",
        "whose scores of a class count in the mean: all clients', or those who saw labels of it, the pool's included",
        choices=("all", "handled"),
    )
    whose: Literal["peers", "own", "shuffled"] = option(
        "peers",
        "whose scores: the mean of all, or as controls the client's own before the round, or the mean of other rows",
        choices=("peers", "own", "shuffled"),
    )
    scores_dtype: Literal["float16", "float32"] = option(
        "float16", "dtype of scores on the wire", choices=("float16", "float32")
    )

    def __post_init__(self) -> None:
        """Check what goes together.

        Raises:
            ConfigError: what does not.
        """
        if self.average == "entropy-reduced" and self.scores != "probabilities":
            raise ConfigError(
                "fedmd.average = 'entropy-reduced' sharpens mean probabilities: it needs fedmd.scores = 'probabilities'"
            )

    def idle(self, config: Config) -> dict[str, str]:
        """A temperature nobody divides by; of a client's own scores nothing travels."""
        reasons = {"average": ["temperature"] if self.average == "mean" else []}
        reasons["whose"] = ["classes", "scores_dtype"] if self.whose == "own" else []
        return self.set_in_vain("fedmd", reasons)


def _traits(parameters: FedMDParameters) -> Traits:
    tells = {"classes": STRUCTURE, "distance": METRICS}
    pool: Literal["labelled", "inputs"] = "labelled" if parameters.public_epochs else "inputs"
    if parameters.whose == "own":
        return Traits(keeps="model", scored="trained", pool=pool, tells=tells)
    tells |= {"scores": "posteriors"} | ({"handled": "statistics"} if parameters.classes == "handled" else {})
    return Traits(keeps="model", scored="trained", pool=pool, combined="entries", tells=tells)


method = Method(
    "fedmd",
    traits=_traits,
    Parameters=FedMDParameters,
    server="fedhet.strategies.fedmd:FedMD",
    client="fedhet.client_apps.fedmd:FedMD",
    common={"rounds": 20, "local-epochs": 2, "batch-size": 5, "optimizer": "adam", "learning-rate": 0.001},
)
