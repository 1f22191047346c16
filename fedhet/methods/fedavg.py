"""FedAvg (McMahan et al., AISTATS 2017), and averages among clients whose networks differ."""

from dataclasses import dataclass, replace

from fedhet.errors import ConfigError
from fedhet.method import STRUCTURE, Method, Traits
from fedhet.methods._averages import AveragingParameters, average_traits
from fedhet.options import Config, option


@dataclass(frozen=True)
class FedAvgParameters(AveragingParameters):
    """FedAvg's own keys."""

    last_layer: str = option(
        "examples",
        "how clients count in the average of the output layer: by their examples, or in each class's row by their "
        "examples of that class, as in FedMA (classes)",
        choices=("examples", "classes"),
    )
    last_learning_rate: float = option(1.0, "learning rate of the last round, in learning-rate", above=0)

    def check(self, config: Config) -> None:
        """The last layer is averaged by classes or by a rule.

        Raises:
            ConfigError: both are asked for.
        """
        if self.last_layer == "classes" and (config.aggregation != "mean" or config.clip_norm):
            raise ConfigError(
                f"fedavg.last-layer = classes averages that layer by classes, and aggregation = {config.aggregation}, "
                f"clip-norm = {config.clip_norm:g} ask for another rule: leave one of them out"
            )

    def idle(self, config: Config) -> dict[str, str]:
        """The last layer and the last round are those of one global model."""
        lost = () if self.average == "all" else ("last_layer", "last_learning_rate")
        return self.set_in_vain("fedavg", {"average": lost})


def _traits(parameters: FedAvgParameters) -> Traits:
    traits = average_traits(parameters)
    by_class = {"classes": "statistics", "head": STRUCTURE}
    return replace(traits, tells=by_class) if parameters.last_layer == "classes" else traits


method = Method(
    "fedavg",
    traits=_traits,
    Parameters=FedAvgParameters,
    server="fedhet.strategies.fedavg:FedAvg",
    client="fedhet.client_apps.fedavg:FedAvg",
)
