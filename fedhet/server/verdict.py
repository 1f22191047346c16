"""Warnings at the end of a run that completed, though not all is as it should be."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fedhet.rows import never_took_part
from fedhet.server.run import Run, by_reason, named


class Verdict:
    """The rounds of a run, and what they come to.

    Attributes:
        run: the run's values.
        rounds: who took part in each round, and who failed.
        train_loss: of the last round that tells one.
        evaluated: the last evaluation of what the method is scored by, on whichever test set there is.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.rounds = run, list[Mapping[str, Any]]()
        self.train_loss: float | None = None
        self.evaluated: Mapping[str, Any] | None = None

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a row of the history."""
        self.rounds.append({name: row[name] for name in ("participants", "failures")})
        if row["train_loss"] is not None:
            self.train_loss = row["train_loss"]
        for test in (row, row.get("common") or {}):
            if found := test.get(self.run.traits.scored):
                self.evaluated = found
                break

    def lines(self) -> Iterator[str]:
        """Return the warnings, a sentence each."""
        run, rounds = self.run, self.run.last_round
        trained = {client: record.trained for client, record in run.state.clients.items()}
        absent = {c: why for c, why in never_took_part(self.rounds).items() if trained.get(c, -1) < 0}
        for reason, clients in by_reason(absent.items()).items():
            yield f"{named(clients)} completed no round: {reason}"
        last = max(trained.values(), default=rounds)
        if rounds and last < rounds:
            yield f"the last round that counted is {max(last, 0)} of {rounds}"
        if not rounds:
            return
        if self.evaluated is None:
            yield f"nothing is known of how good the models are: what clients {run.traits.scored} was evaluated nowhere"
        elif worthless := self._no_better_than_constant():
            yield f"{worthless}: a lower learning-rate than {run.config.learning_rate:g} may help"

    def _no_better_than_constant(self) -> str:
        """That what was learnt at the end is no better than the same prediction for all examples; empty if it is."""
        assert self.evaluated is not None
        metric, outputs = self.run.metric, self.run.outputs
        value, loss = (_weighted(self.evaluated.get(kind)) for kind in ("accuracy", "loss"))
        if metric == "r2":  # 0 is that of the mean
            if value is None or value > 0:
                return ""
            return f"at the end predictions are no better than the mean of the targets (R2 {value:.3g})"
        if outputs < 2 or loss is None or self.train_loss is None:
            return ""
        least = math.log(2 if metric == "auc" else outputs)
        if min(loss, self.train_loss) < least:
            return ""
        return (
            f"at the end the loss is not below that of a constant prediction ({least:.3g}, all outputs alike): it is "
            f"{self.train_loss:.3g} in training and {loss:.3g} in the evaluation"
        )


def _weighted(value: Any) -> float | None:
    """A statistic over clients, or the number of a single model."""
    found = value.get("weighted") if isinstance(value, Mapping) else value
    return None if found is None or not math.isfinite(found) else float(found)
