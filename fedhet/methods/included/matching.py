"""Declarations of methods whose server matches and averages the units of clients' networks."""

from dataclasses import dataclass
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import Config, Options, Value, option
from fedhet.methods.sharing import Sharing


@dataclass(frozen=True)
class PFNMOptions(Options):
    gamma: float = option(7.0, "mass of the beta process; larger: more global units (LSTMs: 0.001)", above=0)
    average: Literal["map", "mean"] = option(
        "map", "global weights: the posterior mean (the authors' code) or the plain mean (the paper)"
    )
    variances: Literal["fixed", "estimated"] = option(
        "fixed", "variances of local and global units: fixed at 1, or estimated for each layer"
    )
    max_growth: float = option(0.0, "maximum global width as a multiple of the widest client's; 0: none", at_least=0)

    def check(self, config: Config) -> None:
        """Check that `max-growth` is 0 or at least 1; raise a ConfigError otherwise."""
        if 0 < self.max_growth < 1:
            raise ConfigError(f"{config.family}.max-growth = {self.max_growth:g}: set at least 1, or 0 for no limit")


_traits = Traits(
    networks="widths",
    shares=Sharing("everything", statistics="always"),
    common_init=True,
    other_arrays="whole",
    sends={"update": "weights", "classes": "statistics", "groups": STRUCTURE},
)
_common: dict[str, Value] = {
    "clients": 16,
    "shared-init": False,
    "local-epochs": 150,
    "batch-size": 64,
    "learning-rate": 0.01,
    "momentum": 0.9,
}

pfnm = Method(
    "pfnm",
    _traits,
    PFNMOptions,
    common={**_common, "rounds": 1},
    own={"rounds": 1, "local-epochs": 100, "batch-norm": "re-estimate"},
)


@dataclass(frozen=True)
class FedMAOptions(PFNMOptions):
    passes: int = option(1, "number of passes over all layers, if rounds = 0", at_least=1)
    retrain_epochs: int = option(0, "number of epochs after a layer is matched; 0: local-epochs", at_least=0)
    last_epochs: int = option(3, "epochs of the output layer's round, as a multiple of retrain-epochs", at_least=0)
    last_learning_rate: float = option(0.0, "learning rate of the output layer's round; 0: learning-rate", at_least=0)

    without = ("closing-epochs",)  # nothing is learnt from a round after the last pass


fedma = Method(
    "fedma",
    _traits,
    FedMAOptions,
    common={**_common, "rounds": 0},
    own={"rounds": 0, "local-epochs": 20, "fedma.retrain-epochs": 10},
)
