"""The reports of a run: its rounds for observers, and warnings at its end."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import MetricRecord

from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.rows import ClientRow, Work, in_order, summarise
from fedhet.server.run import Run
from fedhet.server.verdict import Verdict
from fedhet.state import State
from fedhet.task import Metric
from fedhet.wire import Reply

log = logging.getLogger("flwr").getChild("fedhet")


class Reporter:
    """Tells observers of a run.

    Attributes:
        run: the run's values.
        observers: who is told.
        on_common_test: accuracy and loss of the global model on the common test set before the round under way, where
            the server measured them; they stand in its record as those of what clients received.
    """

    def __init__(self, run: Run, observers: Sequence[Observer]) -> None:
        self.run, self.observers = run, list(observers)
        self.on_common_test: Mapping[str, Any] | None = None
        self._verdict = Verdict(run)

    def info(self, matrices: Mapping[str, Any] | None = None) -> RunInfo:
        """Return the run as observers see it."""
        run = self.run
        about = run.method.name, run.traits, run.state, run.metric, run.own_data, tuple(run.devices), run.config.test_on
        return RunInfo(*about, matrices or {})

    @contextmanager
    def watching(self, matrices: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Within it a run goes on, and observers are told how it ends; what it raises is raised again, Ctrl-C included.

        Args:
            matrices: gives those of the report.
        """
        try:
            yield
        except BaseException as error:
            for observer in self.observers:
                observer.failed(self.info(), error)
            raise
        found = dict[str, Any]()
        for line in self._verdict.lines():
            log.warning("%s", line)
        try:
            found |= matrices()
        except Exception as error:  # pictures are no part of the result
            log.warning("the report lacks the method's matrices: %s: %s", type(error).__name__, error, exc_info=error)
        for observer in self.observers:
            observer.finished(self.info(found))

    def started(self) -> None:
        """Tell observers which rounds are about to run."""
        for observer in self.observers:
            observer.started(self.info(), self.run.state.round + 1, self.run.last_round)

    def record(
        self, replies: Mapping[str, Reply], metrics: Mapping[str, float], **more: Mapping[str, Any]
    ) -> MetricRecord:
        """Tell observers of the round, and return its numbers that Flower's result can hold.

        Args:
            replies: the valid ones, in order of client name.
            metrics: the method's own.
            more: what else there is in the round's record.
        """
        run, round = self.run, self.run.round
        for line in round.lines():
            log.warning("round %d, %s", round.number, line)
        row = self._row(replies, metrics) | more
        report = RoundReport(row, self._client_rows(replies))
        self._verdict.take(row)
        if 0 < round.number < run.training_rounds:
            watch_validation(run.state, row, run.traits.scored, run.config.early_stopping)
        for observer in self.observers:
            observer.round(self.info(), report)
        return metric_record(row)

    def _row(self, replies: Mapping[str, Reply], metrics: Mapping[str, float]) -> dict[str, Any]:
        """The line of `history.jsonl`."""
        round = self.run.round
        losses = [(r.train_loss, r.examples) for r in replies.values() if r.train_loss is not None]
        weight = sum(examples for _, examples in losses)
        finite = weight and all(math.isfinite(loss) for loss, _ in losses)
        return {
            "round": round.number,
            **({"final": True} if round.final else {}),
            "participants": [client for client in replies if client in round.training],
            "failures": round.failures,
            **({"cut": round.cuts} if round.cuts else {}),
            **({"lost_state": in_order(round.lost)} if round.lost else {}),
            **statistics(replies, self.on_common_test),
            "train_loss": math.fsum(loss * examples for loss, examples in losses) / weight if finite else None,
            "work": vars(sum((reply.work for reply in replies.values()), Work())),
            "metrics": dict(metrics),
            "bytes_up": round.up.total(),
            "bytes_down": round.down.total(),
            "timing": {"seconds": time.perf_counter() - round.started},
        }

    def _client_rows(self, replies: Mapping[str, Reply]) -> list[ClientRow]:
        """The lines of `clients.csv`."""
        round, clients, scored = self.run.round, self.run.state.clients, self.run.traits.scored
        measured = {
            client: found
            for client, reply in replies.items()
            if (found := reply.measured.get(scored) or reply.measured.get(f"common-{scored}"))
        }
        return [
            ClientRow(
                round=round.number,
                client=client,
                architecture=clients[client].architecture,
                examples=clients[client].examples,
                accuracy=measured[client].metric.value if client in measured else None,
                loss=measured[client].loss if client in measured else None,
                bytes_up=round.up[client],
                bytes_down=round.down[client],
            )
            for client in in_order({*replies, *round.up, *round.down})
        ]


def statistics(replies: Mapping[str, Reply], on_common_test: Mapping[str, Any] | None) -> dict[str, Any]:
    """Evaluations over clients, on their own test parts, on the common one, and on validation parts if there are any.

    Args:
        replies: what the clients measured.
        on_common_test: the global model's accuracy and loss on the common test set, measured by the server.
    """
    common = {
        "received": dict(on_common_test) if on_common_test else over_clients(replies, "common-received"),
        "trained": over_clients(replies, "common-trained"),
    }
    validation = {which: over_clients(replies, f"validation-{which}") for which in ("received", "trained")}
    return {
        "received": over_clients(replies, "received"),
        "trained": over_clients(replies, "trained"),
        "common": common if any(common.values()) else None,
        **({"validation": validation} if any(validation.values()) else {}),
    }


def over_clients(replies: Mapping[str, Reply], which: str) -> dict[str, Any] | None:
    """Statistics over the clients that measured it (see `fedhet.rows.summarise`); None if nobody did."""
    return summarise(
        {
            client: (_weighed(reply, which), reply.measured[which].loss, _examples(reply, which))
            for client, reply in replies.items()
            if which in reply.measured
        }
    )


def _examples(reply: Reply, which: str) -> int:
    return reply.validation_examples if which.startswith("validation-") else reply.test_examples


def _weighed(reply: Reply, which: str) -> Metric:
    """A client's metric; on the common test set, where all weigh the same, clients count by their own test examples."""
    metric = reply.measured[which].metric
    if not which.startswith("common-"):
        return metric
    return Metric(metric.values, tuple(float(reply.test_examples) if weight else 0.0 for weight in metric.weights))


def metric_record(row: Mapping[str, Any]) -> MetricRecord:
    """The numbers of a row that Flower's result can hold."""
    numbers = {"train-loss": row.get("train_loss")}
    for which in ("received", "trained"):
        for kind, values in (row.get(which) or {}).items():
            if isinstance(values, dict):
                numbers[f"{which}-{kind}"] = values["weighted"]
    numbers |= row.get("metrics", {})
    return MetricRecord({key: float(value) for key, value in numbers.items() if value is not None})


def watch_validation(state: State, row: Mapping[str, Any], scored: str, patience: int) -> None:
    """Early stopping: note the validation accuracy of a round, and whether it is the last.

    Args:
        state: the strategy's; `stopped` becomes this round after `patience` evaluations without a better one.
        row: the round's.
        scored: which evaluation counts, `received` or `trained`.
        patience: 0 never stops.
    """
    accuracy = ((row.get("validation") or {}).get(scored) or {}).get("accuracy", {}).get("weighted")
    if not patience or accuracy is None:
        return
    state.validation.append(accuracy)
    if len(state.validation) > patience and max(state.validation[-patience:]) <= max(state.validation[:-patience]):
        state.stopped = row["round"]
        log.info("round %d is the last: %d evaluations brought no better validation accuracy", row["round"], patience)
