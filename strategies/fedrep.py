"""FedRep (Collins et al., ICML 2021): the server averages the networks' bodies phi, and each client keeps its head h.

    client i:  h_i = argmin_h  L_i(h, phi(t-1)), then phi_i = argmin_phi  L_i(h_i, phi)
    server:    phi(t) = sum_i n_i phi_i / sum_i n_i

A last round only trains heads.
"""

from dataclasses import dataclass

from fedhet.errors import ConfigError
from fedhet.methods.sharing import BODY
from fedhet.server import Config, FederatedStrategy, Options, Reply, State, Traits, method, option


@dataclass(frozen=True)
class Keys(Options):
    body_epochs: int = option(1, "number of epochs per round for the body; the others are for the head", at_least=1)

    def check(self, config: Config) -> None:
        """Check that epochs remain for the head: `local-epochs` above `body-epochs`; raise a ConfigError otherwise."""
        if 0 < config.local_epochs <= self.body_epochs:
            raise ConfigError(f"fedrep.body-epochs = {self.body_epochs}: must be below local-epochs, for the head")


@method(
    "fedrep",
    Traits(networks="equal", shares=BODY, common_init=True, inside="head"),
    Keys,
    client="fedhet.client_apps.fedrep:FedRep",
    common={"local-epochs": 11, "closing-epochs": 10},
    own={"fedrep.body-epochs": 2},
)
class FedRep(FederatedStrategy[Keys, State]):
    """FedRep: the average of all arrays but the head (Collins et al., ICML 2021); a final round only trains heads."""

    def check_reply(self, reply: Reply) -> None:
        if self.run.round.closing:
            reply.arrays.clear()
        else:
            super().check_reply(reply)
