"""Ensemble, server side: the mean of the clients' predictions, the comparison of FedMA's paper (table 2).

Clients of any architectures train on their own and send their networks once; the prediction is the mean of their
softmax (sigmoid, for many labels). It stands in the history as the model on the common test set, since no client holds
all the networks; a client's own accuracy is its own network's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedhet.methods import ensemble
from fedhet.options import Parameters
from fedhet.representations.precision import in_precision, precision
from fedhet.server import ArraysBy, FederatedStrategy, State, in_order
from fedhet.task import Task, get_task
from fedhet.wire import Reply, load_into


@dataclass
class EnsembleState(State):
    """`member` holds the newest network of each client."""

    member: ArraysBy = field(default_factory=dict)


class Ensemble(FederatedStrategy[Parameters, EnsembleState]):
    """The prediction is the mean of the members'."""

    method = ensemble.method
    state_class = EnsembleState

    def admit(self, reply: Reply) -> None:
        """The server must be able to build the network, if it is to evaluate the ensemble."""
        if self.config.test_on != "local" and not reply.report.own_data:
            self.networks.check(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Keep each client's newest network."""
        self.state.member |= {client: reply.arrays["model"] for client, reply in replies.items()}
        return {}

    @property
    def has_global_model(self) -> bool:
        """Whether any client has sent its network."""
        return bool(self.state.member)

    def global_model(self) -> nn.Module | None:
        """A network whose outputs are the log of the mean prediction, None before any client has sent its own."""
        members = []
        for client in in_order(self.state.member):
            members.append(self.networks.like(client))
            load_into(members[-1].state_dict(), self.state.member[client])
        return (
            Mean(members, get_task("multi-label" if self.run.metric == "auc" else "classification"))
            if members
            else None
        )


class Mean(nn.Module):
    """Outputs whose predictions are the mean of the members': log probabilities, or log odds for many labels."""

    def __init__(self, members: list[nn.Module], task: Task) -> None:
        super().__init__()
        self.members, self.task = nn.ModuleList(members), task

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, ..., classes) outputs of a batch."""
        taken = [in_precision(inputs, precision(member)) for member in self.members]
        outputs = [member(own) for member, own in zip(self.members, taken, strict=True)]
        mean = torch.stack([self.task.probabilities(each) for each in outputs]).mean(0)
        return mean.logit() if self.task.name == "multi-label" else mean.log()
