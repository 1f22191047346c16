"""fedhet's own loop: a run from the handshake to the evaluation after the last round."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from fedhet.errors import ConfigError
from fedhet.flower import ArrayRecord, Grid, MetricRecord, Result
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.messages import Arrays, Payload, Reply
from fedhet.messages.protocol import JOIN
from fedhet.server.description import describe
from fedhet.server.federation import Federation
from fedhet.server.handshake import Handshake
from fedhet.server.reporter import Reporter, unseen_clients
from fedhet.server.run import Round, Run
from fedhet.utils.process import standard_settings
from fedhet.utils.randomness import seeded
from fedhet.utils.text import log

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]

StopFunction = Callable[[int, Result], bool]
"""A function of a round, whose model was evaluated, and the results so far that returns whether training ends."""


class Steps(Protocol):
    """The steps of a run, which fedhet's loop and Flower's loop call; `FederatedStrategy` implements them."""

    run: Run
    federation: Federation
    reporter: Reporter
    admission: Handshake
    fresh: bool

    @property
    def overridden(self) -> Sequence[str]: ...
    @property
    def makes_global_model(self) -> bool: ...
    @property
    def has_global_model(self) -> bool: ...
    def summary(self) -> None: ...
    def restart(self) -> None: ...
    def handshake(self, grid: Grid) -> None: ...
    def run_round(self, round: int) -> MetricRecord: ...
    def admit_clients(self) -> None: ...
    def participants(self, round: int) -> Sequence[str]: ...
    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]: ...
    def payloads_to_evaluate(self, clients: Sequence[str]) -> dict[str, Payload]: ...
    def check(self, reply: Reply) -> None: ...
    def aggregate(self, replies: Mapping[str, Reply]) -> dict[str, float]: ...
    def global_arrays(self) -> Arrays: ...


def run_all(
    steps: Steps,
    grid: Grid,
    initial_arrays: ArrayRecord | None,
    evaluate_fn: EvaluateFunction | None,
    should_stop: StopFunction | None,
) -> Result:
    """Run all rounds, the closing round if there is one, and the evaluation at the end."""
    run = steps.run
    for key, remark in run.config.remarks:
        log.log(logging.INFO if key == "test-on" else logging.WARNING, "%s", remark)
    steps.summary()
    result = Result()
    with running(steps, grid, initial_arrays, lines=True):
        _evaluate_globally(steps, evaluate_fn, result)
        while run.state.round < run.last_round:
            round = run.state.round + 1
            result.train_metrics_clientapp[round] = steps.run_round(round)
            evaluated = round - (run.traits.scored == "received")  # the round whose model was evaluated
            if evaluated and steps.reporter.evaluated:
                result.evaluate_metrics_clientapp[evaluated] = steps.reporter.evaluated
            _evaluate_globally(steps, evaluate_fn, result)
            if should_stop and evaluated > 0 and round < run.training_rounds and should_stop(evaluated, result):
                run.state.stopped = round
        if last := finish(steps):
            result.evaluate_metrics_clientapp[run.last_round] = last
        result.arrays = encode_arrays(steps.global_arrays(), flower=True)
    return result


@contextmanager
def running(steps: Steps, grid: Grid, initial_arrays: ArrayRecord | None, *, lines: bool = False) -> Iterator[None]:
    """Context manager of a run, which begins with the handshake; prints a line per round if `lines` is true."""
    run = steps.run
    reporter = steps.reporter
    try:
        with standard_settings(), reporter.recording(grid, lines=lines), reporter.watching():
            if initial_arrays and not run.state.round:
                if run.traits.averages_model:
                    run.initial = decode_arrays(initial_arrays)
                else:
                    name = run.method.name
                    run.warn_once(f"initial_arrays have no effect, since clients of {name} share no model")
            steps.handshake(grid)
            if run.only_describes and not run.state.round:
                reporter.record({}, {}, data=describe(steps.federation))
            reporter.started()
            yield
    finally:
        steps.fresh = False


def _evaluate_globally(steps: Steps, function: EvaluateFunction | None, result: Result) -> None:
    """Evaluate the global model with `function`; add metrics to `result`, and keep them for the round's record."""
    run = steps.run
    round = run.state.round
    metrics = None
    if function and steps.has_global_model and (round == run.last_round or run.evaluates(round + 1)):
        with seeded(run.config.seed, "evaluation", "server"):
            metrics = function(round, encode_arrays(steps.global_arrays(), flower=True))
        if metrics is not None:
            if not isinstance(metrics, MetricRecord):
                kind = type(metrics).__name__
                raise ConfigError(f"evaluate_fn must return a flwr.app.MetricRecord or None, but returned a {kind}")
            result.evaluate_metrics_serverapp[round] = metrics
    steps.reporter.on_common_test = metrics


def finish(steps: Steps) -> MetricRecord:
    """Check that the last rounds counted, evaluate all clients, and return mean metrics.

    Unseen clients join only then. Their results are recorded, and they are not added to the state.
    """
    run = steps.run
    federation = steps.federation
    run.check_that_rounds_counted(has_global_model=steps.has_global_model)
    run.round = Round(run.last_round + 1, final=True)
    steps.admission.admit()
    replies = federation.exchange(federation.evaluation(steps.payloads_to_evaluate([*federation.nodes])))
    if not run.config.unseen_clients:
        return steps.reporter.record(replies, {})
    trained = dict(run.state.clients)
    present = set(federation.nodes)
    steps.admission.admit(unseen=True)
    payloads = steps.payloads_to_evaluate([client for client in federation.nodes if client not in present])
    lacking = [client for client, payload in payloads.items() if run.traits.communicates and not payload.arrays]
    for client in lacking:
        del payloads[client]
        reason = f"{run.method.name} has no arrays for the client: no client that trained has the same layers"
        run.round.fail(client, reason)
    run.round.training = frozenset(payloads)
    joined = federation.ask(JOIN, payloads) if payloads else {}
    curves = unseen_clients(joined, run.state.clients, run.config.unseen_epochs, run.metric)
    metrics = steps.reporter.record(replies, {}, unseen_clients=curves)
    run.state.clients = trained
    return metrics
