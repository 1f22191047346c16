"""Declarations of methods that train networks on the outputs of other networks (knowledge distillation)."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from fedhet.methods.method import METRICS, Method, Traits
from fedhet.methods.options import Options, option


@dataclass(frozen=True)
class AuxiliaryOptions(Options):
    uses = ("architectures",)  # of the auxiliary network
    shared_model: str = option("", "shared network; empty: the first of architectures, mlp-20 for tabular data")


@dataclass(frozen=True)
class FMLOptions(AuxiliaryOptions):
    alpha: float = option(0.5, "weight of labels in the own network's loss; 1 - alpha: of scores", above=0, at_most=1)
    beta: float = option(0.5, "weight of labels in the shared network's loss; 1 - beta: scores", at_least=0, at_most=1)


_auxiliary = Traits(keeps="model", common_init=True, sends={"model": "weights"})

fml = Method("fml", _auxiliary, FMLOptions)

FIRST, LAST = 0.95, 0.98  # the fractions that `energy` returns at the start and in the last round


def energy(round: int, rounds: int) -> float:
    """Return the fraction of the sum of an update's squared singular values that FedKD keeps in `round` of `rounds`."""
    return FIRST + min(round / max(rounds, 1), 1.0) * (LAST - FIRST)


fedkd = Method(
    "fedkd",
    replace(_auxiliary, other_arrays="entries", sends={"model": "weights", "update": "weights"}, planned=True),
    AuxiliaryOptions,
)


@dataclass(frozen=True)
class FedMRLOptions(AuxiliaryOptions):
    width: int = option(0, "width d1 of the shared network's representation; 0: unchanged", at_least=0, at_most=2**16)


fedmrl = Method("fedmrl", replace(_auxiliary, predicts="the client's head, from both networks"), FedMRLOptions)


@dataclass(frozen=True)
class FLHADistillationOptions(Options):
    uses = ("architectures",)  # of the teacher, whose learning rate is learning-rate
    teacher: str = option("", "architecture of the teacher; empty: the first of architectures, mlp-20 for tabular data")
    teacher_rounds: float = option(0.5, "fraction of the rounds that train the teacher", above=0, at_most=1)
    student_learning_rate: float = option(0.0, "learning rate of clients' networks; 0: learning-rate / 10", at_least=0)

    def teaching(self, rounds: int) -> int:
        """Return how many of the run's `rounds` train the teacher, at least 1; the students learn in later rounds."""
        return max(1, math.floor(self.teacher_rounds * rounds + 0.5))


flha_distillation = Method(
    "flha-distillation",
    replace(_auxiliary, planned=True),
    FLHADistillationOptions,
    own={"flha-distillation.student-learning-rate": 0.003},
)


class ScoresOptions(Options):
    """Keys of methods that train on scores of public examples: at most `subset` a round, `public_batch` in a batch."""

    public_batch: int
    subset: ClassVar[int] = 5000


@dataclass(frozen=True)
class FedMDOptions(ScoresOptions):
    # The values are from the authors' code, in which local-epochs is "revisit".
    public_batch: int = option(256, "number of public examples per mini-batch", at_least=1)
    public_epochs: int = option(
        20,
        "number of epochs on the labelled public dataset in a client's first round; 0: no labels are needed",
        at_least=0,
        at_need=0,
    )
    private_epochs: int = option(25, "number of private epochs in a client's first round; 0: local-epochs", at_least=0)
    digest_epochs: int = option(1, "number of epochs per round on the mean scores", at_least=1)


fedmd = Method(
    "fedmd",
    lambda options: Traits(
        keeps="model",
        public="labelled" if options.public_epochs else "inputs",
        other_arrays="mean",
        sends={"scores": "posteriors", "distance": METRICS},
    ),
    FedMDOptions,
    common={"rounds": 20, "local-epochs": 2, "batch-size": 5, "optimizer": "adam", "learning-rate": 0.001},
)


@dataclass(frozen=True)
class FedDFOptions(ScoresOptions):
    uses = ("architectures",)  # of the server's network
    public_batch = 128
    server_model: str = option("", "the server's network; empty: the first of architectures, mlp-20 for tabular data")
    server_steps: int = option(1000, "number of mini-batches per round on which the server trains", at_least=1)
    server_learning_rate: float = option(0.001, "initial learning rate of the server's Adam, in each round", above=0)
    teach: bool = option(False, "clients first train for an epoch on the server's scores", at_need=True)


feddf = Method(
    "feddf",
    lambda options: Traits(
        keeps="model",
        public="inputs",
        public_at_server=True,
        serves_clients=options.teach,  # without it, clients do not use the server's network
        other_arrays="mean",
        sends={"scores": "posteriors", "distance": METRICS},
    ),
    FedDFOptions,
    common={"test-on": "both"},
    own={"feddf.server-steps": 100},
)
