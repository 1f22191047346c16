"""FLHA-distillation, a baseline of the FLHA-GHN paper (appendix E): clients distil a teacher, trained by FedAvg.

    first rounds:  teacher w(t) = sum_i n_i w_i(t) / sum_i n_i, as in FedAvg
    other rounds:  student v_i = argmin_v  (1 - alpha) CE(v) + alpha 2 T^2 KL(teacher || v)

Students learn on the client's own examples. The usual factor is T^2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedhet.server import FederatedStrategy, Options, Payload, Reply, State, method, option

from .families.small_network import SMALL_NETWORK


@dataclass(frozen=True)
class Keys(Options):
    uses = ("architectures",)  # The teacher is one of them; its learning rate is learning-rate.
    planned = True
    teacher: str = option("", "architecture of the teacher; empty: the first of architectures, mlp-20 for tabular data")
    teacher_rounds: float = option(0.5, "fraction of the rounds that train the teacher", above=0, at_most=1)
    student_learning_rate: float = option(0.0, "learning rate of clients' networks; 0: learning-rate / 10", at_least=0)

    def teaching(self, rounds: int) -> int:
        """Return how many of the run's `rounds` train the teacher, at least 1; the students learn in later rounds."""
        return max(1, math.floor(self.teacher_rounds * rounds + 0.5))


@method(
    "flha-distillation",
    SMALL_NETWORK,
    Keys,
    client="fedhet.client_apps.flha_distillation:FLHADistillation",
    own={"flha-distillation.student-learning-rate": 0.003},
)
class FLHADistillation(FederatedStrategy[Keys, State]):
    """FLHA-distillation: clients train a teacher by FedAvg in the first rounds, and distil it in the others."""

    @property
    def teaching(self) -> bool:
        return self.state.round < self.options.teaching(self.config.rounds)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        teaching = self.options.teaching(self.config.rounds)
        has_teacher = {client for client in clients if self.federation.keeps(client, after=teaching)}
        return {client: Payload() if client in has_teacher else self.payload_for(client) for client in clients}

    def evaluation_payloads(self, clients: Sequence[str], *, amid_training: bool) -> dict[str, Payload]:
        return {client: self.payload_for(client) if self.teaching else Payload() for client in clients}

    def check_reply(self, reply: Reply) -> None:
        if self.teaching:
            super().check_reply(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        return super().aggregate_fit(round, replies) if self.teaching else {}
