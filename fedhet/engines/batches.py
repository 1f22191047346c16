"""A grid that answers several clients' messages in one call, so that their networks are trained in one batch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from fedhet.client.app import ANSWER_ALL
from fedhet.flower import ClientApp, Context, Message
from fedhet.flower.grid import FIRST_NODE, LocalGrid, call_app, checked
from fedhet.flower.insides import identify
from fedhet.utils.machine import cores

LEAST = 4
"""Minimum number of clients in a batch, unless batches are smaller."""


class BatchingGrid(LocalGrid):
    """A LocalGrid that handles messages in batches.

    `kinds` has a text for each node: up to `batch` messages to nodes with equal texts are handled in one call, for ""
    only one.
    """

    def __init__(self, client_app: ClientApp, clients: int, kinds: Sequence[str] = (), batch: int = 1) -> None:
        super().__init__(client_app, clients)
        self._kinds, self._batch = kinds, batch
        self._batch_of: dict[str, tuple[str, ...]] = {}  # which messages are handled with a message
        self._done: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages and return their ids; a batch is handled when one of its replies is pulled."""
        keys = [*super().push_messages(messages)]
        self._group_into_batches({key: self._waiting[key] for key in keys})
        return keys

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
                self._handle_batch(self._taken(key))
        return [self._done.pop(key) for key in keys if key in self._done]

    def _taken(self, key: str) -> dict[str, Message]:
        """Remove a message and the others of its batch from the waiting messages, and return them."""
        keys = self._batch_of[key]
        for each in keys:
            del self._batch_of[each]
        return {each: self._waiting.pop(each) for each in keys}

    def _handle_batch(self, messages: Mapping[str, Message]) -> None:
        pairs = [(message, self._contexts[message.metadata.dst_node_id]) for message in messages.values()]
        replies = answer(self._client_app, pairs, self._logged)
        for reply in replies:
            identify(reply, self._ids)
        self._done.update(zip(messages, replies, strict=True))


def answer(app: ClientApp, messages: Sequence[tuple[Message, Context]], logged: set[str]) -> list[Message]:
    """Return a ClientApp's replies to several messages, which it answers in one call if it can (see `call_app`)."""
    answer_all = getattr(app, ANSWER_ALL, {}).get(messages[0][0].metadata.message_type) if len(messages) > 1 else None
    if answer_all is None:
        return [call_app(app, *each, logged) for each in messages]
    return [checked(*each, reply, logged) for each, reply in zip(messages, answer_all(messages), strict=True)]
