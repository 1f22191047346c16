"""A Grid that calls the ClientApp itself: Flower has no plug-in point for backends, but a strategy only needs a `Grid`.

Like Flower's runtime, it sets identities and message ids, keeps a context for each node, and replies with an error if a
client raises.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedhet.flower.insides import RUN_ID, be_server, failure, filled, identify, no_handler, only_run
from fedhet.learning import ClientBatching
from fedhet.learning.batching import outcome
from fedhet.text import log

FIRST_NODE = 100


class LocalGrid(Grid):
    """A Grid whose nodes are calls of a ClientApp.

    Args:
        client_app: the ClientApp, called for one message after the other.
        clients: number of nodes; node i has partition id i.
        batching: runs several calls at the same time.
        node_config: the config of each node, apart from its partition.
    """

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        batching: ClientBatching | None = None,
        node_config: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        be_server()
        self._batching, self._side_by_side = batching, batching.size if batching else 1
        self._client_app = client_app
        self._contexts = {
            FIRST_NODE + index: Context(
                run_id=RUN_ID,
                node_id=FIRST_NODE + index,
                node_config={**node_config, "partition-id": index, "num-partitions": clients},
                state=RecordDict(),
                run_config={},
            )
            for index in range(clients)
        }
        self._ids = itertools.count(1)
        self._waiting: dict[str, Message] = {}
        self._logged: set[str] = set()

    @property
    def run(self) -> Run:
        """Information on the run: its number only."""
        return only_run()

    def set_run(self, run: Run) -> None:
        """Do nothing: there is one run."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes; none ever leaves."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages; each is handled when its reply is pulled."""
        ids = []
        for message in messages:
            ids.append(identify(message, self._ids))
            message.content = _records_for_one(message.content)
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Handle messages, one by one or in batches of clients, and return the replies, each once."""
        messages = [self._waiting.pop(key) for key in message_ids if key in self._waiting]
        size = self._side_by_side
        parts = [messages[start : start + size] for start in range(0, len(messages), size)]
        return [reply for part in parts for reply in self._handle_all(part)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Handle messages; a call cannot be timed out."""
        return self.pull_messages(self.push_messages(messages))

    def _handle_all(self, messages: Sequence[Message]) -> list[Message]:
        calls = [(message, self._contexts[message.metadata.dst_node_id]) for message in messages]
        replies = handled(self._client_app, calls, self._logged, self._batching)
        for reply in replies:
            identify(reply, self._ids)
        return replies


def handled(
    app: ClientApp, calls: Sequence[tuple[Message, Context]], logged: set[str], batching: ClientBatching | None = None
) -> list[Message]:
    """Return clients' replies; a client that raises fails alone. Equal errors of many clients are logged once."""
    clients = [partial(app, *call) for call in calls]
    results = batching.run(clients) if batching else [outcome(client) for client in clients]
    return [
        _failed(message, context, result, logged) if isinstance(result, Exception) else result
        for (message, context), result in zip(calls, results, strict=True)
    ]


def _failed(message: Message, context: Context, error: Exception, logged: set[str]) -> Message:
    reason = f"{type(error).__name__}: {error}"
    if not no_handler(reason) and reason not in logged:
        logged.add(reason)
        log.error("client at node %d failed", context.node_id, exc_info=error)
    return failure(message, reason)


def _records_for_one(content: RecordDict) -> RecordDict:
    """Copy a message's records for one client; the bytes of arrays are shared, since they are read-only."""
    records = RecordDict()
    for name, record in content.items():
        records[name] = filled(ArrayRecord(), record) if isinstance(record, ArrayRecord) else record
    return records
