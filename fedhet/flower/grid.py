"""A Flower Grid that calls the ClientApp in this process, so that a strategy runs without Flower's runtime.

Like Flower's runtime, it sets identities and message ids, keeps a context for each node, and replies with an error if a
client raises.
"""

import itertools
from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedhet.flower.insides import RUN_ID, be_server, failure, filled, identify, no_handler
from fedhet.utils.text import log

FIRST_NODE = 100


class LocalGrid(Grid):
    """A Flower Grid that answers messages by calling a ClientApp in this process.

    There are `clients` nodes; the config of node i has the partition id i and the entries of `node_config`.
    """

    def __init__(self, client_app: ClientApp, clients: int, node_config: Mapping[str, str] | None = None) -> None:
        be_server()
        self._client_app = client_app
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
            # Each client gets records of its own; the bytes of arrays, which are read-only, are not copied.
            arrays = {name: filled(ArrayRecord(), record) for name, record in message.content.array_records.items()}
            message.content = RecordDict({**message.content, **arrays})
        self._waiting |= pushed
        return [*pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Handle the stored messages with these ids, and return the replies."""
        return [self._handle(self._waiting.pop(key)) for key in message_ids if key in self._waiting]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Handle messages and return the replies; `timeout` is ignored."""
        # A list, as Flower's grids return: its wrappers with adaptive clipping read the replies twice.
        return [reply for key in self.push_messages(messages) for reply in self.pull_messages([key])]

    def _handle(self, message: Message) -> Message:
        reply = call_app(self._client_app, message, self._contexts[message.metadata.dst_node_id], self._logged)
        identify(reply, self._ids)
        return reply


def call_app(app: ClientApp, message: Message, context: Context, logged: set[str]) -> Message:
    """Call the ClientApp and return its reply; an exception that it raises becomes an error reply (see `checked`)."""
    try:
        return app(message, context)
    except (Exception, SystemExit) as error:  # a user's code may call sys.exit
        return checked(message, context, error, logged)


def checked(message: Message, context: Context, reply: Message | BaseException, logged: set[str]) -> Message:
    """Return a reply, or an error reply in place of an exception, which is logged unless its text is in `logged`."""
    if isinstance(reply, Message):
        return reply
    reason = f"{type(reply).__name__}: {reply}"
    if not no_handler(reason) and reason not in logged:
        logged.add(reason)
        log.error("client at node %d failed", context.node_id, exc_info=reply)
    return failure(message, reason)
