"""FedMD (Li and Wang, 2019, algorithm 1): clients learn the mean of their class scores of public examples.

    client i:  w_i = argmin_w  mean_(x in X(t)) |f_w(x) - F(x)|, then argmin_w  L_i(w)
    client i:  sends f_(w_i)(x) for the public examples x in X(t+1)
    server:    F(x) = mean_i f_(w_i)(x)

Before its first round, a client trains on the labelled public dataset.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fedhet.server import METRICS, Reply, Traits, method, option

from .families.scores import Scores, ScoresKeys, ScoresState, distance_metric


@dataclass(frozen=True)
class Keys(ScoresKeys):
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

    @property
    def first_epochs(self) -> int:  # type: ignore[override]
        return self.private_epochs


@method(
    "fedmd",
    lambda keys: Traits(
        keeps="model",
        public="labelled" if keys.public_epochs else "inputs",
        other_arrays="mean",
        sends={"scores": "posteriors", "distance": METRICS},
        inside="",
    ),
    Keys,
    client="fedhet.client_apps.fedmd:FedMD",
    common={"rounds": 20, "local-epochs": 2, "batch-size": 5, "optimizer": "adam", "learning-rate": 0.001},
    own={"fedmd.private-epochs": 0},  # as many private steps as other methods take
)
class FedMD(Scores[Keys, ScoresState]):
    """FedMD: clients learn the mean of their class scores of public examples (Li and Wang, 2019, algorithm 1)."""

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        if self.sent_in(round):
            self.teach(round, self.mean(replies))
        return distance_metric(replies.values(), "distance")

    def sent_in(self, round: int) -> bool:
        return round != self.run.last_round
