"""Ensemble, server half: the mean of the clients' predictions, the comparison of FedMA's paper (table 2).

Clients of any architectures train on their own and send their networks once; the prediction is the mean of their
softmax (sigmoid, for many labels). It stands in the history as the model on the common test set, since no client holds
all the networks; a client's own accuracy is its own network's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedhet.config import Value
from fedhet.exchange import load_into
from fedhet.replies import Reply
from fedhet.server import FederatedStrategy
from fedhet.task import Task, get_task
from fedhet.wire import Payload


@dataclass(frozen=True)
class Parameters:
    """The ensemble has none of its own."""


class Ensemble(FederatedStrategy):
    """`state.arrays["member-CLIENT"]` is the newest network of each client."""

    name = "ensemble"
    Parameters = Parameters
    common: ClassVar[Mapping[str, Value]] = {
        "clients": 16,
        "rounds": 1,
        "shared-init": False,
        "test-on": "both",
        "batch-size": 64,
        "learning-rate": 0.01,
        "momentum": 0.9,
        "local-epochs": 150,
    }

    def received_by_all(self) -> Payload:
        """Nothing."""
        return Payload()

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Keep each client's newest network."""
        self.state.arrays |= {f"member-{client}": reply.arrays["model"] for client, reply in replies.items()}
        return {}

    @property
    def has_global_network(self) -> bool:
        """Whether any client has sent its network."""
        return any(f"member-{client}" in self.state.arrays for client in self.state.clients)

    def global_network(self) -> nn.Module | None:
        """A network whose outputs are the log of the mean prediction, None before any client has sent its own."""
        members = []
        for client in self.in_order(self.state.clients):
            if own := self.state.arrays.get(f"member-{client}"):
                members.append(self.network_of(client))
                load_into(members[-1].state_dict(), own)
        return Mean(members, get_task("multi-label" if self.metric == "auc" else "classification")) if members else None


class Mean(nn.Module):
    """Outputs whose predictions are the mean of the members': log probabilities, or log odds for many labels."""

    def __init__(self, members: list[nn.Module], task: Task) -> None:
        super().__init__()
        self.members, self.task = nn.ModuleList(members), task

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, ..., classes) outputs of a batch."""
        mean = torch.stack([self.task.probabilities(member(inputs)) for member in self.members]).mean(0)
        return mean.logit() if self.task.name == "multi-label" else mean.log()
