"""Unseen clients: clients that train in no round, come after the last one, and go on alone with what they receive."""

from collections.abc import Mapping
from typing import Any

from fedhet.errors import FedhetError
from fedhet.server.reporter import over_clients
from fedhet.state import ClientRecord
from fedhet.wire import Reply, Report
from fedhet.wire.protocol import STARTS


def comes_last(report: Report, count: int) -> bool:
    """Whether a client is one of the last `unseen_clients` partitions.

    Raises:
        FedhetError: it tells no partition, so nobody knows.
    """
    if not count:
        return False
    if report.partition is None:
        raise FedhetError(
            f"unseen-clients = {count} are the last partitions, and its node tells no partition-id and num-partitions"
        )
    partition, partitions = report.partition
    return partition >= partitions - count


def record(replies: Mapping[str, Reply], clients: Mapping[str, ClientRecord], epochs: int) -> dict[str, Any]:
    """Return the part of the history on unseen clients.

    Args:
        replies: what each measured, in order of client name.
        clients: what is known of each client.
        epochs: for how many they trained.

    Returns:
        By test set (`own`, `common`, where it was evaluated) and start (`received`, `scratch`) the statistics over
        unseen clients before the first epoch and after each (see `fedhet.rows.summarise`), and under `clients` each
        one's `architecture` and metric by epoch, of the first of the test sets that there is.
    """
    prefixes = {"own": "", "common": "common-"}
    lines = {
        test: {
            start: [over_clients(replies, f"{prefix}{start}-{epoch}") for epoch in range(epochs + 1)]
            for start in STARTS
        }
        for test, prefix in prefixes.items()
        if any(f"{prefix}{STARTS[0]}-0" in reply.measured for reply in replies.values())
    }
    first = prefixes[next(iter(lines), "own")]
    own = {
        client: {"architecture": clients[client].architecture}
        | {
            start: [
                reply.measured[name].metric.value if (name := f"{first}{start}-{epoch}") in reply.measured else None
                for epoch in range(epochs + 1)
            ]
            for start in STARTS
        }
        for client, reply in replies.items()
    }
    return {**lines, "clients": own}
