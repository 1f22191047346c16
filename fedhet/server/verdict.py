"""Warnings at the end of a run that completed, though not all is as it should be."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedhet.rows import never_took_part
from fedhet.server.run import named

log = logging.getLogger("flwr").getChild("fedhet")


@dataclass
class Verdict:
    """The rounds of a run, and what they come to.

    Attributes:
        scored: which evaluation is the method's, `received` or `trained`.
        rounds: who took part in each round, and who failed.
        train_loss: of the last round that tells one.
        evaluated: the last evaluation of what the method is scored by, on whichever test set there is.
    """

    scored: str
    rounds: list[Mapping[str, Any]] = field(default_factory=list)
    train_loss: float | None = None
    evaluated: Mapping[str, Any] | None = None

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a row of the history."""
        self.rounds.append({name: row[name] for name in ("participants", "failures")})
        if row["train_loss"] is not None:
            self.train_loss = row["train_loss"]
        for test in (row, row.get("common") or {}):
            if found := test.get(self.scored):
                self.evaluated = found
                break

    def lines(self, trained: Mapping[str, int], metric: str, outputs: int, rounds: int, rate: float) -> Iterator[str]:
        """Return the warnings, a sentence each.

        Args:
            trained: the last round of each client that counted, -1 for none.
            metric: name of the task's metric.
            outputs: how many outputs a prediction has; 0 if that is not known.
            rounds: the number of rounds.
            rate: the learning rate.
        """
        absent = {c: why for c, why in never_took_part(self.rounds).items() if trained.get(c, -1) < 0}
        for reason, clients in _by_reason(absent).items():
            yield f"{named(clients)} completed no round: {reason}"
        last = max(trained.values(), default=rounds)
        if rounds and last < rounds:
            yield f"the last round that counted is {max(last, 0)} of {rounds}"
        if not rounds:
            return
        if self.evaluated is None:
            yield f"nothing is known of how good the models are: what clients {self.scored} was evaluated nowhere"
        elif worthless := self._no_better_than_constant(metric, outputs):
            yield f"{worthless}: a lower learning-rate than {rate:g} may help"

    def _no_better_than_constant(self, metric: str, outputs: int) -> str:
        """That what was learnt at the end is no better than the same prediction for all examples; empty if it is."""
        assert self.evaluated is not None
        value, loss = (_weighted(self.evaluated.get(kind)) for kind in ("accuracy", "loss"))
        if metric == "r2":  # 0 is that of the mean
            constant = value is not None and value <= 0
            return (
                f"at the end predictions are no better than the mean of the targets (R2 {value:.3g})"
                if constant
                else ""
            )
        if outputs < 2 or loss is None or self.train_loss is None:
            return ""
        least = math.log(2 if metric == "auc" else outputs)
        if min(loss, self.train_loss) < least:
            return ""
        return (
            f"at the end the loss is not below that of a constant prediction ({least:.3g}, all outputs alike): it is "
            f"{self.train_loss:.3g} in training and {loss:.3g} in the evaluation"
        )


def _by_reason(failed: Mapping[str, str]) -> dict[str, Sequence[str]]:
    found: dict[str, list[str]] = {}
    for client, reason in failed.items():
        found.setdefault(reason, []).append(client)
    return {**found}


def _weighted(value: Any) -> float | None:
    """A statistic over clients, or the number of a single model."""
    found = value.get("weighted") if isinstance(value, Mapping) else value
    return None if found is None or not math.isfinite(found) else float(found)
