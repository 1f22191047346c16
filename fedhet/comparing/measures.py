"""The outcomes of a comparison's runs: means and spreads over seeds, and paired differences between methods.

All numbers are from the last round. Spread is the sample standard deviation over seeds.
"""

import itertools
import math
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from fedhet.comparing.settings import ComparedRun
from fedhet.results.history import RunFiles, TestSet, Which, read_run
from fedhet.results.terminal import UNDISCLOSED
from fedhet.utils.statistics import Metric, grouped

CONFIDENCE = 0.95
CONTROLS = ("local", "gradient-boosting", "label-spreading", "logistic-regression", "nearest-neighbour")
"""Names of the methods in which clients exchange nothing. `recommend` compares federated methods with them."""
FEWEST = 3
"""The smallest number of seeds for which confidence intervals are computed; with two, they are too wide."""

PERSONAL = "personal_accuracy"
ACCURACIES = (PERSONAL, "trained_accuracy", "global_accuracy", "common_accuracy", "best_accuracy")
GAINS = ("worse_off", "worst_tenth")
"""Gains over `local`: fraction of clients that lose accuracy, and mean gain of the tenth of clients that gain least."""
EXAMPLES = ("labelled", "unlabelled")
WORK = ("private_steps", "steps", "forwards")
COSTS = ("bytes_up", "bytes_down", "seconds")
MEASURES = (*ACCURACIES, *GAINS, *EXAMPLES, *WORK, *COSTS)


@dataclass(frozen=True)
class Difference:
    """The mean difference in a measure, such as accuracy, between two methods: the first minus the second.

    The mean is over the seeds that both ran with, and in each over the clients that both scored. `seeds` is the number
    of seeds, and `over` is the number of clients in words ("3 of 4"), or empty if both scored all clients. `low` and
    `high` are the ends of the 95% confidence interval (Student's t), and `p` is the p-value of a paired t-test; they
    are None with fewer than three seeds, or if all seeds give the same two values: they are one observation.
    """

    mean: float
    seeds: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    over: str = ""

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.mean:+.3f}{interval}"

    @property
    def lacking(self) -> str:
        """The reason why there is no interval, or an empty string."""
        if self.low is not None:
            return ""
        return f"fewer than {FEWEST} seeds" if self.seeds < FEWEST else "the same values with all seeds"

    def better(self, direction: int) -> bool:
        """Return whether the interval is above 0 or, with `direction` -1 (lower is better), below it."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 if direction > 0 else self.high < 0

    @property
    def where(self) -> str:
        """Words that say over which clients the difference is, or an empty string if both scored all clients."""
        return f" over the {self.over} clients that both scored" if self.over else ""


def paired_difference(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return the mean of `mine` minus `theirs` (values by seed) over common seeds, or None without common seeds."""
    from scipy import special  # scipy.stats takes a second to import

    pairs = [(value, theirs[seed]) for seed, value in mine.items() if seed in theirs]
    if not pairs:
        return None
    differences = [value - subtracted for value, subtracted in pairs]
    seeds = len(differences)
    mean = statistics.fmean(differences)
    if seeds < FEWEST or len({*pairs}) == 1:
        return Difference(mean, seeds)
    error = math.sqrt(statistics.variance(differences) / seeds)
    margin = float(special.stdtrit(seeds - 1, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(special.stdtr(seeds - 1, -abs(mean) / error)) if error else float(not mean)
    return Difference(mean, seeds, mean - margin, mean + margin, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons by Holm's method (1979); return them in the same order."""
    corrected = [0.0] * len(p_values)
    least = 0.0
    for place, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = least
    return corrected


@dataclass(frozen=True)
class RunOutcome:
    """A completed run with the content of its files, and the value of each measure in `MEASURES` (None if unknown).

    `scores` has the clients' metrics by measure and client.
    """

    run: ComparedRun
    files: RunFiles
    values: Mapping[str, float | None]
    scores: Mapping[str, Mapping[str, Metric]] = field(default_factory=dict)

    @property
    def models(self) -> str:
        """The architecture of the clients' models, or `3 models` if there are three different ones."""
        models = {row.architecture or UNDISCLOSED for row in self.files.clients}
        return next(iter(models)) if len(models) == 1 else f"{len(models)} models"

    def clients(self, measure: str = PERSONAL) -> Set[str]:
        """Return the names of the clients that a measure is about."""
        scores = self.scores.get(measure) or self.scores.get(PERSONAL)
        return scores.keys() if scores else self.files.clients_there

    def over(self, measure: str, clients: Set[str]) -> float | None:
        """Return a measure for some of its clients only; None if there are no such clients, or it is not known."""
        value = self.values[measure]
        scores = self.scores.get(measure)
        if value is None or clients == self.clients(measure):
            return value
        return Metric.total(scores[client] for client in clients).value if scores and clients else None


@dataclass(frozen=True)
class VariantResult:
    """The completed runs (`outcomes`) of a variant, which is a method with its own settings, and statistics over seeds.

    `seeds_wanted` is the number of planned runs. `equalised`: the method required one architecture for all clients.
    """

    variant: str
    seeds_wanted: int
    outcomes: Sequence[RunOutcome]
    equalised: bool

    @property
    def label(self) -> str:
        """The variant's name in tables, with a star if the method required one architecture for all clients."""
        return self.variant + (" *" if self.equalised else "")

    @property
    def models(self) -> str:
        """The clients' architecture, `3 models` if there are three different ones, or `-` without a completed run."""
        return self.outcomes[0].models if self.outcomes else "-"

    @property
    def direction(self) -> int:
        """1 if higher values of the metric are better, and -1 if lower ones are."""
        return self.outcomes[0].files.direction if self.outcomes else 1

    def mean(self, measure: str) -> float | None:
        """Return the mean over seeds of a measure such as `seconds` (see `MEASURES`), or None if no run has it."""
        values = self._by_seed(measure).values()
        return statistics.fmean(values) if values else None

    def spread(self, measure: str) -> float | None:
        """Return the sample standard deviation over seeds of a measure such as `seconds`; None below two seeds."""
        values = self._by_seed(measure).values()
        return statistics.stdev(values) if len(values) > 1 else None

    def difference(self, other: "VariantResult", measure: str) -> Difference | None:
        """Return the mean difference in a measure, this result minus `other`, over the clients that both scored.

        The result is None if no client was scored by both with the same seed.
        """
        mine = dict[int, float]()
        theirs = dict[int, float]()
        counts = set[int]()
        for one, another in itertools.product(self.outcomes, other.outcomes):
            common = one.clients(measure) & another.clients(measure)
            value, subtracted = one.over(measure, common), another.over(measure, common)
            if one.run.seed == another.run.seed and value is not None and subtracted is not None:
                mine[one.run.seed] = value
                theirs[one.run.seed] = subtracted
                counts.add(len(common))
        if (difference := paired_difference(mine, theirs)) is None:
            return None
        settings = self.outcomes[0].files.settings
        wanted = settings["clients"] - settings["unseen-clients"]
        numbers = " to ".join(map(str, sorted({min(counts), max(counts)})))
        return replace(difference, over=f"{numbers} of {wanted}" if 0 < min(counts) < wanted else "")

    def apart(self, other: "VariantResult") -> str:
        """Return words that say why there is no `difference` in personal accuracy to `other`."""
        together = self._by_seed(PERSONAL).keys() & other._by_seed(PERSONAL).keys()
        lacking = "scores of the same clients" if together else "scores with the same seed"
        return f"{self.variant} and {other.variant} have no {lacking}"

    def _by_seed(self, measure: str) -> dict[int, float]:
        return {outcome.run.seed: value for outcome in self.outcomes if (value := outcome.values[measure]) is not None}


def differences(results: Iterable[VariantResult], baseline: VariantResult) -> dict[str, Difference]:
    """Return each variant's difference in personal accuracy to the baseline, by name, with Holm-corrected p-values."""
    pairs = {
        result.variant: result.difference(baseline, "personal_accuracy") for result in results if result is not baseline
    }
    compared = {variant: difference for variant, difference in pairs.items() if difference is not None}
    p_values = {variant: difference.p for variant, difference in compared.items() if difference.p is not None}
    corrected = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    return {variant: replace(difference, p=corrected.get(variant)) for variant, difference in compared.items()}


def verdict(results: Sequence[VariantResult], baseline: VariantResult) -> str:
    """Return a sentence on which methods are significantly better or worse than the baseline, or an empty string."""
    methods = {result.variant: outcome.files.settings["method"] for result in results for outcome in result.outcomes}
    alone = [name for name, method in methods.items() if method in CONTROLS]
    local = local_variant({result.variant: result.outcomes[0].files for result in results if result.outcomes})
    # With several variants whose clients train alone, only its name says which one the baseline is.
    other = "training alone" if alone == [local] == [baseline.variant] else baseline.variant
    compared = differences(results, baseline)
    different = []
    same = []
    undecided = []
    scored = [result.variant for result in results if None not in (result.mean(PERSONAL), baseline.mean(PERSONAL))]
    apart = [name for name in scored if name not in (*compared, baseline.variant)]
    unlike = "".join(f" {result.apart(baseline)}." for result in results if result.variant in apart)
    lacking = {difference.lacking for difference in compared.values()}
    if lacking and "" not in lacking:
        reasons = " or ".join(sorted(lacking)).capitalize()
        return f"{reasons}: no difference to {other} can be called significant.{unlike}"
    sign = baseline.direction
    for name, each in sorted(compared.items(), key=lambda item: -sign * item[1].mean):
        if each.p is None or each.low is None or each.high is None:
            undecided.append(f"{name} ({each.lacking})")
        elif each.p >= 1 - CONFIDENCE:
            same.append(f"{name}{each.where}")
        else:
            low, high = sorted((abs(each.low), abs(each.high)))
            words = "beats" if sign * each.mean > 0 else "is worse than"
            different.append(f"{name} {words} {other} by {abs(each.mean):.3f} [{low:.3f}, {high:.3f}]{each.where}")
    if same:
        corrected = " after Holm's correction of p" if len(compared) > 1 else ""
        different.append(f"not significantly different from {other}{corrected}: {', '.join(same)}")
    if undecided:
        different.append(f"without an interval: {', '.join(undecided)}")
    return f"{'; '.join(different)}.{unlike}" if different else unlike.strip()


def absent(results: Iterable[VariantResult]) -> Iterator[str]:
    """Yield a sentence on clients without a final accuracy for each variant, with their names and reasons."""
    for result in results:
        lines = grouped((line, str(outcome.run.seed)) for outcome in result.outcomes for line in outcome.files.absences)
        yield from (f"{result.variant}, seeds {', '.join(seeds)}: {line}." for line, seeds in lines.items())


def is_local(run: RunFiles) -> bool:
    """Return whether a run is local training (the method `local`) on the clients' own examples only."""
    return run.settings["method"] == "local" and run.settings.get("local.public", "unused") == "unused"


def local_variant(runs: Mapping[str, RunFiles]) -> str | None:
    """Return the variant whose clients train alone, given a run of each: `local` or, if that is none, the first."""
    names = [name for name, files in runs.items() if is_local(files)]
    return "local" if "local" in names else next(iter(names), None)


def measure(runs: Iterable[ComparedRun], failed: Container[str]) -> list[VariantResult]:
    """Read the runs whose names are not in `failed`, and return each variant's result in the order of `runs`."""
    planned = grouped((run.variant, run) for run in runs)
    files = {run.name: read_run(run.folder) for runs in planned.values() for run in runs if run.name not in failed}
    completed = {variant: [run for run in runs if run.name in files] for variant, runs in planned.items()}
    local = local_variant({variant: files[runs[0].name] for variant, runs in completed.items() if runs})
    alone = {run.seed: outcome(run, files[run.name], {}).scores[PERSONAL] for run in completed.get(local or "", ())}
    results = []
    for variant, runs in planned.items():
        known = {} if variant == local else alone
        outcomes = [outcome(run, files[run.name], known.get(run.seed, {})) for run in completed[variant]]
        results.append(VariantResult(variant, len(runs), outcomes, runs[0].equalised))
    return results


def outcome(run: ComparedRun, files: RunFiles, alone: Mapping[str, Metric]) -> RunOutcome:
    """Compute a run's outcome; `alone` has the clients' metrics under `local` with the same seed, by client name."""
    summary = files.summary
    test: TestSet = "common" if files.settings.get("test-on") == "global" else "own"
    behind: dict[str, Which] = {"personal": files.scored, "trained": "trained", "global": "received"}
    scores = {f"{name}_accuracy": files.by_client(which, test) for name, which in behind.items()}
    scores["common_accuracy"] = files.by_client("received", "common") or files.by_client("trained", "common")
    scores["best_accuracy"] = files.best_by_client(test)
    values: dict[str, float | None] = {name: files.accuracy(name.removesuffix("_accuracy")) for name in ACCURACIES}
    for names, table in ((EXAMPLES, summary.get("examples")), (WORK, summary.get("work")), (COSTS, summary)):
        values |= {name: (table or {}).get(name) for name in names}
    sign = files.direction
    mine = scores[PERSONAL]
    gains = sorted(sign * (mine[client].value - alone[client].value) for client in mine.keys() & alone.keys())
    if gains:
        values["worse_off"] = sum(gain < 0 for gain in gains) / len(gains)
        values["worst_tenth"] = sign * statistics.fmean(gains[: math.ceil(len(gains) / 10)])
    return RunOutcome(run, files, dict.fromkeys(MEASURES) | values, scores)
