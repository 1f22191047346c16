"""The verdict of a race: the best method, whether it beats training alone, and the clients that lose by it."""

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from fedhet import registry
from fedhet.comparing.measures import CONFIDENCE, Difference, VariantResult, corrected_p_values, paired_difference
from fedhet.comparing.search import round_bytes
from fedhet.results.history import final_clients
from fedhet.results.tables import format_bytes, format_seconds, format_value
from fedhet.rows import client_order

SCORE = "personal_accuracy"
RISE = 0.02
"""A rise of the accuracy over the last rounds, against as many before, at which a method still learns."""
LAST = 5
"""Of so many rounds, or of a quarter of all."""
NAMED = 8
"""So many clients are named."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a race's last comparison.

    Attributes:
        alone: the best method whose clients exchange nothing.
        federated: the best of the others; None if there is none.
        difference: of its accuracy to `alone`'s.
        beats: whether it is above every method without exchange, by the intervals of the paired differences.
        rivals: how many methods whose clients exchange something could serve.
        losers: clients that have less by it than by `alone`, and by how much (mean over seeds), most first.
        network: the best method whose clients train networks; None without any.
    """

    alone: VariantResult
    federated: VariantResult | None
    difference: Difference | None
    beats: bool
    rivals: int
    losers: Sequence[tuple[str, float]]
    network: VariantResult | None = None

    @property
    def winner(self) -> VariantResult:
        """The recommended method."""
        return self.federated if self.beats and self.federated else self.alone

    def lines(self) -> Iterator[str]:
        """Say it in sentences."""
        best = f"{self.alone.variant}, {format_value(self.alone.mean(SCORE))}"
        if self.federated is None:
            why = "No federated method came to a result, by failures or for want of time"
            no_rivals = "No federated method can serve these clients as they are, so nothing beats training alone here"
            yield f"{why if self.rivals else no_rivals}. Alone, the best is {best}."
            return
        method, its = self.federated.variant, format_value(self.federated.mean(SCORE))
        by = _interval(self.difference)
        low, high = (None, None) if self.difference is None else (self.difference.low, self.difference.high)
        both = f"alone, the best is {best}; federated, {method}, {its}: {by}."
        if self.beats:
            yield f"{method} wins with {its}: {by} to the best training alone ({best})."
        elif low is None or high is None:
            yield f"Too few seeds for an interval, so there is no verdict: {both}"
        elif high < 0:
            yield f"Nothing beats training alone here: {both}"
        else:
            yield f"Nothing clearly beats training alone here: {both} More seeds may tell."
        clients = {row.client for each in self.federated.outcomes for row in each.files.clients}
        named = ", ".join(f"{client} ({less:+.3f})" for client, less in self.losers[:NAMED])
        more = f" and {len(self.losers) - NAMED} more" if len(self.losers) > NAMED else ""
        whom = f": {named}{more}" if named else ""
        yield (
            f"With {method}, {len(self.losers)} of {len(clients)} clients have less than with {self.alone.variant} "
            f"(means over seeds){whom}."
        )
        for result in (self.federated, *([] if self.beats else [self.alone])):
            yield f"{result.variant} costs a client {_cost(result, len(clients))}."


def judge(results: Sequence[VariantResult], alone: Collection[str], rivals: int) -> Verdict:
    """Judge methods by their completed runs; those in `alone` exchange nothing, and one of them at least is there."""
    ranked = sorted(
        (each for each in results if each.mean(SCORE) is not None), key=lambda each: -(each.mean(SCORE) or 0)
    )
    controls = [each for each in ranked if each.variant in alone]
    federated = next((each for each in ranked if each.variant not in alone), None)
    best, network = controls[0], next(filter(_trains_networks, ranked), None)
    if federated is None:
        return Verdict(best, None, None, beats=False, rivals=rivals, losers=[], network=network)
    differences = [federated.difference(each, SCORE) for each in controls]
    above = all(each is not None and each.low is not None and each.low > 0 for each in differences)
    beats = above and corrected_p_values(results, best).get(federated.variant, 0.0) < 1 - CONFIDENCE
    return Verdict(best, federated, differences[0], beats, rivals, _losers(federated, best), network)


def _trains_networks(result: VariantResult) -> bool:
    config = result.outcomes[0].run.settings
    return "optimizer" not in config.parameters.without


def still_learning(results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield a sentence on the methods whose accuracy still rises at the end, if there are any."""
    rising = [
        f"{result.variant} ({rise:+.3f})"
        for result in results
        if result.outcomes and not registry.method(result.outcomes[0].run.settings.method_name).one_shot
        if (rise := statistics.fmean(_rise(each.files.curve) for each in result.outcomes)) > RISE
    ]
    if rising:
        yield f"Still learning in the last rounds: {', '.join(rising)}. Set rounds higher."


def _rise(curve: Sequence[tuple[int, float]]) -> float:
    """Return by how much the mean accuracy of the last rounds is above that of as many before; 0 for a single one."""
    last = min(LAST, max(1, len(curve) // 4))
    values = [accuracy for _, accuracy in curve]
    before = values[-2 * last : -last]
    return statistics.fmean(values[-last:]) - statistics.fmean(before) if before else 0.0


def _losers(mine: VariantResult, theirs: VariantResult) -> list[tuple[str, float]]:
    ours, others = _by_client(mine), _by_client(theirs)
    common = sorted(ours.keys() & others.keys(), key=client_order)
    lost = [
        (client, difference.mean)
        for client in common
        if (difference := paired_difference(ours[client], others[client]))
    ]
    return sorted((each for each in lost if each[1] < 0), key=lambda each: each[1])


def _by_client(result: VariantResult) -> dict[str, dict[int, float]]:
    """Return each client's last accuracy, by seed."""
    accuracies: dict[str, dict[int, float]] = {}
    for outcome in result.outcomes:
        for row in final_clients(outcome.files.clients):
            accuracies.setdefault(row.client, {})[outcome.run.seed] = row.accuracy or 0.0
    return accuracies


def _interval(difference: Difference | None) -> str:
    if difference is None:
        return "no difference is known"
    return str(difference) if difference.low is None else f"{difference} ({CONFIDENCE:.0%} interval)"


def _cost(result: VariantResult, clients: int) -> str:
    up, down = (format_bytes((result.mean(name) or 0) / max(clients, 1)) for name in ("bytes_up", "bytes_down"))
    rounds = statistics.fmean(each.files.rounds for each in result.outcomes)
    seconds = format_seconds(result.mean("seconds"))
    most = format_bytes(max(round_bytes(each.files) for each in result.outcomes))
    return (
        f"{up} up and {down} down in {rounds:.0f} rounds, at most {most} in a round; a run of all clients takes "
        f"{seconds} on this machine"
    )
