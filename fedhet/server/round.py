"""A round: what was asked of whom while it is under way, and what is told of it when it is complete."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, MetricRecord

from fedhet.observing import RoundReport
from fedhet.randomness import numpy_generator
from fedhet.rows import ClientRow, Work, client_order, summarise
from fedhet.state import ClientRecord, State
from fedhet.task import Metric
from fedhet.wire import Reply

log = logging.getLogger("flwr").getChild("fedhet")


@dataclass
class Round:
    """A round under way: who trains or joins, what was asked of whom, what it cost, and who lost his state."""

    number: int = 0
    final: bool = False
    closing: bool = False
    started: float = field(default_factory=time.perf_counter)
    training: frozenset[str] = frozenset()
    joining: frozenset[str] = frozenset()
    sent: dict[int, Message] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cuts: list[dict[str, Any]] = field(default_factory=list)
    down: Counter[str] = field(default_factory=Counter)
    up: Counter[str] = field(default_factory=Counter)

    def fail(self, client: str, reason: str) -> None:
        """Note that a client did not do what it was asked."""
        self.failures.append({"client": client, "reason": reason})

    def name_cuts(self, cuts: Iterable[dict[str, Any]]) -> None:
        """Note whose updates were cut, each client once."""
        named = {cut["client"] for cut in self.cuts}
        self.cuts += [cut for cut in cuts if cut["client"] not in named]

    def reasons(self) -> str:
        """All failures, a line for each kind, with how many clients it hit."""
        return "\n".join(f"  {line}" for line in self.lines())

    def lines(self) -> list[str]:
        """All failures in words, one for each kind."""
        hit: dict[str, list[str]] = {}
        for failure in self.failures:
            hit.setdefault(failure["reason"], []).append(failure["client"])
        return [f"{named(clients)}: {reason}" for reason, clients in hit.items()]

    def report(
        self,
        replies: Mapping[str, Reply],
        metrics: Mapping[str, float],
        *,
        clients: Mapping[str, ClientRecord],
        scored: str,
        on_common_test: Mapping[str, Any] | None,
    ) -> RoundReport:
        """What observers are told.

        Args:
            replies: the valid ones, in order of client name.
            metrics: the method's own.
            clients: what is known of each client.
            scored: which evaluation is the clients' accuracy, `received` or `trained`.
            on_common_test: see `statistics`.
        """
        for line in self.lines():
            log.warning("round %d, %s", self.number, line)
        losses = [(r.train_loss, r.examples) for r in replies.values() if r.train_loss is not None]
        weight = sum(examples for _, examples in losses)
        finite = weight and all(math.isfinite(loss) for loss, _ in losses)
        row = {
            "round": self.number,
            **({"final": True} if self.final else {}),
            "participants": [client for client in replies if client in self.training],
            "failures": self.failures,
            **({"cut": self.cuts} if self.cuts else {}),
            **({"lost_state": sorted(self.lost, key=client_order)} if self.lost else {}),
            **statistics(replies, on_common_test),
            "train_loss": math.fsum(loss * examples for loss, examples in losses) / weight if finite else None,
            "work": vars(sum((reply.work for reply in replies.values()), Work())),
            "metrics": dict(metrics),
            "bytes_up": self.up.total(),
            "bytes_down": self.down.total(),
            "timing": {"seconds": time.perf_counter() - self.started},
        }
        measured = {
            client: found
            for client, reply in replies.items()
            if (found := reply.measured.get(scored) or reply.measured.get(f"common-{scored}"))
        }
        rows = [
            ClientRow(
                round=self.number,
                client=client,
                architecture=clients[client].architecture,
                examples=clients[client].examples,
                accuracy=measured[client].metric.value if client in measured else None,
                loss=measured[client].loss if client in measured else None,
                bytes_up=self.up[client],
                bytes_down=self.down[client],
            )
            for client in sorted({*replies, *self.up, *self.down}, key=client_order)
        ]
        return RoundReport(row, rows)


def named(clients: Sequence[str], most: int = 3) -> str:
    """Clients in words: their number, and the names of the first ones."""
    if len(clients) == 1:
        return f"client {clients[0]}"
    return f"{len(clients)} clients ({', '.join(clients[:most])}{', ...' if len(clients) > most else ''})"


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


def in_order(clients: Iterable[str]) -> list[str]:
    """Clients in order of name, "2" before "10"."""
    return sorted(clients, key=client_order)


def draw(seed: int, round: int, clients: Iterable[str], fraction: float) -> list[str]:
    """The clients of a round, drawn from the seed, in order of name; who is missing is not replaced."""
    known = in_order(clients)
    count = max(1, math.floor(fraction * len(known) + 0.5))
    drawn = numpy_generator(seed, "participation", round).permutation(len(known))[:count]
    return [known[index] for index in sorted(drawn)]


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
