"""Exchanges with nodes: messages go out, replies come back in order, and whose fault it is if they cannot be used."""

import copy
import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator

from fedhet.errors import FedhetError
from fedhet.flower import Grid, Message, RecordDict
from fedhet.server.roster import Roster
from fedhet.server.run import Round

log = logging.getLogger("flwr").getChild("fedhet")

POLL = 0.1
"""Seconds between looks for a reply, while replies are taken in one by one."""


def send(grid: Grid, made: Iterable[Message], timeout: float, *, one_by_one: bool = False) -> Iterable[Message]:
    """Send messages and wait for the replies.

    Args:
        grid: where the clients are.
        made: the messages.
        timeout: seconds to wait for all of them together; a grid that answers for each by itself is left to.
        one_by_one: fetch replies in the order of the messages and only as they are asked for. The messages are empty
            once they are sent: the grid has copies, which may be what a client in this process gets.
    """
    if not one_by_one:
        return grid.send_and_receive(made, timeout=timeout)
    made = list(made)
    keys = list(grid.push_messages([copy.copy(each) for each in made]))
    for each in made:
        each.content = RecordDict()
    return _fetched(grid, keys, math.inf if getattr(grid, "answers", False) is True else time.monotonic() + timeout)


def _fetched(grid: Grid, waiting: list[str], deadline: float) -> Iterator[Message]:
    for key in filter(None, waiting):
        while not (replies := list(grid.pull_messages([key]))) and time.monotonic() < deadline:
            time.sleep(POLL)
        while replies:  # nothing is held here while it is looked at elsewhere
            yield replies.pop()


def by_node(replies: Iterable[Message], round: Round, roster: Roster, timeout: float) -> Iterator[tuple[int, Message]]:
    """Replies with the nodes that were asked, in the order in which they were asked; without a reply a node fails.

    A reply that comes before its turn waits.
    """
    sent, round.sent = round.sent, {}
    # The SuperLink itself answers for a node that is gone, so only the message replied to tells which.
    asked = {each.metadata.message_id: node for node, each in sent.items()}
    waiting: dict[int, Message] = {}
    turns = deque(sent)
    for reply in replies:
        source = reply.metadata.src_node_id
        node = source if source in sent else asked.get(reply.metadata.reply_to_message_id)
        if node is None:
            continue
        waiting[node] = reply
        del reply
        while turns and turns[0] in waiting:
            node = turns.popleft()
            yield node, waiting.pop(node)
    names = {node: client for client, node in roster.nodes.items()}
    for node in turns:
        if node in waiting:
            yield node, waiting.pop(node)
        else:
            round.fail(names.get(node, f"at node {node}"), f"no reply within {timeout:g} s")


class Faults:
    """Unexpected exceptions while reading replies of single clients: they are damaged, or the code is wrong."""

    def __init__(self) -> None:
        self._raised: dict[str, Exception] = {}
        self._refused = False

    def reason(self, client: str, error: Exception, of: str = "its reply") -> str:
        """Why this client is left out; `of` names what was read."""
        if isinstance(error, FedhetError):
            self._refused = True
            return str(error)
        log.warning("client %s: %s raised", client, of, exc_info=error)
        self._raised[client] = error
        return f"{of} cannot be used: {_shown(error)}"

    def blame_nobody(self) -> None:
        """Raise a FedhetError if several replies all raised the same, where none could be used: no client's fault."""
        causes = {(type(error), *traceback.extract_tb(error.__traceback__)[-1][:2]) for error in self._raised.values()}
        if len(self._raised) > 1 and len(causes) == 1 and not self._refused:
            error = next(iter(self._raised.values()))
            raise FedhetError(
                f"the replies of all clients ({', '.join(self._raised)}) raise the same, which is none's fault: "
                f"{_shown(error)}"
            ) from error


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
