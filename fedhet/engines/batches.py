"""A grid that answers several clients' messages in one call, so that their networks are trained in one batch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from fedhet.client.app import ANSWER_ALL
from fedhet.flower import ClientApp, Context, Message
from fedhet.flower.grid import FIRST_NODE, LocalGrid, call_app, checked
from fedhet.flower.insides import identify

LEAST = 4
"""Minimum number of clients in a batch, unless batches are smaller."""


class Batching(NamedTuple):
    """How messages are divided into batches, each of which is handled in one call.

    Attributes:
        kinds: the kind of each node's network; nodes of one kind share batches, and nodes with an empty text have none.
        size: largest number of messages in a batch.
        number: number of batches to make at least, as long as each has `LEAST` messages.
    """

    kinds: Sequence[str] = ()
    size: int = 1
    number: int = 1


ONE_BY_ONE = Batching()


class BatchingGrid(LocalGrid):
    """A LocalGrid that handles messages in batches."""

    def __init__(self, client_app: ClientApp, clients: int, batching: Batching = ONE_BY_ONE) -> None:
        super().__init__(client_app, clients)
        self._batching = batching
        self._batch_of: dict[str, tuple[str, ...]] = {}  # which messages are handled with a message
        self._done: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages in batches, which are the same for any number of workers, and return their ids."""
        pushed, (kinds, size, wanted) = [*super().push_messages(messages)], self._batching
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for key in pushed:
            metadata = self._waiting[key].metadata
            groups[metadata.message_type, kinds[metadata.dst_node_id - FIRST_NODE] if kinds else ""].append(key)
        for (_, kind), keys in groups.items():
            number, least = len(keys), min(LEAST, size)
            if kind and number >= least:
                number = max(ceil(number / size), min(wanted, number // least))
            self._batch_of |= {key: tuple(keys[place % number :: number]) for place, key in enumerate(keys)}
        return pushed

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
        for key, reply in zip(messages, answer(self._client_app, pairs, self._logged), strict=True):
            identify(reply, self._ids)
            self._done[key] = reply


def answer(app: ClientApp, messages: Sequence[tuple[Message, Context]], logged: set[str]) -> list[Message]:
    """Return a ClientApp's replies to several messages, which it answers in one call if it can (see `call_app`)."""
    answer_all = getattr(app, ANSWER_ALL, {}).get(messages[0][0].metadata.message_type) if len(messages) > 1 else None
    if answer_all is None:
        return [call_app(app, *each, logged) for each in messages]
    return [checked(*each, reply, logged) for each, reply in zip(messages, answer_all(messages), strict=True)]
