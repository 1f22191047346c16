"""FedGen (Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021)."""

from dataclasses import dataclass

from fedhet.methods.included.fedproto import WidthOptions
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import option
from fedhet.methods.sharing import HEAD


@dataclass(frozen=True)
class FedGenOptions(WidthOptions):
    """FedGen's own configuration keys, with the paper's weight; other defaults are from the authors' code for MNIST."""

    weight: float = option(1.0, "weight of the clients' loss on generated representations", at_least=0)
    diversity: float = option(1.0, "weight of the generator's diversity loss", at_least=0)
    server_steps: int = option(50, "number of steps per round in which the server trains the generator", at_least=1)
    server_learning_rate: float = option(3e-4, "learning rate of the server's Adam", above=0)


method = Method(
    "fedgen",
    traits=Traits(shares=HEAD, keeps="model", scored="trained", common_init=True, sends={"classes": "statistics"}),
    Options=FedGenOptions,
    own={"fedgen.width": 32},
)
