"""FedDF (Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020)."""

from dataclasses import dataclass

from fedhet.methods.included.fedmd import ScoresOptions
from fedhet.methods.method import METRICS, STRUCTURE, Method, Traits
from fedhet.methods.options import option


@dataclass(frozen=True)
class FedDFOptions(ScoresOptions):
    """FedDF's own configuration keys."""

    uses = ("architectures",)  # of the additional network
    public_batch, subset = 128, 5000
    server_model: str = option(
        "", "architecture of the server's network; empty: the first of architectures, mlp-20 for tabular data"
    )
    server_steps: int = option(1000, "number of mini-batches per round on which the server trains", at_least=1)
    server_learning_rate: float = option(
        0.001, "initial learning rate of the server's Adam, which follows a cosine in each round", above=0
    )
    teach: bool = option(
        False,
        "clients train on the server's scores for one epoch before they train on their own examples",
        at_need=(True,),
    )


def traits(options: FedDFOptions) -> Traits:
    """Return the traits for these keys; without `teach`, clients do not use the server's network."""
    return Traits(
        keeps="model",
        scored="trained",
        public="inputs",
        public_at_server=True,
        serves_clients=options.teach,
        other_arrays="mean",
        sends={"scores": "posteriors", "classes": STRUCTURE, "distance": METRICS},
    )


method = Method(
    "feddf", traits=traits, Options=FedDFOptions, common={"test-on": "both"}, own={"feddf.server-steps": 100}
)
