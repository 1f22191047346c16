"""A Flower Grid that calls the ClientApp in this process, so that a strategy runs without Flower's runtime.

Like Flower's runtime, it sets identities and message ids, keeps a context for each node, and replies with an error if a
client raises.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedhet.flower.insides import RUN_ID, be_server, failure, filled, identify, no_handler
from fedhet.utils.machine import cores
from fedhet.utils.text import log

FIRST_NODE = 100

Messages = Sequence[tuple[Message, Context]]

ANSWER_ALL = "answer_all"
"""Attribute of a ClientApp: functions that handle several messages, by type of message; they return exceptions."""

LEAST = 4
"""Minimum number of clients in a batch, unless batches are smaller."""


class LocalGrid(Grid):
    """A Flower Grid that answers messages by calling a ClientApp in this process.

    There are `clients` nodes; the config of node i has the partition id i and the entries of `node_config`. `kinds` has
    a text for each node: up to `batch` messages to nodes with equal texts are handled in one call, for "" only one.
    """

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        node_config: Mapping[str, str] | None = None,
        kinds: Sequence[str] = (),
        batch: int = 1,
    ) -> None:
        be_server()
        self._client_app, self._kinds, self._batch = client_app, kinds, batch
        self._contexts = {
            FIRST_NODE + index: Context(
                run_id=RUN_ID,
                node_id=FIRST_NODE + index,
                node_config={**(node_config or {}), "partition-id": index, "num-partitions": clients},
                state=RecordDict(),
                run_config={},
            )
            for index in range(clients)
        }
        self._ids = itertools.count(1)
        self._waiting: dict[str, Message] = {}
        self._batch_of: dict[str, tuple[str, ...]] = {}  # which messages are handled with a message
        self._done: dict[str, Message] = {}
        self._logged: set[str] = set()

    @property
    def run(self) -> Run:
        """Flower's description of the run, of which only the run id is set."""
        return Run.create_empty(RUN_ID)

    def set_run(self, run: Run) -> None:
        """Do nothing, since a LocalGrid has a single run."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message for a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, which stay connected for the whole run."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages and return their ids; a message is handled when its reply is pulled."""
        pushed = {}
        for message in messages:
            pushed[identify(message, self._ids)] = message
            message.content = _records_for_one(message.content)
        self._waiting |= pushed
        self._group_into_batches(pushed)
        return [*pushed]

    def _group_into_batches(self, messages: Mapping[str, Message]) -> None:
        """Divide messages into batches to handle in one call, independently of the number of workers."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for key, message in messages.items():
            kind = self._kinds[message.metadata.dst_node_id - FIRST_NODE] if self._kinds else ""
            groups[message.metadata.message_type, kind].append(key)
        for (_, kind), keys in groups.items():
            number, least = len(keys), min(LEAST, self._batch)
            if kind and number >= least:
                number = max(ceil(number / self._batch), min(cores(), number // least))
            self._batch_of |= {key: tuple(keys[place % number :: number]) for place, key in enumerate(keys)}

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Handle the stored messages with these ids, batch by batch, and return the replies."""
        keys = [*message_ids]
        for key in keys:
            if key in self._waiting:
                messages = self._taken(key)
                self._done.update(zip(messages, self._handle([*messages.values()]), strict=True))
        return [self._done.pop(key) for key in keys if key in self._done]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Handle messages and return the replies; `timeout` is ignored."""
        # A list, as Flower's grids return: its wrappers with adaptive clipping read the replies twice.
        return [reply for key in self.push_messages(messages) for reply in self.pull_messages([key])]

    def _taken(self, key: str) -> dict[str, Message]:
        """Remove a message and the others of its batch from the waiting messages, and return them."""
        keys = self._batch_of[key]
        for each in keys:
            del self._batch_of[each]
        return {each: self._waiting.pop(each) for each in keys}

    def _handle(self, messages: Sequence[Message]) -> list[Message]:
        contexts = [self._contexts[message.metadata.dst_node_id] for message in messages]
        replies = call_app(self._client_app, [*zip(messages, contexts, strict=True)], self._logged)
        for reply in replies:
            identify(reply, self._ids)
        return replies


def call_app(app: ClientApp, messages: Messages, logged: set[str]) -> list[Message]:
    """Call the ClientApp and return its replies; an exception that it raises becomes an error reply.

    Exceptions are logged unless their text is in `logged`, to which it is added.
    """
    answer_all = getattr(app, ANSWER_ALL, {}).get(messages[0][0].metadata.message_type) if len(messages) > 1 else None
    replies = answer_all(messages) if answer_all else [_call_alone(app, *each) for each in messages]
    return [_checked(*each, reply, logged) for each, reply in zip(messages, replies, strict=True)]


def _checked(message: Message, context: Context, reply: Message | BaseException, logged: set[str]) -> Message:
    if isinstance(reply, Message):
        return reply
    reason = f"{type(reply).__name__}: {reply}"
    if not no_handler(reason) and reason not in logged:
        logged.add(reason)
        log.error("client at node %d failed", context.node_id, exc_info=reply)
    return failure(message, reason)


def _call_alone(app: ClientApp, message: Message, context: Context) -> Message | BaseException:
    try:
        return app(message, context)
    except (Exception, SystemExit) as error:  # a user's code may call sys.exit
        return error


def _records_for_one(content: RecordDict) -> RecordDict:
    """Copy a message's records for one client, without copying the bytes of its arrays, which are read-only."""
    records = RecordDict()
    for name, record in content.items():
        records[name] = filled(ArrayRecord(), record) if isinstance(record, ArrayRecord) else record
    return records
