"""A Flower Grid that calls the ClientApp in this process, so that a strategy runs without Flower's runtime.

Like Flower's runtime, it sets identities and message ids, keeps a context for each node, and replies with an error if a
client raises an exception.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedhet.flower.insides import RUN_ID, be_server, failure, filled, identify, no_handler
from fedhet.utils.text import log

FIRST_NODE = 100

# Attribute of a ClientApp: functions by message type that handle several messages, and return replies or exceptions.
ANSWER_ALL = "answer_all"


class LocalGrid(Grid):
    """A Flower Grid that answers messages by calling a ClientApp in this process.

    The config of each of the `clients` nodes has a partition id, a name if `names` has one for each client, and the
    entries of `node_config`. Up to `batch_size` messages are handled in one call, which can train networks together, if
    they are to nodes that reported the same kind of network in their handshakes (`Report.alike`); messages to nodes
    without one are handled one by one. Eight or more messages to nodes of one kind make at least `least_batches`,
    which as many processes can handle at a time.
    """

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        node_config: Mapping[str, str] | None = None,
        *,
        batch_size: int = 1,
        least_batches: int = 1,
        names: Sequence[str] = (),
    ) -> None:
        be_server()
        self._client_app = client_app
        self._batch_size = batch_size
        self._least_batches = least_batches
        self._alike: dict[int, str] = {}  # the kind of network of each node
        self._contexts = {
            FIRST_NODE + index: Context(
                run_id=RUN_ID,
                node_id=FIRST_NODE + index,
                node_config={
                    **(node_config or {}),
                    **({"name": names[index]} if names else {}),
                    "partition-id": index,
                    "num-partitions": clients,
                },
                state=RecordDict(),
                run_config={},
            )
            for index in range(clients)
        }
        self._ids = itertools.count(1)
        self._waiting: dict[str, list[Message]] = {}  # the batch of each message, by the message's id
        self._done: dict[str, Message] = {}  # replies by the message's id
        self._logged: set[str] = set()

    @property
    def run(self) -> Run:
        """Flower's description of the run, with only the run id."""
        return Run.create_empty(RUN_ID)

    def set_run(self, run: Run) -> None:
        """Do nothing, since a LocalGrid has a single run."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message for the node `dst_node_id` (see Flower's `Grid`)."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, which stay connected for the whole run."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages in batches and return their ids; a message is handled when its reply is pulled."""
        pushed = []
        groups = defaultdict[tuple[str, str], list[Message]](list)
        for message in messages:
            pushed.append(identify(message, self._ids))
            # Each client gets records of its own; the bytes of arrays, which are read-only, are not copied.
            records = {
                k: filled(ArrayRecord(), r) if isinstance(r, ArrayRecord) else r for k, r in message.content.items()
            }
            message.content = filled(RecordDict(), records)
            alike = self._alike.get(message.metadata.dst_node_id, "")
            groups[message.metadata.message_type, alike].append(message)
        for (_, alike), group in groups.items():
            number = ceil(len(group) / self._batch_size) if alike else len(group)
            if alike and len(groups) == 1 and len(group) >= 8:
                number = max(number, self._least_batches)
            for batch in (group[first::number] for first in range(number)):
                self._waiting |= {message.metadata.message_id: batch for message in batch}
        return pushed

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Handle the stored messages with these ids (default: all), batch by batch, and return the replies.

        From Flower 1.43 on, the ids have the name `reply_to_message_ids`.
        """
        chosen = reply_to_message_ids if message_ids is None else message_ids
        keys = [*self._waiting, *self._done] if chosen is None else [*chosen]
        for key in keys:
            if key in self._waiting:
                self._handle(self._taken(key))
        return [self._done.pop(key) for key in keys if key in self._done]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Handle messages and return the replies; `timeout` is ignored."""
        # A list, as Flower's grids return: its wrappers with adaptive clipping read the replies twice.
        return [reply for key in self.push_messages(messages) for reply in self.pull_messages([key])]

    def _taken(self, key: str) -> list[Message]:
        batch = self._waiting[key]
        for message in batch:
            del self._waiting[message.metadata.message_id]
        return batch

    def _handle(self, batch: Sequence[Message]) -> None:
        pairs = [(message, self._contexts[message.metadata.dst_node_id]) for message in batch]
        self._complete(batch, answer(self._client_app, pairs, self._logged))

    def _complete(self, batch: Sequence[Message], replies: Sequence[Message]) -> None:
        for message, reply in zip(batch, replies, strict=True):
            identify(reply, self._ids)
            report = reply.content.config_records.get("report") if reply.has_content() else None
            if report is not None and "alike" in report:
                self._alike[message.metadata.dst_node_id] = str(report["alike"])
            self._done[message.metadata.message_id] = reply


def answer(app: ClientApp, messages: Sequence[tuple[Message, Context]], logged: set[str]) -> list[Message]:
    """Return a ClientApp's replies to `messages`, pairs of a message and its node's context.

    An exception becomes an error reply, and is logged unless its text is in `logged`, to which it is then added.
    """
    answer_all = getattr(app, ANSWER_ALL, {}).get(messages[0][0].metadata.message_type) if len(messages) > 1 else None
    replies: list[Any] = answer_all(messages) if answer_all else [_reply(app, *each) for each in messages]
    for place, (message, context) in enumerate(messages):
        if isinstance(error := replies[place], BaseException):
            reason = f"{type(error).__name__}: {error}"
            if not no_handler(reason) and reason not in logged:
                logged.add(reason)
                log.error("client at node %d failed", context.node_id, exc_info=error)
            replies[place] = failure(message, reason)
    return replies


def _reply(app: ClientApp, message: Message, context: Context) -> Message | BaseException:
    try:
        return app(message, context)
    except (Exception, SystemExit) as error:  # a user's code may call sys.exit
        return error
