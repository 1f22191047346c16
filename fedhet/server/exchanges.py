"""Exchanges with clients: what is sent, what comes back and is valid, and whose fault it is if nothing does."""

import copy
import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedhet.errors import FedhetError
from fedhet.flower import Encoder, read_reply, write_request
from fedhet.options import Config
from fedhet.rows import client_order
from fedhet.server.roster import Roster
from fedhet.server.round import Round
from fedhet.state import State
from fedhet.wire import LostReply, Payload, Reply, Request, WireError, check, check_finite, narrowed

log = logging.getLogger("flwr").getChild("fedhet")

POLL = 0.1
"""Seconds between looks for a reply, while replies are taken in one by one."""

Checked = Callable[[Reply], None]


def messages(
    kind: str,
    payloads: Mapping[str, Payload],
    request: Request,
    *,
    config: Config,
    roster: Roster,
    state: State,
    round: Round,
    further: Mapping[str, Any],
) -> list[Message]:
    """A message to each client, noted in the round; an array that goes to several is encoded once."""
    encoder, made = Encoder(flower=request.flower), []
    for client, payload in payloads.items():
        asked = replace(request, expected=state.clients[client].trained)
        made.append(
            message(kind, roster.nodes[client], encoder(payload), asked, config=config, round=round, further=further)
        )
        round.down[client] += payload.nbytes
    return made


def message(
    kind: str,
    node: int,
    content: RecordDict,
    request: Request,
    *,
    config: Config,
    round: Round,
    further: Mapping[str, Any],
) -> Message:
    """A message to a node, noted in the round."""
    write_request(content, request, config.text(), further)
    made = Message(content, dst_node_id=node, message_type=kind, group_id=str(round.number))
    round.sent[node] = made
    return made


def send(grid: Grid, made: Iterable[Message], timeout: float, *, one_by_one: bool = False) -> Iterable[Message]:
    """Send messages and wait for the replies.

    Args:
        grid: where the clients are.
        made: the messages.
        timeout: seconds to wait for all of them together; a grid that answers for each by itself is left to.
        one_by_one: fetch replies in the order of the messages and only as they are asked for, so that those that
            nobody has looked at yet wait where they are. Messages are large then, and empty once they are sent: what
            the grid has is a copy, which may be the one that a client in this process gets.
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
        while not (found := list(grid.pull_messages([key]))) and time.monotonic() < deadline:
            time.sleep(POLL)
        while found:  # nothing is held here while it is looked at elsewhere
            yield found.pop()


def by_node(replies: Iterable[Message], round: Round, roster: Roster, timeout: float) -> Iterator[tuple[int, Message]]:
    """Replies by the node that was asked, in the order in which they were asked; one that does not answer is a failure.

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


def valid(
    replies: Iterable[Message],
    *,
    config: Config,
    roster: Roster,
    round: Round,
    own: Mapping[str, Checked] | None = None,
) -> dict[str, Reply]:
    """The valid replies, in order of client name; whatever is wrong with the others is noted.

    Args:
        replies: what came.
        config: the run's.
        roster: who is there; a client that lost what it was sent leaves it, to be greeted again.
        round: where failures and bytes are noted.
        own: clients whose reply holds the method's own arrays, each with what checks them and takes them in.
    """
    names = {node: client for client, node in roster.nodes.items()}
    found: dict[str, Reply] = {}
    faults = Faults()
    for node, came in by_node(replies, round, roster, config.timeout):
        client = names[node]
        try:
            reply = read_reply(came)
            round.up[client] += reply.payload.nbytes
            _check(client, reply, config, roster, round)
            if own and client in own:
                own[client](reply)
        except LostReply as error:
            del roster.nodes[client]
            round.fail(client, f"{error}; it is greeted again")
            continue
        except Exception as error:  # whatever one client's reply raises is that client's refusal
            round.fail(client, faults.reason(client, error))
            continue
        if reply.report.lost_state >= 0:
            log.warning("client %s lost its state of round %s and started afresh", client, reply.report.lost_state)
            round.lost.append(client)
        found[client] = reply
        del came  # what was taken in of it is free before the next one comes
    if not found:
        faults.blame_nobody()
    round.failures.sort(key=lambda failure: client_order(failure["client"]))
    return {client: found[client] for client in sorted(found, key=client_order)}


def _check(client: str, reply: Reply, config: Config, roster: Roster, round: Round) -> None:
    """What is the same for all methods: who answers, counts and metrics, and that arrays are as they must be."""
    if reply.client != client:
        raise WireError(f"answers as client {reply.client}")
    roster.check_counts(reply)
    if client not in round.training | round.joining and (reply.train_loss is not None or reply.work.steps):
        raise WireError("it tells of training, and was not asked to train")
    for name, group in reply.arrays.items():
        if name == "model":
            check(group, narrowed(roster.specs[client], config.wire_dtype), "its model")
        else:
            check_finite(group, f"its {name[:100]}")


class Faults:
    """What replies of single clients raised that nobody raises on purpose: they are damaged, or the code is wrong."""

    def __init__(self) -> None:
        self._raised: dict[str, Exception] = {}
        self._meant = False

    def reason(self, client: str, error: Exception, of: str = "its reply") -> str:
        """Why this client is left out, who is shown by what was read."""
        if isinstance(error, FedhetError):
            self._meant = True
            return str(error)
        log.warning("client %s: %s raised", client, of, exc_info=error)
        self._raised[client] = error
        return f"{of} cannot be used: {_shown(error)}"

    def blame_nobody(self) -> None:
        """Find out whether all replies raised the same, where none could be used.

        Raises:
            FedhetError: they did, and there are several: that is no client's fault.
        """
        causes = {(type(error), *traceback.extract_tb(error.__traceback__)[-1][:2]) for error in self._raised.values()}
        if len(self._raised) > 1 and len(causes) == 1 and not self._meant:
            error = next(iter(self._raised.values()))
            raise FedhetError(
                f"the replies of all clients ({', '.join(self._raised)}) raise the same, which is none's fault: "
                f"{_shown(error)}"
            ) from error


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
