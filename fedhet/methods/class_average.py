"""FedAvg whose output layer is averaged class by class, as FedMA averages it (Wang et al., ICLR 2020, section 3)."""

from dataclasses import dataclass

from fedhet.errors import ConfigError
from fedhet.method import STRUCTURE, Method, Traits
from fedhet.options import Config, Parameters, option
from fedhet.sharing import EVERYTHING


@dataclass(frozen=True)
class ClassAverageParameters(Parameters):
    """The method's own keys."""

    last_learning_rate: float = option(0.0, "learning rate of the last round; 0: learning-rate", at_least=0)

    def check(self, config: Config) -> None:
        """Refuse other rules of aggregation."""
        if config.aggregation != "mean" or config.clip_norm:
            raise ConfigError(
                f"class-average averages the output layer by classes, and aggregation = {config.aggregation}, "
                f"clip-norm = {config.clip_norm:g} ask for another rule: leave them out, or use fedavg"
            )


method = Method(
    "class-average",
    traits=Traits(
        networks="equal", shares=EVERYTHING, common_init=True, sends={"classes": "statistics", "head": STRUCTURE}
    ),
    Parameters=ClassAverageParameters,
    server="fedhet.strategies.class_average:ClassAverage",
    client="fedhet.client_apps.class_average:ClassAverage",
)
