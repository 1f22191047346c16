"""Ensemble, a baseline of the FedMA paper (tables 1 and 2): the mean prediction of the clients' networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fedhet.messages import Arrays, Reply, load_into
from fedhet.methods.sharing import Sharing
from fedhet.server import ArraysBy, FederatedStrategy, Options, State, Traits, in_order, method

from .families.ensembles import Mean


class Keys(Options):
    without = ("batch-norm",)  # Clients always send whole networks.


@dataclass
class Members(State):
    """The networks of the ensemble: `member` maps each client to the latest weights of its network."""

    member: ArraysBy = field(default_factory=dict)


@method(
    "ensemble",
    Traits(
        shares=Sharing("everything", averaged=False), keeps="model", common_init=True, serves_clients=False, inside=""
    ),
    Keys,
    common={
        "clients": 16,
        "rounds": 1,
        "shared-init": False,
        "test-on": "both",
        "batch-size": 64,
        "learning-rate": 0.01,
        "momentum": 0.9,
        "local-epochs": 150,
    },
    own={"rounds": 1, "local-epochs": 100},
)
class Ensemble(FederatedStrategy[Keys, Members]):
    """Ensemble: the server collects locally trained networks of any architecture and averages their predictions."""

    def admit(self, reply: Reply) -> None:
        if self.config.test_on != "local" and (self.run.model or not reply.report.own_data):
            self.run.check_network(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        self.state.member |= {client: reply.arrays["model"] for client, reply in replies.items()}
        return {}

    makes_global_model = True

    @property
    def has_global_model(self) -> bool:
        return bool(self.state.member)

    def global_arrays(self) -> Arrays:
        members = self.state.member
        return {f"{client}/{name}": array for client in in_order(members) for name, array in members[client].items()}

    def global_model(self) -> nn.Module | None:
        if not self.has_global_model:
            return None
        members = {client: self.run.network_like(client) for client in in_order(self.state.member)}
        for client, member in members.items():
            load_into(member.state_dict(), self.state.member[client])
        return Mean([*members.values()], self.run.task)
