"""PFNM (Yurochkin et al., ICML 2019): the server matches and averages the units of clients' networks, once."""

from dataclasses import dataclass

from fedhet.errors import ConfigError
from fedhet.methods.method import STRUCTURE, Drawing, Method, Traits
from fedhet.methods.options import Config, Options, Value, option
from fedhet.methods.sharing import Sharing


@dataclass(frozen=True)
class PFNMOptions(Options):
    """PFNM's own configuration keys, about the matching of units, with FedMA's values; FedMA inherits them."""

    gamma: float = option(
        7.0, "mass of the beta process; larger values create more global units (LSTMs: 0.001)", above=0
    )
    average: str = option(
        "map",
        "global weights: the posterior mean (the authors' code) or the plain mean (the paper)",
        choices=("map", "mean"),
    )
    variances: str = option(
        "fixed",
        "variances of local and global units: fixed at 1, or estimated for each layer",
        choices=("fixed", "estimated"),
    )
    max_growth: float = option(
        0.0, "maximum width of a global layer as a multiple of the widest client's; 0: no limit", at_least=0
    )

    def check(self, config: Config) -> None:
        """Check that `max-growth` is 0 or at least 1, so that a layer can be as wide as the widest client's."""
        if 0 < self.max_growth < 1:
            raise ConfigError(
                f"{config.family}.max-growth = {self.max_growth:g}: must be at least 1, or 0 for no limit"
            )


TRAITS = Traits(
    networks="widths",
    shares=Sharing("everything", statistics="always"),
    common_init=True,
    other_arrays="whole",
    sends={"update": "weights", "classes": "statistics", "groups": STRUCTURE, "lost": STRUCTURE},
)
COMMON: dict[str, Value] = {
    "clients": 16,
    "shared-init": False,
    "local-epochs": 150,
    "batch-size": 64,
    "learning-rate": 0.01,
    "momentum": 0.9,
}

DRAWINGS = {
    "shared_filters": Drawing(
        "fedhet.results.drawings:shared_filters_figure",
        "Which clients share which units of the global model, layer by layer (widths in brackets).",
    )
}

method = Method(
    "pfnm",
    traits=TRAITS,
    Options=PFNMOptions,
    common={**COMMON, "rounds": 1},
    drawings=DRAWINGS,
    own={"rounds": 1, "local-epochs": 100},
)
