"""Checks of what clients say of their data: numbers of examples, by which they are weighted, and scales of inputs."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median_low
from typing import Any

from fedhet.data.names import CLASSES, COLUMNS
from fedhet.data.scales import TARGET, Scales, check_scales
from fedhet.errors import DataError
from fedhet.messages import Reply, WireError
from fedhet.messages.protocol import scales_in
from fedhet.methods.options import Config
from fedhet.results.history import read_run, run_of
from fedhet.server.run import Run
from fedhet.tasks import OUTPUTS
from fedhet.utils.files import expanded
from fedhet.utils.statistics import Metric

MOST = 10.0
"""With `clip-norm` or a robust rule, a claim counts as at most this multiple of the clients' median claim."""


def trusted(config: Config) -> bool:
    """Return whether the aggregation rule is the mean, without clipping, so that claims are not limited."""
    return config.aggregation == "mean" and not config.clip_norm


def limited(config: Config, claims: Mapping[str, float]) -> dict[str, float]:
    """Return the clients' claims, limited to `MOST` times their (lower) median unless claims are trusted."""
    claimed = [claim for claim in claims.values() if claim > 0]
    if trusted(config) or not claimed:
        return dict(claims)
    return {client: min(claim, MOST * median_low(claimed)) for client, claim in claims.items()}


def check_claims(config: Config, reply: Reply) -> None:
    """Check that a client's numbers of examples and its weight do not exceed `max-examples`."""
    claims = {
        "training examples": max(reply.examples, reply.given_weight),
        "test examples": reply.test_examples,
        "validation examples": reply.validation_examples,
    }
    for kind, claim in claims.items():
        if config.max_examples and claim > config.max_examples:
            raise WireError(
                f"the client claims {claim:.16g} {kind}, and max-examples is {config.max_examples}: raise it if the "
                "client has so many"
            )


def name_largest(run: Run, claims: Mapping[str, float], kind: str) -> None:
    """Log a warning that names clients whose claims outweigh all others, if at least three clients have any weight.

    These are one client with more than half of all weight, or several whose claims exceed `MOST` times the median.
    """
    claimed = [claim for claim in claims.values() if claim > 0]
    if len(claimed) < 3:
        return
    large = {client for client, claim in claims.items() if claim > MOST * median_low(claimed)}
    clients = sorted(large | {max(claims, key=claims.__getitem__)})
    if 2 * sum(claims[client] for client in clients) > sum(claimed):
        shown = " and ".join(f"{claims[client]:.16g} (client {client})" for client in clients)
        run.warn_once(
            f"claims of {shown} {kind} have more than half of all weight of a round: if they cannot be true, set "
            "max-examples to refuse them"
        )


def limit_claims(run: Run, replies: Mapping[str, Reply]) -> None:
    """Limit the weights of clients' updates and metrics in place; metrics have the weight of the test examples."""
    trained = {client: reply.weight for client, reply in replies.items() if client in run.round.training}
    for client, weight in limited(run.config, trained).items():
        if weight < trained[client]:
            replies[client].given_weight = weight
    names = {name for reply in replies.values() for name in reply.measured if not name.startswith("common-")}
    for kind, prefixed in (("test_examples", False), ("validation_examples", True)):
        claims = limited(run.config, {client: float(getattr(reply, kind)) for client, reply in replies.items()})
        for name in sorted(name for name in names if name.startswith("validation-") == prefixed):
            _limit_metric(run, replies, name, claims)
        for client, claim in claims.items():
            setattr(replies[client], kind, int(claim))
        if prefixed is False and names:
            name_largest(run, claims, "test examples")


def weigh_evaluations(reply: Reply, weight: float) -> None:
    """Set a client's weight in means over clients of the metrics and losses of its evaluations."""
    for name, measured in reply.measured.items():
        weights = tuple(weight if each else 0.0 for each in measured.metric.weights)
        reply.measured[name] = replace(measured, metric=Metric(measured.metric.values, weights), weight=weight)


def _limit_metric(run: Run, replies: Mapping[str, Reply], name: str, claims: Mapping[str, float]) -> None:
    """Limit the weights of the metric `name` to what numbers of examples (`claims`) allow: as a rule, to one for each.

    The AUC of a multi-label task has a weight for each pair of examples. If most clients have several predictions for
    each example, as for tokens and pixels, a client may have up to `MOST` times as many as the median client.
    """
    largest = {
        client: max(reply.measured[name].metric.weights) for client, reply in replies.items() if name in reply.measured
    }
    own_weights = run.flower_options.weighted_by_key != type(run.flower_options).weighted_by_key
    if own_weights:
        claims = limited(run.config, largest)
    measure = OUTPUTS[run.task].metrics[name.partition("/")[2] or run.metric]
    heaviest = measure.heaviest
    ratios = [weight / claims[client] for client, weight in largest.items() if weight and claims[client]]
    middle = median_low(ratios or [1.0])
    for client, weight in largest.items():
        most = claims[client] * (heaviest if middle <= heaviest or own_weights else MOST * middle)
        most = claims[client] ** 2 / 4 if measure.pairs else most
        if weight > most:
            measured = replies[client].measured[name]
            weights = tuple(share * most / weight for share in measured.metric.weights)
            replies[client].measured[name] = replace(measured, metric=Metric(measured.metric.values, weights))
    losses = {client: replies[client].measured[name].weight or claims[client] for client in largest}
    for client, weight in limited(run.config, losses).items():
        replies[client].measured[name].weight = min(weight, replies[client].measured[name].weight)


def difference_of_scales(run: Run) -> str:
    """Return a sentence if inputs or targets differ in scale among clients that share layers, or from `start-from`."""
    anew = bool(run.config.start_from)
    inputs, targets = (anew or run.traits.compares(kind) for kind in (COLUMNS, CLASSES))

    def compared(scales: Scales) -> Scales:
        return {name: (kind, size) for name, (kind, size) in scales.items() if (targets if kind == TARGET else inputs)}

    scales = {f"client {n}'s": compared(scales_in(record.scales)) for n, record in run.state.clients.items()}
    for name, earlier in before(run.config, "scales").items():
        scales[f"in the run of start-from, client {name}'s"] = compared(earlier)
    try:
        return check_scales(scales)
    except DataError as error:  # which some clients may have allowed for in their networks
        return str(error)


def before(config: Config, entry: str) -> dict[str, Any]:
    """Return an entry of the summary of the run from which clients start (`start-from`), or an empty dict."""
    folder = run_of(expanded(config.start_from).absolute()) if config.start_from else None
    return read_run(folder).summary.get(entry, {}) if folder else {}
