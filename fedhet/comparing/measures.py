"""The outcomes of a comparison's runs, and means and spreads over seeds.

Every number is that of the last round, never of the best one. Spread is the sample standard deviation over seeds;
differences between methods are paired, seed by seed.
"""

import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedhet.comparing.settings import PlannedRun
from fedhet.results.history import RunFiles, read_run
from fedhet.results.tables import UNDISCLOSED
from fedhet.rows import never_took_part

ACCURACIES = ("personal_accuracy", "trained_accuracy", "global_accuracy", "common_accuracy")
EXAMPLES, WORK = ("labelled", "unlabelled"), ("private_steps", "steps", "forwards")
COSTS = ("bytes_up", "bytes_down", "seconds")
MEASURES = (*ACCURACIES, *EXAMPLES, *WORK, *COSTS)
CONFIDENCE = 0.95


@dataclass(frozen=True)
class RunOutcome:
    """A completed run as it was planned, its files, and the `MEASURES` by name, None where there is none."""

    run: PlannedRun
    files: RunFiles
    values: Mapping[str, float | None]

    @property
    def models(self) -> str:
        """The clients' models in words."""
        models = {row.architecture or UNDISCLOSED for row in self.files.clients}
        return next(iter(models)) if len(models) == 1 else f"{len(models)} models"

    @property
    def stopped(self) -> int | None:
        """The round after which early stopping ended training; None if it did not."""
        return (self.files.summary or {}).get("stopped_early")

    @property
    def refused(self) -> Mapping[str, str]:
        """Why clients never took part, by name."""
        return never_took_part(self.files.rows)


class Difference(NamedTuple):
    """A mean difference over seeds, and the ends of its confidence interval; None for one seed."""

    mean: float
    low: float | None = None
    high: float | None = None


def paired_difference(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """`mine` minus `theirs` over common seeds, with Student's t interval (`CONFIDENCE`); None without any."""
    differences = [value - theirs[seed] for seed, value in mine.items() if seed in theirs]
    if not differences:
        return None
    seeds, mean = len(differences), statistics.fmean(differences)
    if seeds == 1:
        return Difference(mean)
    from scipy import stats

    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1))
    margin = quantile * statistics.stdev(differences) / math.sqrt(seeds)
    return Difference(mean, mean - margin, mean + margin)


@dataclass(frozen=True)
class VariantResult:
    """A variant over its completed seeds."""

    variant: str
    seeds_wanted: int
    outcomes: Sequence[RunOutcome]
    equalised: bool

    @property
    def label(self) -> str:
        """Its name, with a star if all its clients got one model because it needs equal architectures."""
        return self.variant + (" *" if self.equalised else "")

    @property
    def models(self) -> str:
        """The clients' models in words."""
        return self.outcomes[0].models if self.outcomes else "-"

    def mean(self, measure: str) -> float | None:
        """The mean over seeds; None where no run has the measure."""
        values = self._by_seed(measure).values()
        return statistics.fmean(values) if values else None

    def spread(self, measure: str) -> float | None:
        """The sample standard deviation over seeds; None for fewer than two."""
        values = self._by_seed(measure).values()
        return statistics.stdev(values) if len(values) > 1 else None

    def difference(self, other: "VariantResult", measure: str) -> Difference | None:
        """This variant minus another, see `paired_difference`."""
        return paired_difference(self._by_seed(measure), other._by_seed(measure))

    def _by_seed(self, measure: str) -> dict[int, float]:
        return {each.run.seed: value for each in self.outcomes if (value := each.values[measure]) is not None}


def measure(runs: Iterable[PlannedRun], failed: Container[str]) -> list[VariantResult]:
    """Read the runs' outcomes, by variant in order of the runs; runs whose names are in `failed` do not count."""
    by_variant: dict[str, list[PlannedRun]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, []).append(run)
    results = []
    for variant, own in by_variant.items():
        outcomes = [_outcome(run, read_run(run.folder)) for run in own if run.name not in failed]
        results.append(VariantResult(variant, len(own), outcomes, own[0].equalised))
    return results


def _outcome(run: PlannedRun, files: RunFiles) -> RunOutcome:
    summary = files.summary or {}
    examples, work, common = (summary.get(name) or {} for name in ("examples", "work", "common"))
    values = {name: files.accuracy(name.removesuffix("_accuracy")) for name in ACCURACIES[:3]}
    # On the common test set that of the global model where there is one, else of the clients' own models.
    accuracy = (common.get("received") or common.get("trained") or {}).get("accuracy")
    values["common_accuracy"] = accuracy.get("weighted") if isinstance(accuracy, Mapping) else accuracy
    for names, table in ((EXAMPLES, examples), (WORK, work), (COSTS, summary)):
        values |= {name: table.get(name) for name in names}
    return RunOutcome(run, files, values)
