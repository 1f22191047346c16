"""What the runs of a comparison came to, and means and spreads over seeds.

Every number is that of the last round, never of the best one. Spread is the sample standard deviation over seeds;
differences between methods are paired, seed by seed.
"""

import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedhet.comparing.cases import Case
from fedhet.results.history import Which, scored_curve
from fedhet.results.run_files import RunFiles, read_run
from fedhet.results.tables import UNDISCLOSED
from fedhet.rows import never_took_part

ACCURACIES = ("personal_accuracy", "trained_accuracy", "global_accuracy", "common_accuracy")
EXAMPLES, WORK = ("labelled", "unlabelled"), ("private_steps", "steps", "forwards")
MEASURES = (*ACCURACIES, *EXAMPLES, *WORK, "bytes_up", "bytes_down", "seconds")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Measured:
    """What a completed run came to.

    Attributes:
        case: the run.
        models: the clients' models in words.
        values: the `MEASURES` by name, None where there is none.
        curve: the personal accuracy by round.
        metric: the name of what is called accuracy here.
        stopped: the round after which early stopping ended training; None if it did not.
        refused: why clients never took part, by name.
    """

    case: Case
    models: str
    values: Mapping[str, float | None]
    curve: Mapping[int, float]
    metric: str
    stopped: int | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A mean difference over seeds, and how far its confidence interval goes to both sides; None for one seed."""

    mean: float
    margin: float | None
    seeds: int


@dataclass(frozen=True)
class ArmResult:
    """An arm over its completed seeds."""

    arm: str
    seeds_wanted: int
    runs: Sequence[Measured]
    forced: bool

    @property
    def models(self) -> str:
        """The clients' models in words."""
        return self.runs[0].models if self.runs else "-"

    def mean(self, measure: str) -> float | None:
        """The mean over seeds; None where no run has the measure."""
        values = self._values(measure)
        return statistics.fmean(values) if values else None

    def spread(self, measure: str) -> float | None:
        """The sample standard deviation over seeds; None for fewer than two."""
        values = self._values(measure)
        return statistics.stdev(values) if len(values) > 1 else None

    def difference(self, other: "ArmResult", measure: str) -> Difference | None:
        """This arm less another, over the seeds that both completed, with Student's t interval (`CONFIDENCE`).

        None where they have no seed in common.
        """
        its = {run.case.seed: run.values[measure] for run in other.runs}
        pairs = [(run.values[measure], its.get(run.case.seed)) for run in self.runs]
        differences = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
        if not differences:
            return None
        seeds = len(differences)
        margin = None
        if seeds > 1:
            from scipy import stats

            quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1))
            margin = quantile * statistics.stdev(differences) / math.sqrt(seeds)
        return Difference(statistics.fmean(differences), margin, seeds)

    def _values(self, measure: str) -> list[float]:
        return [value for run in self.runs if (value := run.values[measure]) is not None]


def measure(cases: Iterable[Case], failed: Container[str]) -> list[ArmResult]:
    """What the runs came to, by arm in order of the cases; runs whose names are in `failed` do not count."""
    by_arm: dict[str, list[Case]] = {}
    for case in cases:
        by_arm.setdefault(case.arm, []).append(case)
    return [
        ArmResult(
            arm=arm,
            seeds_wanted=len(own),
            runs=[_measured(case, read_run(case.folder)) for case in own if case.name not in failed],
            forced=own[0].forced,
        )
        for arm, own in by_arm.items()
    ]


def _measured(case: Case, run: RunFiles) -> Measured:
    summary = run.summary or {}
    accuracies = {name: (summary.get(name) or {}).get("weighted") for name in ACCURACIES[:3]}
    accuracies["common_accuracy"] = _on_common_test(summary)
    spent = {name: (summary.get("examples") or {}).get(name) for name in EXAMPLES}
    spent |= {name: (summary.get("work") or {}).get(name) for name in WORK}
    names = {row.architecture or UNDISCLOSED for row in run.clients}
    which: Which = run.personal or "trained"
    return Measured(
        case=case,
        models=next(iter(names)) if len(names) == 1 else f"{len(names)} kinds",
        values={name: summary.get(name) for name in MEASURES} | accuracies | spent,
        curve=dict(scored_curve(run.rows, which)),
        metric=run.metric,
        stopped=summary.get("stopped_early"),
        refused=never_took_part(run.rows),
    )


def _on_common_test(summary: Mapping[str, Any]) -> float | None:
    """The accuracy on the common test set: of what is there for all, else of the clients' own models."""
    common = summary.get("common") or {}
    accuracy = (common.get("received") or common.get("trained") or {}).get("accuracy")
    return accuracy.get("weighted") if isinstance(accuracy, Mapping) else accuracy
