"""What FedMA's and PFNM's keys have in common, and their pictures."""

from dataclasses import dataclass, fields

from fedhet.errors import ConfigError
from fedhet.method import STRUCTURE, Drawing
from fedhet.options import Config, Parameters, Value, option


@dataclass(frozen=True)
class MatchingParameters(Parameters):
    """The keys of matching, with FedMA's values."""

    matching: str = option(
        "matched",
        "whose units become one: matched; identity: those of one number, and random: those that are drawn, averaged "
        "plainly (controls that take matching away)",
        choices=("matched", "identity", "random"),
    )
    gamma: float = option(7.0, "mass of the beta process: larger opens more global units (LSTMs: 0.001)", above=0)
    sigma2: float = option(1.0, "variance of local units around global ones", above=0)
    sigma0_2: float = option(1.0, "variance of global units around the prior mean", above=0)
    sweeps: int = option(5, "how often each client is matched again", at_least=0)
    average: str = option(
        "map",
        "global weights: posterior mean (the authors' code) or plain mean (the paper); embeddings and LSTMs are always "
        "averaged plainly",
        choices=("map", "mean"),
    )
    variances: str = option(
        "fixed", "sigma2 and sigma0-2: as given, or estimated for each layer", choices=("fixed", "estimated")
    )
    max_growth: float = option(
        0.0,
        "widest that a global layer may become, in widths of the widest client's (at least 1); 0: no limit",
        at_least=0,
    )
    solver: str = option("scipy", "assignment solver", choices=("scipy", "lapsolver", "lapx"))
    reference_prior: bool = option(
        False, "put the bias's prior mean on column 0 after the first layer, as the authors' code does"
    )

    def check(self, config: Config) -> None:
        """A limit must let the widest client in, and the solver must be there.

        Raises:
            ConfigError: it is not so.
        """
        if 0 < self.max_growth < 1:
            raise ConfigError(
                f"{config.family}.max-growth = {self.max_growth:g}: must be at least 1, or 0 for no limit"
            )
        if self.solver != "scipy" and self.matching == "matched":
            from fedhet.matching.solvers import get_solver

            try:
                get_solver(self.solver)
            except ImportError as error:
                raise ConfigError(f"{config.family}.solver: {error}") from error

    def idle(self, config: Config) -> dict[str, str]:
        """Without matching none of its keys counts; estimated variances take the place of given ones."""
        reasons: dict[str, list[str]] = {}
        if self.matching != "matched":
            reasons["matching"] = [f.name for f in fields(MatchingParameters) if f.name != "matching"]
        elif self.variances == "estimated":
            reasons["variances"] = ["sigma2", "sigma0_2"]
        return self.set_in_vain(config.family, reasons)


TELLS = {"update": "weights", "classes": "statistics", "groups": STRUCTURE, "lost": STRUCTURE}
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
    ),
    "filters": Drawing(
        "fedhet.results.drawings:filters_figure",
        "First-layer filters that were matched, beside the global ones and plain averages at the same places.",
    ),
}
