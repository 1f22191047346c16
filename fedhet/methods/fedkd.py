"""FedKD (Wu et al., "Communication-efficient federated learning via knowledge distillation", 2022)."""

from dataclasses import dataclass, replace

from fedhet.method import Method
from fedhet.methods.fml import TRAITS, BesideParameters
from fedhet.options import option


@dataclass(frozen=True)
class FedKDParameters(BesideParameters):
    """FedKD's own keys, with the paper's values."""

    first_energy: float = option(
        0.95,
        "part of the squared singular values of each matrix's change that is sent at the start of the run",
        above=0,
        at_most=1,
    )
    last_energy: float = option(0.98, "the same in the last round; in between it grows evenly", above=0, at_most=1)

    def energy(self, round: int, rounds: int) -> float:
        """Return the part that is kept in a round, from 1."""
        return self.first_energy + min(round / max(rounds, 1), 1.0) * (self.last_energy - self.first_energy)


method = Method(
    "fedkd",
    traits=replace(TRAITS, other_arrays="entries", sends={"model": "weights", "update": "weights"}),
    Parameters=FedKDParameters,
    server="fedhet.strategies.fedkd:FedKD",
    client="fedhet.client_apps.fedkd:FedKD",
)
