"""Reports of a run to its observers: records of rounds, statistics over clients, and warnings at the end."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

from fedhet.config import flower_names
from fedhet.flower import Grid, MetricRecord
from fedhet.flower.insides import simulated
from fedhet.messages import Arrays, Reply
from fedhet.messages.protocol import STARTS
from fedhet.methods.method import ABSENT, UNSCORED
from fedhet.methods.options import kebab
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.results.recorder import RunDirectory, recorded
from fedhet.results.state import ClientRecord
from fedhet.results.terminal import ProgressLine
from fedhet.server.best import ALL, choose
from fedhet.server.claims import limited
from fedhet.server.run import Run, named, run_folder
from fedhet.tasks import OUTPUTS
from fedhet.tasks.outputs import Outputs
from fedhet.utils.statistics import (
    ClientRow,
    Metric,
    Work,
    grouped,
    in_order,
    metric_in,
    never_took_part,
    summarise,
    weighted_mean,
)
from fedhet.utils.text import console, log

VALIDATION = "validation-"
"""Prefix of the names of metrics on validation examples in the server's evaluation of the global model."""


class Reporter:
    """The reporter of a run, which notifies observers and computes the record of each round.

    `size_of` returns the size of a client's network as text, such as "width 0.5". `on_common_test` has the server's
    metrics of the global model that begins the current round, `evaluated` the clients' mean metrics in the last round.
    """

    def __init__(self, run: Run, size_of: Callable[[str], str], observers: Sequence[Observer]) -> None:
        self.run = run
        self.size_of = size_of
        self.observers = list(observers)
        self.on_common_test: Mapping[str, Any] | None = None
        self.evaluated: MetricRecord | None = None
        self.directory: RunDirectory | None = None  # of the current run, if the reporter records it
        self._rows: list[dict[str, Any]] = []

    def info(self) -> RunInfo:
        """Return the description of the run that observers receive."""
        run = self.run
        about = run.method.name, run.traits, run.state, run.metric, run.own_data, tuple(run.devices), run.config.test_on
        classes = {client: run.classes[client] for client in in_order(run.classes)}
        warnings = tuple(f"{named(clients)}: {line}" if clients else line for line, clients in run.told.items())
        return RunInfo(*about, run.privacy.spent() if run.privacy else {}, warnings, classes, run.task, run.replaced)

    @contextmanager
    def recording(self, grid: Grid, *, lines: bool) -> Iterator[None]:
        """Context manager that records a run in a directory if the key `out` is set, and continues a run in it.

        With `lines`, progress is printed. If the reporter has observers, they record the run, and this has no effect.
        """
        if self.observers:
            yield
            return
        config = self.run.config
        folder = run_folder(config, grid) if config.out else None
        if lines:
            self.observers.append(ProgressLine(console(force_terminal=False), folder))
        with ExitStack() as stack:
            if folder:
                free = flower_names.for_training(self.run.train_config, config.flat())
                opened = recorded(folder, config, "flwr", resume=config.resume, simulated=simulated(grid), free=free)
                observers = stack.enter_context(opened)
                self.directory = observers[0]
                self.run.state = self.directory.resumed(self.run.state)
                self.observers = [*observers, *self.observers]
            try:
                yield
            finally:
                self.observers = []
                self.directory = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager around a run, which notifies observers when the run has finished or failed."""
        try:
            yield
        except BaseException as error:  # also Ctrl-C
            for observer in self.observers:
                observer.failed(self.info(), error)
            raise
        for line in verdict(self.run, self._rows):
            log.warning("%s", line)
        for observer in self.observers:
            observer.finished(self.info())

    def started(self) -> None:
        """Notify observers of the rounds that are about to run."""
        for observer in self.observers:
            observer.started(self.info(), self.run.state.round + 1, self.run.last_round)

    def answered(self, done: int, asked: int) -> None:
        """Notify observers that `done` of `asked` clients have answered."""
        for observer in self.observers:
            observer.answered(done, asked)

    def record(
        self,
        replies: Mapping[str, Reply],
        metrics: Mapping[str, float],
        received: Arrays | None = None,
        **more: Mapping[str, Any],
    ) -> MetricRecord:
        """Notify observers of the round's record, to which `more` adds entries, and return the record's metrics.

        `received` are the shared arrays that clients evaluated; by default the current ones.
        """
        round = self.run.round
        replies = {client: replies[client] for client in in_order(replies)}
        for line in round.lines():
            log.warning("round %d, %s", round.number, line)
        row = self.row(replies, metrics) | more
        self._rows.append(row)
        choose(self.run, replies, row, self.run.state.model if received is None else received)
        scored = self.run.traits.scored
        in_part = undefined(replies, OUTPUTS[self.run.task], self.run.metric, whole=False)
        for whole, missing in ((True, row.get("undefined", {})), (False, in_part)):
            for name, clients in missing.items():
                evaluation, _, metric = name.partition("/")
                if evaluation == scored:
                    self._name_undefined(clients, metric or self.run.metric, len(replies), whole=whole)
        statistics = over_clients(replies, scored, self.run.metric)
        self.evaluated = metric_record({scored: statistics, "metrics": own_metrics(replies, "evaluated")}) or None
        report = RoundReport(row, self._client_rows(replies))
        for observer in self.observers:
            observer.round(self.info(), report)
        return train_record(row, replies)

    def _name_undefined(self, clients: Sequence[str], metric: str, count: int, *, whole: bool) -> None:
        kind = OUTPUTS[self.run.task]
        columns = "targets" if kind.meaning == "numbers" else "labels"
        reason = "they have one class, or too few of a class for the node's min-examples"
        if columns == "targets":
            reason = "no two of them can be compared" if kind.joint else "the targets are all equal"
        extent = "" if whole else f" for some {columns}"
        left_out = "clients are left out of its means" if whole else f"{columns} are left out of their {metric}"
        self.run.warn_once(
            f"{named(clients, most=len(clients))} ({len(clients)} of {count}): their test examples have no "
            f"{metric}{extent}, since {reason}; these {left_out}"
        )

    def row(self, replies: Mapping[str, Reply], metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the current round's record in `history.jsonl`, from the clients' replies and the method's metrics."""
        round = self.run.round
        trained = {client: reply for client, reply in replies.items() if reply.train_loss is not None}
        weights = {client: r.train_weight if r.train_weight > 0 else r.weight for client, r in trained.items()}
        weights = limited(self.run.config, weights)
        losses = [(float(reply.train_loss or 0.0), weights[client]) for client, reply in trained.items()]
        missing = undefined(replies, OUTPUTS[self.run.task], self.run.metric, whole=True)
        hidden = any(reply.report.hides_work for reply in replies.values())  # of some, so that the sum is not known
        finite = bool(losses) and all(math.isfinite(loss) for loss, _ in losses)
        return {
            "round": round.number,
            **({"final": True} if round.final else {}),
            "participants": [client for client in replies if client in round.training],
            "failures": round.failures,
            **({"cut": round.cuts} if round.cuts else {}),
            **({"lost_state": in_order(round.lost)} if round.lost else {}),
            **statistics(replies, self.on_common_test, self.run.metric),
            "scores": scores(replies),
            **({"undefined": missing} if missing else {}),
            "train_loss": weighted_mean(losses) if finite else None,
            "work": None if hidden else vars(sum((reply.work for reply in replies.values()), Work())),
            "metrics": {**own_metrics(replies, "further"), **own_metrics(replies, "evaluated"), **metrics},
            "bytes_up": self._by_client(round.up).total(),
            "bytes_down": self._by_client(round.down).total(),
            "timing": {"seconds": time.perf_counter() - round.started},
        }

    def _by_client(self, bytes_by_node: Mapping[int, int]) -> Counter[str]:
        """Return bytes by client; nodes that were not admitted are left out."""
        by_client = Counter[str]()
        for node, count in bytes_by_node.items():
            if node in self.run.clients:
                by_client[self.run.clients[node]] += count
        return by_client

    def _client_rows(self, replies: Mapping[str, Reply]) -> list[ClientRow]:
        round = self.run.round
        scored = self.run.traits.scored
        # As in the means, the common test set counts only where no client has test examples of its own.
        test = scored if any(scored in reply.measured for reply in replies.values()) else f"common-{scored}"
        rows = []
        up = self._by_client(round.up)
        down = self._by_client(round.down)
        for client in in_order({*replies, *up, *down}):
            record = self.run.state.clients[client]
            evaluations = replies[client].measured if client in replies else {}
            measured = evaluations.get(test)
            accuracy, loss = (measured.metric.value, measured.loss) if measured else (None, None)
            # An undefined metric is no number.
            accuracy = None if accuracy is None or math.isnan(accuracy) else accuracy
            traffic = up[client], down[client]
            network = ", ".join(filter(None, [record.architecture, self.size_of(client)]))
            epsilon = replies[client].further.get("epsilon") if client in replies else None
            rows.append(ClientRow(round.number, client, network, record.examples, accuracy, loss, *traffic, epsilon))
        return rows


def own_metrics(replies: Mapping[str, Reply], which: Literal["further", "evaluated"]) -> dict[str, float]:
    """Return example-weighted means of metrics from users' train ("further") or evaluate ("evaluated") functions."""

    def weight(reply: Reply) -> float:
        tested = [sum(part.metric.weights) for part in reply.measured.values()] or [reply.test_examples]
        return reply.weight if which == "further" else tested[0]

    # A client whose evaluation failed did not know the names that it takes.
    taken = {name for reply in replies.values() for name in reply.evaluated} if which == "further" else set()
    reported = grouped(
        (f"train_{name}" if name in taken else name, (value, weight(reply)))
        for reply in replies.values()
        for name, value in getattr(reply, which).items()
        if not (name in taken and f"train_{name}" in reply.further)
    )
    return {name: weighted_mean(pairs) for name, pairs in reported.items() if sum(weight for _, weight in pairs)}


def train_record(row: Mapping[str, Any], replies: Mapping[str, Reply]) -> MetricRecord:
    """Return a round's metrics as Flower does: names that both functions of a user use are the train function's."""
    means = own_metrics({client: replace(reply, evaluated={}) for client, reply in replies.items()}, "further")
    both = {name: means[name] for reply in replies.values() for name in reply.evaluated if name in means}
    return metric_record({**row, "metrics": row["metrics"] | both})


def statistics(replies: Mapping[str, Reply], on_common_test: Mapping[str, Any] | None, metric: str) -> dict[str, Any]:
    """Return statistics over clients of the `metric` of `received` and `trained` networks, on their own test examples.

    The keys `common` and `validation` have these statistics for the common test set and the validation examples. There,
    the server's metrics of the global model (`on_common_test`), if any, replace the clients' metrics of `received`.
    """
    local, common, validation = (
        {which: over_clients(replies, f"{test}{which}", metric) for which in ("received", "trained")}
        for test in ("", "common-", "validation-")
    )
    if on_common_test:
        received = {k: v for k, v in on_common_test.items() if not k.startswith(VALIDATION)}
        common["received"] = {metric: received.get(metric)} | received  # readers expect the metric in front
        validated = {k.removeprefix(VALIDATION): v for k, v in on_common_test.items() if k.startswith(VALIDATION)}
        validation["received"] = validated or validation["received"]
    further = {"validation": validation} if any(validation.values()) else {}
    return {**local, "common": common if any(common.values()) else None, **further}


def over_clients(replies: Mapping[str, Reply], which: str, metric: str) -> dict[str, Any] | None:
    """Return statistics over clients (see `summarise`) of the evaluations named `which`; None if there are none.

    `metric` is the name of the metric that counts. Those of the key `metrics` have the prefix `further/`.

    `common-trained`, for example, are the trained networks' evaluations on the common test set, for which clients
    are weighted by numbers of own test examples, or of training examples if some client has no test examples.
    """
    statistics = summarise(_measured(replies, which), metric)
    if statistics is None:
        return None
    names = {name: None for reply in replies.values() for name in reply.measured if name.startswith(f"{which}/")}
    further = {name.partition("/")[2]: summarise(_measured(replies, name), name) for name in names}
    return statistics | {f"further/{name}": metric_in(values) for name, values in further.items() if values}


def scores(replies: Mapping[str, Reply]) -> dict[str, dict[str, Any]]:
    """Return values and weights of the metric, by name of the evaluation and client; undefined ones are left out."""
    by_name: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for reply in replies.values() for name in reply.measured):
        for client, (metric, _, examples) in _measured(replies, name).items():
            if examples and not math.isnan(metric.value):
                # A value with weight 0 is NaN, which JSON does not have.
                pairs = zip(metric.values, metric.weights, strict=True)
                values = [value if weight else 0.0 for value, weight in pairs]
                by_name.setdefault(name, {})[client] = [values, metric.weights]
    return by_name


def undefined(replies: Mapping[str, Reply], task: Outputs, metric: str, *, whole: bool) -> dict[str, list[str]]:
    """Return, by name of the evaluation, the clients with examples for which the metric is not defined or not sent.

    Without `whole`, those for which it is not defined for some labels or targets. `metric` is the one that counts.
    """
    by_name = {}
    for name in dict.fromkeys(name for reply in replies.values() for name in reply.measured):
        measured = {client: one for client, (one, _, count) in _measured(replies, name).items() if count}
        clients = [client for client, one in measured.items() if math.isnan(one.value)]
        if not whole:
            # Classes without examples and predictions are no part of a metric of classes.
            columns = task.meaning != "classes" and not task.metrics[name.partition("/")[2] or metric].table
            clients = [c for c, one in measured.items() if columns and c not in clients and not all(one.weights)]
        if clients:
            by_name[name] = clients
    return by_name


def _measured(replies: Mapping[str, Reply], which: str) -> dict[str, tuple[Metric, float, float]]:
    values = {}
    replies = {client: reply for client, reply in replies.items() if which in reply.measured}
    all_have_tests = all(reply.test_examples for reply in replies.values())
    for client, reply in replies.items():
        measured = reply.measured[which]
        metric = reply.measured[which].metric
        examples = reply.validation_examples if which.startswith("validation-") else reply.test_examples
        weight = measured.weight or examples
        if which.startswith("common-"):
            examples = examples if all_have_tests else reply.examples
            metric = Metric(metric.values, tuple(float(examples) if each else 0.0 for each in metric.weights))
            weight = examples
        values[client] = metric, measured.loss, weight
    return values


def unseen_clients(
    replies: Mapping[str, Reply], clients: Mapping[str, ClientRecord], epochs: int, metric: str
) -> dict[str, Any]:
    """Return the results of unseen clients, which join after the last round and train locally for `epochs` epochs.

    `clients` has all clients' records. The entries `own` and `common` (test sets) are dicts of two lists: `received`,
    for training from the server's weights, and `scratch`, from random ones; item k has the statistics over clients
    after k epochs. The entry `clients` has, by client, a dict: its `architecture`, and lists `received` and `scratch`
    of its metric on its own test set (the common one if no client has its own) after 0 to `epochs` epochs.
    """
    names = {start: [f"{start}-{epoch}" for epoch in range(epochs + 1)] for start in STARTS}
    measured = {name for reply in replies.values() for name in reply.measured}
    prefixes = {"own": "", "common": "common-"}
    prefixes = {test: prefix for test, prefix in prefixes.items() if f"{prefix}{STARTS[0]}-0" in measured}
    results: dict[str, Any] = {
        test: {start: [over_clients(replies, f"{prefix}{name}", metric) for name in names[start]] for start in STARTS}
        for test, prefix in prefixes.items()
    }
    first = next(iter(prefixes.values()), "")
    results["clients"] = {}
    for client, reply in replies.items():
        metrics = {name: each.metric.value for name, each in reply.measured.items()}
        by_start = {start: [metrics.get(f"{first}{name}") for name in names[start]] for start in STARTS}
        results["clients"][client] = {"architecture": clients[client].architecture, **by_start}
    return results


def metric_record(row: Mapping[str, Any]) -> MetricRecord:
    """Return the training loss and the mean metrics in a round's record (`row`) as a MetricRecord of Flower."""
    numbers = {"train-loss": row.get("train_loss")}
    for which in ("received", "trained"):
        for kind, values in (row.get(which) or {}).items():
            if isinstance(values, dict):
                numbers[f"{which}-{kebab(kind)}"] = values["weighted"]
    numbers |= row.get("metrics", {})
    return MetricRecord({key: float(value) for key, value in numbers.items() if value is not None})


def verdict(run: Run, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield warnings about a completed run, such as clients that never took part; `rows` are its rounds' records."""
    rounds = run.last_round
    trained = {client: record.trained for client, record in run.state.clients.items()}
    absent = {client: why for client, why in never_took_part(rows).items() if trained.get(client, -1) < 0}
    if absent:
        by_reason = grouped((why, client) for client, why in absent.items())
        reasons = "; ".join(f"{named(clients)}: {reason}" for reason, clients in by_reason.items())
        yield f"{len(absent)} of {len(trained.keys() | absent.keys())} {ABSENT}: {reasons}"
    last = max(trained.values(), default=rounds)
    if rounds and last < rounds:
        yield f"the last round that counted is {max(last, 0)} of {rounds}"
    if not rounds:
        return
    if not run.traits.serves_clients and not (rows and (rows[-1].get("common") or {}).get("received")):
        yield UNSCORED.format(run.method.name)
    scored = run.traits.scored
    if not any(row.get(scored) or (row.get("common") or {}).get(scored) for row in rows):
        yield (
            f"the models have no score, since no client evaluated what it {scored}: give clients test examples or, "
            "with fedhet.wrap, return accuracy and loss from the evaluate function"
        )
    if (run.config.keep_best or run.config.patience) and ALL not in run.state.best:
        yield (
            "keep-best and patience have had no effect, since no client sent a validation metric; nodes with dp-noise, "
            "or without metrics in allow, send none: leave these keys out"
        )
