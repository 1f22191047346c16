"""The clients of a run, and the exchange of messages with them."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import Grid, Message, MessageType
from fedhet.flower.grid import LocalGrid
from fedhet.flower.insides import simulated
from fedhet.flower.messages import Encoder, check_simulated, read_reply, sent_along, write_request
from fedhet.messages import LostState, Payload, Reply, Request, Spec, WireError, check, check_finite
from fedhet.messages.payload import shortened
from fedhet.messages.protocol import DESCRIBE, STARTS, WHOLE
from fedhet.server.claims import check_claims, limit_claims
from fedhet.server.run import Run
from fedhet.tasks import OUTPUTS
from fedhet.utils.files import plain_name
from fedhet.utils.machine import proof
from fedhet.utils.statistics import client_order, grouped, in_order
from fedhet.utils.text import log

Check = Callable[[Reply], None]  # checks a client's reply, and raises an exception to refuse it

GRACE = 10.0  # minimum time in seconds to wait for a required number of nodes, even if `wait-for-clients` is less


class Federation:
    """The clients of a run, and the exchange of messages with them; only `_message` and `read` count bytes.

    Attributes:
        nodes: the Flower node id of each connected client, in order of client name.
        known: each admitted client's handshake reply, without payload; clients that have left are included.
        specs: names, shapes and dtypes of each admitted client's shared arrays.
        claimed: by client, the name that its node sends; the server adds a number to a name that two nodes send.
        answered: function called after each reply, with the numbers of replies so far and of messages sent.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.grid: Grid | None = None
        self.nodes: dict[str, int] = {}
        self.known: dict[str, Reply] = {}
        self.specs: dict[str, Spec] = {}
        self.claimed: dict[str, str] = {}
        self.answered: Callable[[int, int], None] = lambda done, asked: None

    @property
    def simulated(self) -> bool:
        """Whether clients are simulated, on this machine or a Ray cluster, instead of running on their own nodes."""
        return simulated(self.grid) or isinstance(self.grid, LocalGrid)

    def earlier_name(self, node: int, claimed: str) -> str:
        """Return the name given to a node's client earlier in the run (`claimed`, or `claimed` and a number), or ""."""
        records = {} if self.simulated else self.run.state.clients
        names = [client for client, record in records.items() if record.node == node]
        return next((name for name in names if name == claimed or name.startswith(f"{claimed} (")), "")

    def name_for(self, node: int, claimed: str) -> str:
        """Return a name for a node's client: the name in its reply (`claimed`), plus a number if the name is in use."""
        numbered = (f"{claimed} ({number})" for number in itertools.count(2))
        names = itertools.chain([self.earlier_name(node, claimed) or claimed, claimed], numbered)
        name = next(name for name in names if name not in self.nodes)
        if not plain_name(name):
            raise FedhetError(f"two nodes have the name {claimed}: give one of them another name in its node config")
        if name != claimed:
            self.run.warn_once(
                f"node {node} takes part as client {name}, since another node has the name {claimed}: each node needs "
                "its own partition-id (or name)"
            )
        return name

    def choose(self, clients: Iterable[str]) -> list[str]:
        """Return the connected clients among `clients`, in order of name; record absent clients as failed."""
        wanted = dict.fromkeys(clients)
        for client in wanted:
            if client not in self.nodes:
                self.run.round.fail(client, "is absent")
        return [client for client in self.nodes if client in wanted]

    def admit(self, node: int, reply: Reply, claimed: str) -> None:
        """Add a client, whose node claims the name `claimed` in its handshake `reply`."""
        client = reply.client
        self.nodes[client] = node
        self.claimed[client] = claimed
        self.known[client] = replace(reply, payload=Payload())
        self.specs[client] = reply.report.spec
        self.run.clients[node] = client

    def keeps(self, client: str, *, after: int | None = None) -> bool:
        """Return whether a client trained in the last aggregated round, and still has what it stored then.

        With `after`, return whether it trained in any round after that one.
        """
        records = self.run.state.clients
        least = max(record.trained for record in records.values()) if after is None else after + 1
        return records[client].trained >= max(least, 1) and not records[client].lost

    def training(self, payloads: Mapping[str, Payload], *, flower: bool = False) -> list[Message]:
        """Return the messages of the current round that ask clients to train (see `messages`)."""
        run = self.run
        run.round.training = frozenset(payloads) & self.nodes.keys()
        epochs = run.config.closing_epochs if run.round.closing else run.config.local_epochs
        return self.messages(MessageType.TRAIN, payloads, flower=flower, epochs=epochs, evaluate=run.evaluates_now)

    def evaluation(self, payloads: Mapping[str, Payload], *, flower: bool = False) -> list[Message]:
        """Return the messages that ask clients to evaluate (see `messages`)."""
        evaluate = not self.run.only_describes
        return self.messages(MessageType.EVALUATE, payloads, flower=flower, evaluate=evaluate)

    def messages(
        self, kind: str, payloads: Mapping[str, Payload], *, flower: bool = False, **asked: Any
    ) -> list[Message]:
        """Return a message for each connected client; `kind` is its type, `asked` are fields of the `Request`.

        With `flower`, arrays are in Flower's format, also those of replies.
        """
        encoder = Encoder(flower=flower)
        messages = []
        for client, payload in payloads.items():
            if client in self.nodes:
                asked["expected"] = self.run.state.clients[client].trained
                if self.run.config.keep_best and client in self.run.state.best:
                    _, asked["best"] = self.run.state.best[client]
                    asked["improvable"] = True
                asked["called"] = client if client != self.claimed[client] else ""
                messages.append(self._message(kind, self.nodes[client], payload, encoder, flower=flower, **asked))
        return messages

    def _message(self, kind: str, node: int, payload: Payload, encoder: Encoder, **asked: Any) -> Message:
        run = self.run
        round = run.round
        common: dict[str, Any] = {"run": run.state.run, "public": run.state.public}
        assert self.grid is not None
        # Each client of the run receives the proof, which must be of no use in another run.
        common["here"] = proof(f"{self.grid.run.run_id} {run.config.text}")
        common |= {"closing": round.closing, "final": round.final, "names": run.state.names}
        request = Request(round.number, **common, **asked)
        entries = sent_along(run.train_config, run.evaluate_config, run.flower_options.names)
        content = encoder(payload)
        write_request(content, request, run.config.text, entries)
        round.sent[node] = Message(content, dst_node_id=node, message_type=kind, group_id=str(round.number))
        round.down[node] += payload.nbytes
        return round.sent[node]

    def read(self, node: int, message: Message) -> Reply:
        """Return the reply in a node's message; raise a FedhetError if it is an error, a refusal, or invalid."""
        reply = read_reply(message, self.run.flower_options.weighted_by_key)
        self.run.round.up[node] += reply.payload.nbytes
        return reply

    def ask(self, question: str, payloads: Mapping[str, Payload], check: Check | None = None) -> dict[str, Reply]:
        """Send a query to clients, in addition to the round's messages, and return the valid replies by client.

        `question` is the query's name, such as "join"; `check` raises an exception to refuse a reply. A client without
        a valid reply counts as failed in this round.
        """
        return self.exchange(self.messages(MessageType.QUERY, payloads, question=question), check)

    def query(
        self, nodes: Iterable[int], question: str, payload: Payload, **asked: Any
    ) -> Iterable[tuple[int, Message]]:
        """Send the query `question` to nodes and yield (node id, reply); `asked` are fields of the `Request`."""
        encoder = Encoder()
        messages = [
            self._message(MessageType.QUERY, node, payload, encoder, question=question, **asked) for node in nodes
        ]
        return self.by_node(self.send(messages)) if messages else ()

    def exchange(self, messages: Iterable[Message], check: Check | None = None) -> dict[str, Reply]:
        """Send messages, and return the valid replies by client; `check` raises an exception to refuse a reply."""
        return self.receive(self.send(messages), check)

    def send(self, messages: Iterable[Message]) -> Iterable[Message]:
        """Send messages, and return the replies as they arrive."""
        assert self.grid is not None, "a strategy talks to its clients only after start or configure_train"
        return self.grid.send_and_receive(messages, timeout=self.run.config.timeout)

    def by_node(self, replies: Iterable[Message], or_else: str = "") -> Iterator[tuple[int, Message]]:
        """Yield (node id, reply) in the order in which messages were sent; record nodes without a reply as failed."""
        round = self.run.round
        sent = round.sent
        round.sent = {}
        # For a node that is gone the SuperLink answers, so only the id of the message says which node it was.
        asked = {message.metadata.message_id: node for node, message in sent.items()}
        answers: dict[int | None, Message] = {}
        for reply in replies:
            source = reply.metadata.src_node_id
            answers[source if source in sent else asked.get(reply.metadata.reply_to_message_id)] = reply
            self.answered(len(answers), len(sent))
        for node in sent:
            if node in answers:
                if self.simulated:  # the clients' disk and Ray are those of the run
                    check_simulated(answers[node])
                yield node, answers[node]
            else:
                reason = f"no reply within {self.run.config.timeout:g} s{or_else}"
                round.fail(self.run.clients.get(node, f"at node {node}"), reason)

    def receive(self, replies: Iterable[Message], check: Check | None = None, or_else: str = "") -> dict[str, Reply]:
        """Return replies by client that are valid and pass `check`, in order of name; record the others as failed.

        `or_else` is added to the reason of failure of a client without a reply.
        """
        run = self.run
        round = run.round
        valid: dict[str, Reply] = {}
        notes: list[tuple[str, str]] = []
        for node, message in self.by_node(replies, or_else):
            client = run.clients[node]
            try:
                reply = self.read(node, message)
                self._check(client, reply)
                if check:
                    check(reply)
            except LostState as error:
                del self.nodes[client]
                run.state.clients[client].lost = True
                round.fail(client, f"{error}; its handshake is repeated")
                continue
            except Exception as error:  # any exception while reading a reply refuses this client
                round.fail(client, reason_of(client, error))
                continue
            if reply.report.lost_state >= 0:
                log.warning("client %s lost its state of round %s; it starts anew", client, reply.report.lost_state)
                round.lost.append(client)
            if reply.report.note:
                notes.append((reply.report.note, client))
            valid[client] = reply
        for note, clients in grouped(notes).items():
            run.warn_once(note, in_order(clients))
        round.failures.sort(key=lambda failure: client_order(failure["client"]))
        valid = {client: valid[client] for client in in_order(valid)}
        limit_claims(run, valid)
        return valid

    def _check(self, client: str, reply: Reply) -> None:
        round = self.run.round
        if reply.client != self.claimed[client]:
            raise WireError(
                f"the client's reply has the name {reply.client}, not {self.claimed[client]} as in its handshake: keep "
                "a node's name (or partition-id) unchanged during a run"
            )
        reply.report.client = client
        self._check_counts(reply)
        if client not in round.training and (reply.train_loss is not None or reply.work.steps):
            raise WireError("the client should only evaluate, but reports a training loss or steps: check its mods")
        declared = {"model", WHOLE, DESCRIBE, *self.run.traits.sends}
        for name, group in reply.arrays.items():
            if name == "model":
                check(group, self.specs[client], "the client's model")
            elif name not in declared:
                raise WireError(
                    f"the client sends the arrays {shortened(name)}, which {self.run.method.name} has no use for: "
                    "check its mods or, in a method of your own, declare the kind of these arrays (sends)"
                )
            elif name != DESCRIBE:
                check_finite(group, f"the client's {name[:100]}")

    def _check_counts(self, reply: Reply) -> None:
        record = self.known[reply.client]
        wrapped = record.report.wrapped  # the user's own functions count their examples
        for kind, count, before in (
            ("training", reply.examples, record.examples),
            ("test", reply.test_examples, record.test_examples),
            ("validation", reply.validation_examples, record.validation_examples),
        ):
            if count != before and not wrapped:
                raise WireError(
                    f"the client has {count} {kind} examples, but reported {before} in the handshake: its data must "
                    "not change during a run"
                )
        if reply.given_weight and not wrapped:
            raise WireError(
                "the client's reply has a weight, which only apps with fedhet.wrap may set: remove `weight` in its mods"
            )
        check_claims(self.run.config, reply)
        report = record.report
        others = self.run.config.further_metrics(report.metric)
        further = zip(others, filter(None, report.further.split(",")), strict=False)
        numbers = {report.metric: report.labels} | {name: int(number) for name, number in further}
        for name, measured in reply.measured.items():
            evaluation, _, of_keys = name.partition("/")
            metric = of_keys or report.metric
            number = numbers.get(metric, 0) if evaluation in evaluations(self.run.config.unseen_epochs) else 0
            low, high = OUTPUTS[report.task].metrics[metric].limits if number else (0.0, 0.0)
            pairs = [*zip(measured.metric.values, measured.metric.weights, strict=True)]
            if not number or len(pairs) != number or not all(low <= value <= high for value, weight in pairs if weight):
                raise WireError(
                    f"the client's evaluation {shortened(name)} must have {number} values, from {low:g} to {high:g}: "
                    "check the client's mods"
                )


@cache
def evaluations(epochs: int) -> frozenset[str]:
    """Return names of evaluations (see `Reply.measured`); clients that join late have one for each of the `epochs`."""
    late = (f"{start}-{epoch}" for start in STARTS for epoch in range(epochs + 1))
    return frozenset(
        f"{part}{when}" for when in ("received", "trained", *late) for part in ("", "common-", "validation-")
    )


def reason_of(client: str, error: Exception) -> str:
    """Return the reason in words why `error` makes a client's reply invalid; log an unexpected error's traceback."""
    if isinstance(error, FedhetError):
        return str(error)
    log.warning("client %s: its reply was refused, since reading it raised this exception", client, exc_info=error)
    return f"the client's reply cannot be used: {type(error).__name__}: {str(error)[:500]}"


def await_nodes(grid: Grid, wanted: int, *, exact: bool, patience: float) -> None:
    """Wait for `wanted` nodes, up to `patience` seconds or 10 if that is more; raise a FedhetError if fewer connect.

    With `exact`, return as soon as `wanted` nodes are connected, and raise a FedhetError if there are more. Otherwise,
    wait at least `patience` seconds, so that more than `wanted` nodes can connect.
    """
    started = time.monotonic()
    while True:
        count = len(list(grid.get_node_ids()))
        waited = time.monotonic() - started
        if waited >= max(patience, GRACE) or (count >= wanted and (exact or waited >= patience)):
            break
        time.sleep(0.1)
    if exact and count != wanted:
        raise ConfigError(
            f"clients = {wanted}, but {count} nodes are connected: remove the key clients, start {wanted} nodes (in "
            "a simulation: num-supernodes), or wait longer for them (wait-for-clients, in seconds)"
        )
    if count < wanted:
        raise FedhetError(
            f"only {count} nodes are connected, and {wanted} are needed: start more nodes, or lower min-clients (or "
            "the strategy's min_available_nodes)"
        )
