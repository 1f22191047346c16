"""Ensemble, a baseline of the FedMA paper (tables 1 and 2): the mean prediction of the clients' networks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedhet.messages import Arrays, Reply, load_into
from fedhet.methods.sharing import Sharing
from fedhet.models.representation import in_precision, precision
from fedhet.server import ArraysBy, FederatedStrategy, Options, State, Traits, in_order, method


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


class Mean(nn.Module):
    """A network that returns the mean of its members' predictions.

    It returns the log of the mean softmax for classes, the logit of the mean sigmoid for multi-label tasks or a single
    output, and the mean output for regression.
    """

    def __init__(self, members: list[nn.Module], task: str = "classification") -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.task = task

    def forward(self, inputs: Tensor) -> Tensor:
        batches = [in_precision(inputs, precision(member)) for member in self.members]
        outputs = torch.stack([member(batch) for member, batch in zip(self.members, batches, strict=True)])
        if self.task in ("regression", "survival"):
            return outputs.mean(0)
        classes = 2 if self.task == "segmentation" else -1  # the axis of classes, after those of members and examples
        if self.task == "multi-label" or outputs.ndim == 2 or outputs.shape[classes] == 1:
            return outputs.sigmoid().mean(0).logit()
        return outputs.softmax(classes).mean(0).log()
