"""The handshake: it admits clients, and initialises the arrays that clients share."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from fedhet.config.flower_names import FlowerOptions
from fedhet.config.toml import toml_value
from fedhet.config.validation import effective, is_complete
from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import Encoder, MessageType, name_in, read_reply
from fedhet.flower.insides import simulated
from fedhet.messages import Arrays, Payload, Reply, Report, Spec, bytes_of, check, check_finite, check_room, narrowed
from fedhet.messages.protocol import FIRST, HANDSHAKE, with_public_dataset
from fedhet.methods.keys import OwnPart
from fedhet.results.state import ClientRecord
from fedhet.server.aggregation import average_shared, is_plain
from fedhet.server.federation import Federation, reason_of
from fedhet.server.roster import Common, agree, agree_on_public_dataset, most_alike_first, with_remedy
from fedhet.server.run import Run
from fedhet.utils.files import state_folder
from fedhet.utils.text import log

NOBODY = "no client can serve:"
"""The first line of an error, above the reasons."""

TELL = 30.0
"""Seconds between reports of a handshake's progress."""

UNSEEN = 2**26
"""Bytes of the largest network that the server makes from a client's claim; a client must send a larger one first."""


@dataclass(frozen=True)
class Admission:
    """The hooks of a method that the handshake calls, and the method's `copies` (see `fedhet.server.round.Hooks`)."""

    public_dataset: Callable[[], PublicDataset | None]
    compatibility: Callable[[Reply], Hashable]
    common: Callable[[Reply], Mapping[str, Common]]
    admit: Callable[[Reply], None]
    first_arrays: Callable[[Spec], Arrays | None]
    first_model: Callable[[Reply], Arrays]
    copies: int


class Handshake:
    """Asks new nodes for a description of their client (`Report`), and admits clients that the method accepts."""

    def __init__(self, run: Run, federation: Federation, hooks: Admission) -> None:
        self.run, self.federation, self.hooks = run, federation, hooks
        self._own: set[OwnPart] = {"data", "model"} if self.run.model else {"data"}  # that all clients have

    def admit(self, *, unseen: bool = False) -> None:
        """Admit new nodes as clients; with `unseen`, also the unseen clients, which join after the last round.

        Raises a FedhetError with all reasons if no client can take part, or if only one is left after refusals.
        """
        roster, round = self.federation.roster, self.run.round
        assert self.federation.grid is not None
        if simulated(self.federation.grid):
            # The folder shows another machine of a Ray cluster that it shares the path.
            state_folder(self.run.config.state_dir, self.run.state.run).mkdir(parents=True, exist_ok=True)
        if new := roster.new_nodes(self.federation.grid, unseen_clients=unseen):
            self._ask(new, unseen=unseen)
        if not roster.nodes:
            why = "all join after the last round (unseen-clients)" if roster.waiting else "there are no nodes"
            raise FedhetError(f"{NOBODY}\n{round.reasons(why)}")
        self._check_settings()
        if len(roster.nodes) == 1 and roster.refused and self.run.traits.communicates:
            (left,) = roster.nodes
            raise FedhetError(
                f"only client {left} is left after refusals, and {self.run.method.name} needs at least two clients:\n"
                f"{with_remedy(round.reasons())}"
            )

    def _check_settings(self) -> None:
        """Apply `train_config`; raise a ConfigError if keys have no effect because clients have their own data."""
        known = self.federation.roster.known.values()
        if not self.run.trains_clients and any(not reply.report.wrapped for reply in known):
            self.run.trains_clients = True
            self.run.apply_train_config()
        config = self.run.config
        chosen = {key for key in config.chosen if not key.startswith("public-")}  # the server may have its own
        if is_complete(config.chosen):
            return
        effective(config, self.run.traits, chosen, self._own)
        statistics = any(reply.report.normalised for reply in known)
        if "batch-norm" in chosen and config.batch_norm != "aggregate" and not statistics:
            raise ConfigError(
                f"batch-norm = {config.batch_norm} has no effect, since no client's network has running statistics, as "
                "BatchNorm has: leave it out"
            )

    # ---- admission

    def _ask(self, new: Sequence[int], *, unseen: bool) -> None:
        """Ask nodes for a `Report` and admit those that can take part; if reports differ, the majority is admitted."""
        run, federation, roster, round = self.run, self.federation, self.federation.roster, self.run.round
        public, encoder = self.hooks.public_dataset(), Encoder()
        payload = Payload() if public is None else with_public_dataset(public)
        request = federation.request(question=HANDSHAKE, begun=bool(run.state.clients))
        messages = [federation.message(MessageType.QUERY, node, encoder(payload), request) for node in new]
        opened: dict[int, tuple[Hashable, Reply]] = {}
        started = told = time.monotonic()

        def refuse(node: int, name: str, error: Exception, *, again: bool = False) -> None:
            if not again:
                roster.refused[node] = ""
            who = name if name and name not in roster.nodes else f"at node {node}"
            round.fail(who, reason_of(who, error))

        answers = federation.by_node(federation.send(messages))
        for number, (node, message) in enumerate(answers, 1):
            if (now := time.monotonic()) - told > TELL:
                log.info("%d of %d clients have answered after %.0f s", number, len(new), now - started)
                told = now
            try:
                reply = read_reply(message)
                if not unseen and _comes_last(reply.report, run.config.unseen_clients):
                    roster.waiting.add(node)
                    continue
                kind = self.hooks.compatibility(reply)
                hash(kind)
                opened[node] = kind, reply
            except Exception as error:  # any exception while reading a reply refuses this client
                passing = message.has_error() or (isinstance(error, FedhetError) and error.may_pass)
                refuse(node, name_in(message), error, again=passing)
        for node, others in roster.rivals({node: reply.client for node, (_, reply) in opened.items()}).items():
            roster.refused[node] = opened.pop(node)[1].client
            round.fail(f"at node {node}", roster.contest(roster.refused[node], others))
        one_shape = run.traits.alike not in ("widths", "parts")
        for node in most_alike_first(opened, averaged=run.traits.shares.averaged, one_shape=one_shape):
            reply = opened[node][1]
            try:
                self._check_size(node, reply)
                self._admit(node, reply, joining=unseen)
            except Exception as error:
                refuse(node, reply.client, error)
            else:
                round.down[reply.client] += payload.nbytes
                round.up[reply.client] += reply.payload.nbytes
        roster.sort()

    def _check_size(self, node: int, reply: Reply) -> None:
        """Check that the server has memory for a client's network, and have the client send a large network."""
        run, spec = self.run, reply.report.spec
        check_room(self.hooks.copies * bytes_of(spec), "the server needs memory for the client's network:")
        if not self.hooks.copies or bytes_of(spec) <= UNSEEN:
            return
        federation, request = self.federation, self.federation.request(question=FIRST)
        messages = [federation.message(MessageType.QUERY, node, Encoder()(Payload()), request)]
        for _, message in federation.by_node(federation.send(messages)):
            sent = read_reply(message)
            check(sent.arrays.get("model", {}), narrowed(spec, run.config.wire_dtype), "the client's network")
            run.round.up[reply.client] += sent.payload.nbytes
            return
        raise FedhetError("the client did not send its network, which is needed for its admission: see its log")

    def _admit(self, node: int, reply: Reply, *, joining: bool) -> None:
        run, report, roster = self.run, reply.report, self.federation.roster
        for name, group in reply.arrays.items():
            check_finite(group, f"the client's {name[:100]}")
        if (weight := run.flower_options.weighted_by_key) != FlowerOptions.weighted_by_key and not report.wrapped:
            raise FedhetError(
                f"weighted_by_key = {weight!r} names a metric of a client's own train function, "
                "and this client trains with fedhet's loop: leave it out, or wrap the client's app with fedhet.wrap"
            )
        roster.check(run.method.name, reply, networks=run.traits.alike, averaged=run.traits.shares.averaged)
        if not report.common_test and run.config.test_on != "local":
            self._test_on_own_parts()
        before = run.state.aside()
        try:
            self._agree(reply, joining=joining)
        except Exception:  # a refused client changes nothing for the others
            run.state = before
            raise
        known = run.state.clients.setdefault(
            report.client, ClientRecord(reply.examples, report.architecture, partition=report.partition)
        )
        known.examples = reply.examples
        roster.admit(reply, node)
        run.metric, run.own_data = report.metric, run.own_data or report.own_data
        if not report.own_data:
            self._own.discard("data")
        run.noise[report.client] = report.noise
        if report.device not in run.devices:
            run.devices.append(report.device)
        if report.note:
            run.warn_once(report.note, [report.client])

    def _agree(self, reply: Reply, *, joining: bool) -> None:
        """Let the method admit a client and, unless it is `joining` after the last round, draw initial arrays."""
        state, traits, spec = self.run.state, self.run.traits, reply.report.spec
        remedy = "return the same examples as `common` for all clients, or leave it out"
        brought = {"common test set": Common(reply.report.common, remedy)} if reply.report.common else {}
        state.common = agree(state.common, {**self.hooks.common(reply), **brought})
        if reply.client not in state.clients:
            if traits.public != "none":
                public, labelled = self.hooks.public_dataset(), traits.public == "labelled"
                suited = self.run.config.options.suited(own_models=False, unlabelled=labelled)
                lines = [f"{self.run.method.family}.{key} = {toml_value(value)}" for key, (value, _) in suited.items()]
                agree_on_public_dataset(state, reply, public, labelled=labelled, without_labels=", ".join(lines))
            self.hooks.admit(reply)
        if traits.shares.averaged and not joining:
            missing = {key: each for key, each in spec.items() if key not in state.model | self.run.initial}
            if missing and (first := self.hooks.first_arrays(missing)) is not None:
                state.model = state.model | first

    def _test_on_own_parts(self) -> None:
        """Evaluate on clients' own test parts only, if a client has no common test set; raise if `test-on` is set."""
        run = self.run
        if "test-on" in run.config.chosen:
            raise FedhetError(
                f"test-on = {run.config.test_on} needs a common test set: return it as `common` from the data "
                "function, or set test-on = local"
            )
        run.config = run.config.on_own_test_parts()
        log.info("%s", run.config.remarks[-1][1])

    # ---- what is shared before the first round

    def settle(self) -> None:
        """Initialise the shared arrays, which depend on the clients that are connected."""
        run, state = self.run, self.run.state
        if run.traits.shares.averaged:
            shared = {key for client in self.federation.present for key in self.federation.specs[client]}
            unknown = sorted(run.initial.keys() - shared)
            if unknown and not state.round:
                log.warning("initial arrays that no client shares are ignored: %s", ", ".join(unknown[:3]))
            if run.initial:
                state.model = state.model | {key: array for key, array in run.initial.items() if key in shared}
                run.initial = {}
            if shared - state.model.keys() and run.traits.common_init and run.config.shared_init:
                self._fetch_first_arrays()

    def _fetch_first_arrays(self) -> None:
        """Initialise shared arrays with the initial weights of the first client that has them.

        With a robust rule or clipping (`aggregation`, `clip-norm`), all clients are asked, and Krum selects among them.
        """
        state, specs = self.run.state, self.federation.specs
        if not is_plain(self.run.config):
            sent = self._first([c for c in self.federation.present if specs[c].keys() - state.model.keys()])
            equal = dict.fromkeys(sent, 1.0)
            wholes = {c: {key: (a.shape, specs[c][key][1]) for key, a in model.items()} for c, model in sent.items()}
            state.model = average_shared(sent, equal, wholes, "krum", self.run.config.byzantine) | state.model
        for client in self.federation.present:  # all would send the same, drawn from the seed
            if specs[client].keys() <= state.model.keys():
                continue
            model = self._first([client]).get(client, {})
            state.model = {key: array.astype(specs[client][key][1]) for key, array in model.items()} | state.model
        if not state.model:
            raise FedhetError(f"no client sent its initial weights:\n{self.run.round.reasons()}")

    def _first(self, clients: Sequence[str]) -> dict[str, Arrays]:
        models: dict[str, Arrays] = {}

        def keep(reply: Reply) -> None:
            models[reply.client] = self.hooks.first_model(reply)

        self.federation.ask(FIRST, dict.fromkeys(clients, Payload()), keep)
        return {client: models[client] for client in clients if client in models}


def _comes_last(report: Report, count: int) -> bool:
    if not count:
        return False
    if report.partition is None:
        raise FedhetError(
            f"unseen-clients = {count} selects the last partitions, and the client's node reports no partition: set "
            "partition-id and num-partitions in its node config"
        )
    partition, partitions = report.partition
    return partition >= partitions - count
