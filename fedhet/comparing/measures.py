"""The outcomes of a comparison's runs, and means and spreads over seeds.

Every number is that of the last round, never of the best one. Spread is the sample standard deviation over seeds;
differences between methods are paired, seed by seed.
"""

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedhet.comparing.gains import Gain, gains, worse_off, worst_tenth
from fedhet.comparing.settings import PlannedRun
from fedhet.comparing.uncertainty import CONFIDENCE as CONFIDENCE
from fedhet.comparing.uncertainty import FEWEST, Scores, holm, minus, scores_of
from fedhet.comparing.uncertainty import Difference as Difference
from fedhet.comparing.uncertainty import paired_difference as paired_difference
from fedhet.predictions import Predictions, read_predictions
from fedhet.results.history import RunFiles, read_run
from fedhet.results.tables import UNDISCLOSED
from fedhet.rows import BY_CLASS, never_took_part

ACCURACIES = ("personal_accuracy", "trained_accuracy", "global_accuracy", "common_accuracy")
EXAMPLES, WORK = ("labelled", "unlabelled"), ("private_steps", "steps", "forwards")
COSTS = ("bytes_up", "bytes_down", "seconds")
CLIENTS = (*BY_CLASS, "worse_off", "worst_tenth")
"""Metrics by class, the share of clients that are worse off than alone, and the gain of the worst tenth of them."""
MEASURES = (*ACCURACIES, *CLIENTS, *EXAMPLES, *WORK, *COSTS)


@dataclass(frozen=True)
class RunOutcome:
    """A completed run.

    Attributes:
        run: as it was planned.
        files: its files.
        values: the `MEASURES` by name, None where there is none.
        predictions: which test examples are predicted right, by client.
        gains: over training alone, by client; empty where no run of `local` has this seed.
    """

    run: PlannedRun
    files: RunFiles
    values: Mapping[str, float | None]
    predictions: Mapping[str, Predictions] = field(default_factory=dict)
    gains: Mapping[str, Gain] = field(default_factory=dict)

    @cached_property
    def scores(self) -> Scores | None:
        """By test example how far it is right; None where that is not known."""
        return scores_of(self.predictions, common=self.run.settings.test_on == "global")

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
        """This variant minus another, see `paired_difference`; of personal accuracy over test examples, too.

        Fewer than `FEWEST` seeds have no interval.
        """
        theirs = {each.run.seed: each for each in other.outcomes}
        scores = {}
        if measure == "personal_accuracy":
            pairs = ((each, theirs[each.run.seed]) for each in self.outcomes if each.run.seed in theirs)
            scores = {mine.run.seed: minus(mine.scores, its.scores) for mine, its in pairs}
        return paired_difference(self._by_seed(measure), other._by_seed(measure), scores, fewest=FEWEST)

    def _by_seed(self, measure: str) -> dict[int, float]:
        return {each.run.seed: value for each in self.outcomes if (value := each.values[measure]) is not None}


def corrected_p_values(results: Iterable[VariantResult], baseline: VariantResult) -> dict[str, float]:
    """The p-values of personal accuracy's differences to the baseline, corrected for their number, by variant."""
    others = [result for result in results if result is not baseline]
    found = {each.variant: each.difference(baseline, "personal_accuracy") for each in others}
    known = {variant: p for variant, each in found.items() if each is not None and (p := each.p) is not None}
    return dict(zip(known, holm(list(known.values())), strict=True))


def measure(runs: Iterable[PlannedRun], failed: Container[str]) -> list[VariantResult]:
    """Read the runs' outcomes, by variant in order of the runs; runs whose names are in `failed` do not count."""
    by_variant: dict[str, list[PlannedRun]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, []).append(run)
    results = []
    for variant, own in by_variant.items():
        outcomes = [_outcome(run, read_run(run.folder)) for run in own if run.name not in failed]
        results.append(VariantResult(variant, len(own), outcomes, own[0].equalised))
    alone = next((result for result in results if is_local(result)), None)
    return [_with_gains(result, alone) for result in results] if alone else results


def is_local(result: VariantResult) -> bool:
    """Whether a variant is training alone, without a public dataset: what clients' gains are over."""
    return any(
        each.run.settings.method_name == "local" and each.run.settings.parameters.public == "unused"
        for each in result.outcomes
    )


def _with_gains(result: VariantResult, alone: VariantResult) -> VariantResult:
    predictions = {each.run.seed: each.predictions for each in alone.outcomes}
    outcomes = []
    for each in result.outcomes:
        found = gains(each.predictions, predictions.get(each.run.seed, {})) if result is not alone else {}
        values = {**each.values, "worse_off": worse_off(found), "worst_tenth": worst_tenth(found)}
        outcomes.append(replace(each, values=values, gains=found))
    return replace(result, outcomes=outcomes)


def _outcome(run: PlannedRun, files: RunFiles) -> RunOutcome:
    summary = files.summary or {}
    examples, work, common = (summary.get(name) or {} for name in ("examples", "work", "common"))
    values = {name: files.accuracy(name.removesuffix("_accuracy")) for name in ACCURACIES[:3]}
    # On the common test set that of the global model where there is one, else of the clients' own models.
    accuracy = (common.get("received") or common.get("trained") or {}).get("accuracy")
    values["common_accuracy"] = accuracy.get("weighted") if isinstance(accuracy, Mapping) else accuracy
    values |= {name: (summary.get(name) or {}).get("weighted") for name in BY_CLASS}
    for names, table in ((EXAMPLES, examples), (WORK, work), (COSTS, summary)):
        values |= {name: table.get(name) for name in names}
    return RunOutcome(run, files, dict.fromkeys(MEASURES) | values, read_predictions(run.folder))
