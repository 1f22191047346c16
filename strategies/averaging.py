"""Strategies of FedAvg, LG-FedAvg, FedRep, and of Ensemble, a baseline of the FedMA paper (tables 1 and 2)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedhet.messages import Arrays, Reply, load_into
from fedhet.methods.included.averaging import FedRepOptions, ensemble, fedavg, fedrep, lg_fedavg
from fedhet.methods.options import Options
from fedhet.models.representation import in_precision, precision
from fedhet.server import ArraysBy, FederatedStrategy, State, in_order


class FedAvg(FederatedStrategy[Options, State]):
    """FedAvg: the average of clients' networks weighted by numbers of examples (McMahan et al., AISTATS 2017)."""

    method = fedavg


class LGFedAvg(FederatedStrategy[Options, State]):
    """LG-FedAvg: the average of the heads of clients' networks (Liang et al., 2020)."""

    method = lg_fedavg


class FedRep(FederatedStrategy[FedRepOptions, State]):
    """FedRep: the average of all arrays but the head (Collins et al., ICML 2021); a final round only trains heads."""

    method = fedrep

    def check_reply(self, reply: Reply) -> None:
        if self.run.round.closing:
            reply.arrays.clear()
        else:
            super().check_reply(reply)


@dataclass
class EnsembleState(State):
    """The state of Ensemble: `member` maps each client to the latest weights of its network."""

    member: ArraysBy = field(default_factory=dict)


class Ensemble(FederatedStrategy[Options, EnsembleState]):
    """Ensemble: the server collects locally trained networks of any architecture and averages their predictions."""

    method = ensemble

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
        return Mean([*members.values()], self.run.metric)


class Mean(nn.Module):
    """A network that returns the mean of its members' predictions.

    It returns the log of the mean softmax for classes, the logit of the mean sigmoid for multi-label tasks or a single
    output, and the mean output for regression.
    """

    def __init__(self, members: list[nn.Module], metric: str = "accuracy") -> None:
        super().__init__()
        self.members, self.metric = nn.ModuleList(members), metric

    def forward(self, inputs: Tensor) -> Tensor:
        batches = [in_precision(inputs, precision(member)) for member in self.members]
        outputs = torch.stack([member(batch) for member, batch in zip(self.members, batches, strict=True)])
        if self.metric == "r2":
            return outputs.mean(0)
        classes = 2 if self.metric == "iou" else -1  # the axis of classes, after those of members and examples
        if self.metric == "auc" or outputs.ndim == 2 or outputs.shape[classes] == 1:
            return outputs.sigmoid().mean(0).logit()
        return outputs.softmax(classes).mean(0).log()
