"""A server half that talks with its clients: it greets them, sends, waits, and checks what comes back."""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedhet import config as configuration
from fedhet.errors import FedhetError
from fedhet.flower import Encoder, name_in, read_reply
from fedhet.flower import settings as flower_settings
from fedhet.machine import proof
from fedhet.server import exchanges
from fedhet.server.aggregation import given
from fedhet.server.half import P, S, ServerHalf
from fedhet.server.robust import Rule, put_together
from fedhet.server.roster import agree_on_pool, most_alike_first
from fedhet.server.unseen import comes_last
from fedhet.state import ClientRecord
from fedhet.wire import Arrays, Payload, Reply, Request, Spec, check_finite
from fedhet.wire.protocol import FIRST, GREET, JOIN, with_pool

log = logging.getLogger("flwr").getChild("fedhet")


class Conversation(ServerHalf[P, S]):
    """What all methods' talks with clients have in common."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._grid: Grid | None = None
        self._initial: Arrays = {}  # shared values that the caller gave, until it is known what is shared
        self._notes: set[str] = set()
        self._own_loop = False  # else the loop is Flower's, or that of one of its wrappers
        self._further: dict[str, Any] = {}  # what Flower's loop wants its clients to be told

    # ---- what methods ask of it

    def ask(self, question: str, payloads: Mapping[str, Payload]) -> dict[str, Reply]:
        """Ask clients a question of the method's own, an exchange of its own within a round.

        Returns:
            The valid answers, in order of client name; a client without one counts as failed in this round.
        """
        messages = self._messages(MessageType.QUERY, payloads, question=question)
        return self._valid(self._send(messages), payloads)

    def refuse(self, client: str, reason: str) -> None:
        """Leave a valid reply out of this round after all: it is a failure of that client, with the reason."""
        self._round.fail(client, reason)

    def _made_for(
        self, clients: Sequence[str], make: Callable[[Sequence[str]], dict[str, Payload]]
    ) -> dict[str, Payload]:
        """What a hook makes for clients; one for whom alone it raises what nobody raises on purpose is left out.

        Raises:
            FedhetError: the hook raised it, or it raises for each of several or for none alone, which is none's fault.
        """
        before = self.state.aside()
        try:
            return make(clients)
        except FedhetError:
            raise
        except Exception as error:
            whole = error
        faults, spoilt = exchanges.Faults(), dict[str, str]()
        for client in clients:
            self.state = before.aside()
            try:
                make([client])
            except Exception as error:
                spoilt[client] = faults.reason(client, error, "what it told of itself")
        self.state = before
        with self._guarded(self._round.number, f"make what clients {', '.join(clients)} receive"):
            if not spoilt or 1 < len(spoilt) == len(clients):
                raise whole
            for client, reason in spoilt.items():
                self.refuse(client, reason)
            return make([client for client in clients if client not in spoilt])

    @contextmanager
    def _guarded(self, round: int, doing: str) -> Iterator[None]:
        """What a method's hooks raise of valid replies is no client's fault, and ends the run.

        Raises:
            FedhetError: what failed, and where the run can go on.
        """
        try:
            yield
        except FedhetError:
            raise
        except Exception as error:
            raise FedhetError(
                f"round {round}: {self.name} failed to {doing} ({type(error).__name__}: {error}); the last state that "
                f"was saved is that after round {round - 1}, the last complete one, from which a resumed run goes on"
            ) from error

    # ---- clients

    def _greet(self, grid: Grid, *, unseen_clients: bool = False) -> None:
        """Learn who is there: ask those that are new for their names and what they have.

        Those that are to come after the last round wait until it is time for `unseen_clients`.
        """
        if new := self.roster.not_greeted(grid, unseen_clients=unseen_clients):
            self._admit_nodes(new, unseen_clients=unseen_clients)
        if not self.roster.nodes:
            nobody = (
                "there are no nodes" if not self.roster.waiting else "all come after the last round (unseen-clients)"
            )
            raise FedhetError(f"no client can serve:\n{self._round.reasons() or f'  {nobody}'}")
        if len(self.roster.nodes) == 1 and self.roster.refused and self.shares:
            (left,) = self.roster.nodes
            raise FedhetError(
                f"refusals leave {self.name} with client {left} alone, who has nobody to share with:\n"
                f"{self._round.reasons()}"
            )

    def _admit_nodes(self, new: Sequence[int], *, unseen_clients: bool) -> None:
        pool = self.public_dataset()
        greeting = Payload() if pool is None else with_pool(pool)
        encoder, request = Encoder(), self._request(question=GREET)
        make = partial(exchanges.message, config=self.config, round=self._round, further=self._further)
        messages = [make(MessageType.QUERY, node, encoder(greeting), request) for node in new]
        came = exchanges.by_node(self._send(messages), self._round, self.roster, self.config.timeout)
        faults, opened, contested = exchanges.Faults(), dict[int, tuple[Hashable, Reply]](), dict[int, str]()

        def refused(node: int, name: str, error: Exception, *, again: bool = False) -> None:
            if not again:
                self.roster.refused[node] = ""
            who = name if name and name not in self.roster.nodes else f"at node {node}"
            self._round.fail(who, faults.reason(who, error))

        for node, message in came:
            try:
                reply = read_reply(message)
                if not unseen_clients and comes_last(reply.report, self.config.unseen_clients):
                    self.roster.waiting.add(node)
                    continue
                kind = self.compatibility(reply)
                hash(kind)
                opened[node] = kind, reply
            except Exception as error:  # whatever one client's reply raises is that client's refusal
                refused(node, name_in(message), error, again=message.has_error())  # one that only failed is asked again
        for node, others in self.roster.rivals({node: reply.client for node, (_, reply) in opened.items()}).items():
            name = opened.pop(node)[1].client
            self._round.fail(f"at node {node}", self.roster.contest(name, others))
            contested[node] = name
        self.roster.refused |= contested
        for node in most_alike_first(opened, averaged=self.traits.shares.averaged and self.traits.networks != "widths"):
            reply = opened[node][1]
            try:
                self._admit(node, reply, joining=unseen_clients)
            except Exception as error:
                refused(node, reply.client, error)
                continue
            self._round.down[reply.client] += greeting.nbytes
            self._round.up[reply.client] += reply.payload.nbytes
        if not self.roster.nodes:
            faults.blame_nobody()

    def _admit(self, node: int, reply: Reply, *, joining: bool) -> None:
        report, traits, known = reply.report, self.traits, self.state.clients
        for name, group in reply.arrays.items():
            check_finite(group, f"its {name[:100]}")
        self.roster.check(self.name, reply, networks=traits.networks, averaged=traits.shares.averaged)
        before = self.state.aside()
        try:
            if report.client not in known:
                if traits.pool != "none":
                    agree_on_pool(self.state, reply, self.public_dataset(), labelled=traits.pool == "labelled")
                self.admit(reply)
            if traits.shares.averaged and not joining:
                self._make_first_arrays(report.spec)
        except Exception:  # one that is refused settles nothing for the others
            self.state = before
            raise
        if report.client not in known:
            known[report.client] = ClientRecord(reply.examples, report.architecture, partition=report.partition)
        elif known[report.client].examples != reply.examples:
            log.warning(
                "client %s has %d training examples now, and had %d before",
                *(report.client, reply.examples, known[report.client].examples),
            )
            known[report.client].examples = reply.examples
        self.roster.admit(reply, node)
        self.metric, self.own_data = report.metric, self.own_data or report.own_data
        self.outputs = max(self.outputs, report.outputs)
        if report.device not in self.devices:
            self.devices.append(report.device)
        if report.note and report.note not in self._notes:
            self._notes.add(report.note)
            log.warning("client %s: %s", report.client, report.note)

    def _make_first_arrays(self, spec: Spec) -> None:
        """What one client shares and nobody has given yet, where the server makes it."""
        missing = {key: each for key, each in spec.items() if key not in self.state.model | self._initial}
        if missing and (made := self.first_arrays(missing)) is not None:
            self.state.model = self.state.model | made

    def _ready(self) -> None:
        """What depends on the clients that are there: what is shared before the first round, and how many rounds."""
        if self.traits.shares.averaged:
            shared = {key: spec for client in self.present for key, spec in self.specs[client].items()}
            if self._initial:
                self.state.model = self.state.model | given(self._initial, shared, tell=not self.state.round)
                self._initial = {}
            if shared.keys() - self.state.model.keys() and self.traits.together and self.config.shared_init:
                self._fetch_first_arrays()
        if (rounds := self.number_of_rounds()) != self.config.rounds:
            self._override({"rounds": rounds})

    def _fetch_first_arrays(self) -> None:
        """What is shared starts as the initial weights of the first client that has it.

        Where Byzantine clients are reckoned with (`aggregation`, `clip-norm`) all are asked, and Krum chooses.
        """
        if not self.rule.plain:
            owners = [client for client in self.present if self.specs[client].keys() - self.state.model.keys()]
            question = self._messages(MessageType.QUERY, dict.fromkeys(owners, Payload()), question=FIRST)
            told = {c: reply.arrays.get("model", {}) for c, reply in self._valid(self._send(question)).items()}
            rule = Rule("krum", self.config.byzantine)
            first, _ = put_together(told, dict.fromkeys(told, 1.0), self.specs, {}, rule)
            self.state.model = first | self.state.model
        for client in self.present:  # all would give the same: they are drawn from the seed, not from the client
            if self.specs[client].keys() <= self.state.model.keys():
                continue
            question = self._messages(MessageType.QUERY, {client: Payload()}, question=FIRST)
            answer = self._valid(self._send(question)).get(client)
            if answer is not None and "model" in answer.arrays:
                first = {key: array.astype(self.specs[client][key][1]) for key, array in answer.arrays["model"].items()}
                self.state.model = first | self.state.model
        if not self.state.model:
            raise FedhetError(f"no client gave the first weights:\n{self._round.reasons()}")

    def _meet_unseen_clients(self, grid: Grid) -> dict[str, Reply]:
        """Let those in that come after the last round; what they measured, of whom there is something to give."""
        known = set(self.present)
        self._greet(grid, unseen_clients=True)
        new = [client for client in self.present if client not in known]
        payloads = self._made_for(new, partial(self.evaluation_payloads, amid_training=False))
        if not self.traits.alone:
            for client in [client for client, payload in payloads.items() if not payload.arrays]:
                del payloads[client]
                self._round.fail(client, f"{self.name} has nothing to give it: nobody who trained had layers like its")
        self._round.joining = frozenset(payloads)
        messages = self._messages(MessageType.QUERY, payloads, question=JOIN)
        return self._valid(self._send(messages)) if messages else {}

    # ---- messages

    def _request(self, **asked: Any) -> Request:
        round, state = self._round, self.state
        own: dict[str, Any] = {"closing": round.closing, "final": round.final, "here": proof(self.config.text())}
        own["flower"] = not self._own_loop
        return Request(round.number, run=state.run, pool=state.pool, **own, **asked)

    def _messages(self, kind: str, payloads: Mapping[str, Payload], **asked: Any) -> list[Message]:
        request = self._request(**asked)
        return exchanges.messages(
            kind,
            payloads,
            request,
            config=self.config,
            roster=self.roster,
            state=self.state,
            round=self._round,
            further=self._further,
        )

    def _send(self, messages: Iterable[Message]) -> Iterable[Message]:
        assert self._grid is not None, "a strategy talks to its clients only after start or configure_train"
        return exchanges.send(self._grid, messages, self.config.timeout, one_by_one=self.takes_in)

    def _valid(
        self, replies: Iterable[Message], worked: Iterable[str] = (), *, check: exchanges.Checked | None = None
    ) -> dict[str, Reply]:
        """The valid replies; of clients that `worked`, the method's own arrays are checked too, and taken in."""
        check = check or self.check_reply

        def own(reply: Reply) -> None:
            check(reply)
            if self.takes_in and reply.client in self._round.training:
                self.take_in(self._round.number, reply)

        return exchanges.valid(
            replies, config=self.config, roster=self.roster, round=self._round, own=dict.fromkeys(worked, own)
        )

    # ---- the configuration

    def _take(self, settings: Mapping[str, Any]) -> None:
        """What Flower calls a configuration: keys of ours change the run's, others are for mods around the clients."""
        known, self._further = flower_settings.split(settings, self.config)
        flat = self.config.flat()
        self._override({key: value for key, value in known.items() if flat[key] != value})

    def _override(self, settings: Mapping[str, Any]) -> None:
        if settings:
            chosen = {key: value for key, value in self.config.flat().items() if value != ""}
            changed = configuration.resolve({**chosen, **settings}, strict=False)
            self.config = changed.but(chosen=self.config.chosen, idle=self.config.idle)
