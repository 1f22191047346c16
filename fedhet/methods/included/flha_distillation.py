"""FLHA-distillation: FedAvg of a teacher of one architecture, then distillation into each client's own network.

The baseline of FLHA-GHN's paper (section 5.1, appendix E), which follows Lin et al. (NeurIPS 2020) on local data only.
"""

import math
from dataclasses import dataclass

from fedhet.methods.method import STRUCTURE, Method, Traits
from fedhet.methods.options import Options, option


@dataclass(frozen=True)
class FLHADistillationOptions(Options):
    """FLHA-distillation's own configuration keys; the common key `learning-rate` is for training the teacher."""

    uses = ("architectures",)  # of the additional network
    teacher: str = option("", "architecture of the teacher; empty: the first of architectures, mlp-20 for tabular data")
    teacher_rounds: float = option(
        0.5, "fraction of the rounds that train the teacher; the others train the clients' networks", above=0, at_most=1
    )
    student_learning_rate: float = option(
        0.0, "learning rate of the clients' networks; 0: a tenth of learning-rate", at_least=0
    )

    def teaching(self, rounds: int) -> int:
        """Return how many of the first rounds, at least one, train the teacher."""
        return max(1, math.floor(self.teacher_rounds * rounds + 0.5))


method = Method(
    "flha-distillation",
    traits=Traits(keeps="model", scored="trained", common_init=True, sends={"model": "weights", "taught": STRUCTURE}),
    Options=FLHADistillationOptions,
    own={"flha-distillation.student-learning-rate": 0.003},
)
