"""The handshake, which admits clients whose networks and data the method can combine."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fedhet.config.flower_names import FlowerOptions, for_training
from fedhet.config.validation import effective
from fedhet.data.names import CLASSES, alike, merged, permuted, plain, shown, unlike
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import Grid
from fedhet.flower.insides import check_cluster_of, simulated
from fedhet.flower.messages import name_in
from fedhet.messages import Arrays, Payload, Reply, Spec, check, check_finite, check_room
from fedhet.messages.payload import bytes_of, difference
from fedhet.messages.protocol import FIRST, HANDSHAKE, MOST_NAMES, counts_in, names_in, names_text, with_public_dataset
from fedhet.methods import registry
from fedhet.methods.options import OF_NETWORKS, Config, OwnPart
from fedhet.methods.sharing import HEAD
from fedhet.models.registry import expand
from fedhet.results.state import ClientRecord
from fedhet.server.claims import before, check_claims, difference_of_scales
from fedhet.server.federation import Federation, await_nodes, reason_of
from fedhet.server.run import Round, Run, named, no_union
from fedhet.utils.files import state_folder
from fedhet.utils.statistics import client_order, in_order
from fedhet.utils.text import log

NOBODY = "no client can take part:"
"""First line of an error message, followed by the reasons why clients were refused."""


class Common(NamedTuple):
    """A value that must be equal for all clients of a run; `remedy` is advice for a client with another value."""

    value: int | str
    remedy: str


Claims = list[tuple[str, Hashable]]  # names and values of properties in which clients must agree, such as the task

UNSEEN = 2**26  # bytes of a network's arrays above which the client must send them before the server builds copies


@dataclass
class Handshake:
    """The admission of clients, which uses the description (`Report`) that a new node sends of its client.

    `common`, `accept` and `first_arrays` are hooks of the method, and `copies` is the number of copies of each client's
    network that the server has in memory (see `FederatedStrategy`).
    """

    run: Run
    federation: Federation
    common: Callable[[Reply], Mapping[str, Common]]
    accept: Callable[[Reply], None]
    first_arrays: Callable[[Spec], Arrays | None]
    copies: int
    _refused: set[int] = field(default_factory=set)  # nodes whose client cannot take part
    _waiting: set[int] = field(default_factory=set)  # nodes of unseen clients

    def begin(self, grid: Grid) -> None:
        """Wait for clients, and admit those that can take part; raise a FedhetError if there are too few."""
        check_cluster_of(grid)
        run = self.run
        federation = self.federation
        exact = "clients" in run.config.chosen
        options = run.flower_options
        nodes = options.min_train_nodes, options.min_evaluate_nodes, options.min_available_nodes
        least = max(run.config.min_clients, *nodes)
        wanted = run.config.clients if exact else least
        await_nodes(grid, wanted, exact=exact, patience=run.config.wait_for_clients)
        federation.grid = grid
        run.round = Round()
        self.admit()
        present = federation.nodes
        if len(present) < least:
            raise FedhetError(
                f"only {len(present)} clients can take part, but {least} are needed; start more clients or lower "
                f"min-clients:\n{run.round.reasons('no further node connected')}"
            )
        gone = [client for client in run.state.clients if client not in present]
        if gone and federation.simulated:
            raise FedhetError(
                f"the run cannot continue without {named(gone)}, which took part before; remove the causes:\n"
                f"{run.round.reasons('no such node')}"
            )

    def admit(self, *, unseen: bool = False) -> bool:
        """Admit new nodes as clients, and return whether there were any.

        With `unseen`, the unseen clients are admitted, too, which join after the last round. Raises a FedhetError with
        the reasons of refusals if they leave no client, or, before training, one to a method that needs two.
        """
        federation = self.federation
        assert federation.grid is not None
        if simulated(federation.grid):  # the folder shows another machine of a Ray cluster that it shares the path
            state_folder(self.run.config.state_dir, self.run.state.run).mkdir(parents=True, exist_ok=True)
        present = set(federation.grid.get_node_ids())
        federation.nodes = {client: node for client, node in federation.nodes.items() if node in present}
        self._refused &= present
        self._waiting = set() if unseen else self._waiting & present
        new = present - {*federation.nodes.values()} - self._refused - self._waiting
        if new:
            self._ask(sorted(new), unseen=unseen)
        if not federation.nodes:
            reason = "all join after the last round (unseen-clients)" if self._waiting else "there are no nodes"
            raise FedhetError(f"{NOBODY}\n{self.run.round.reasons(reason)}")
        if new:
            self.check_settings()
        if len(federation.nodes) == 1 and self._refused and self.run.traits.communicates and not unseen:
            (left,) = federation.nodes
            raise FedhetError(
                f"only client {left} was admitted, and {self.run.method.name} needs at least two clients; correct the "
                f"others:\n{self.run.round.reasons()}"
            )
        return bool(new)

    def check_settings(self) -> None:
        """Set keys in `train_config`, such as `lr`; raise a ConfigError if a key that the user set has no effect."""
        reports = [reply.report for reply in self.federation.known.values()]
        if not all(report.wrapped for report in reports):
            known = self.run.config.flat()
            ours = for_training(self.run.train_config, known)
            self.run.override({key: value for key, value in ours.items() if known[key] != value})
        config = self.run.config
        by_hand = {key: origin for key, origin in config.origins.items() if origin != "run"}
        checked = {key: origin for key, origin in by_hand.items() if not key.startswith("public-")}  # the server has it
        supplied: set[OwnPart] = {"data"} if all(report.own_data for report in reports) else set()
        supplied |= {"split"} if all(report.own_split for report in reports) else set()
        supplied |= {"model"} if self.run.model else set()
        effective(config.replace(origins=checked), self.run.traits, supplied)
        networks = {report.architecture for report in reports}  # "" if undisclosed
        own = networks.isdisjoint(["", *expand(config.architectures)])
        self.run.replaced = supplied | {"model"} if own else supplied
        by_user = {key for key, origin in by_hand.items() if origin != "preset"}
        if "batch-norm" in by_user and not any(report.normalised for report in reports):
            raise ConfigError(
                "batch-norm has no effect: no client's network has running statistics, as BatchNorm has; leave it out"
            )
        if all(report.fitted for report in reports) and (unused := sorted(by_user & {*OF_NETWORKS})):
            self.run.warn_once(
                f"{', '.join(unused)}: without effect, since all clients have estimators; set the estimators' own "
                "arguments in the model function"
            )

    def _ask(self, new: Sequence[int], *, unseen: bool) -> None:
        """Ask the nodes `new` (node ids) for a `Report`, and admit those that can take part.

        A client must agree with admitted ones in its task, test set, public dataset and shared arrays. Clients from
        earlier rounds come first, then those with the most frequent values. A node that sends an admitted client's
        name gets it only if the client's node no longer replies. `unseen` admits those that join after the last round.
        """
        run = self.run
        federation = self.federation
        public = self.run.public
        if not run.state.names:
            run.state.names = names_text({**before(run.config, "names"), **(public.names if public else {})})
        opened = self._opened(new, unseen=unseen)
        claimed = federation.nodes.keys() & {reply.client for _, reply in opened.values()}
        again = self._opened([federation.nodes.pop(name) for name in in_order(claimed)], unseen=unseen)
        opened = self._in_one_order(again | opened, unseen=unseen)
        # Numbers of nodes are random on Ray and in a deployment.
        in_turn = sorted(opened, key=lambda node: client_order(opened[node][1].client))
        order = most_alike_first({node: opened[node][0] for node in in_turn})
        earlier = {node: federation.earlier_name(node, opened[node][1].client) for node in order}
        for node in sorted(order, key=lambda node: (not earlier[node], node not in again)):
            reply = opened[node][1]
            try:
                self._check_size(node, reply)
                self._admit(node, reply, joining=unseen)
            except Exception as error:
                self._refuse(node, reply.client, error)
        federation.nodes = {client: federation.nodes[client] for client in in_order(federation.nodes)}
        if difference := difference_of_scales(run):
            run.warn_once(difference)

    def _opened(self, nodes: Iterable[int], *, unseen: bool) -> dict[int, tuple[Claims, Reply]]:
        """Ask nodes for a `Report`; return, by node id, properties in which clients must agree, and the reply.

        Nodes receive the server's public dataset, if any. Without `unseen`, unseen clients are left out.
        """
        public = self.run.public
        payload = Payload() if public is None else with_public_dataset(public)
        opened: dict[int, tuple[Claims, Reply]] = {}
        for node, message in self.federation.query(nodes, HANDSHAKE, payload, begun=bool(self.run.state.clients)):
            try:
                reply = self.federation.read(node, message)
                if not unseen and _comes_last(reply, self.run.config.unseen_clients):
                    self._waiting.add(node)
                    continue
                opened[node] = self._claims(reply), reply
            except Exception as error:  # any exception while reading a reply refuses this client
                passing = message.has_error() or (isinstance(error, FedhetError) and error.may_pass)
                self._refuse(node, name_in(message), error, again=passing)
        return opened

    def _in_one_order(
        self, opened: dict[int, tuple[Claims, Reply]], *, unseen: bool
    ) -> dict[int, tuple[Claims, Reply]]:
        """Choose an order of classes and columns, the most frequent; ask clients with another order again, with it."""
        in_turn = sorted(opened, key=lambda node: client_order(opened[node][1].client))
        listed = {node: names_in(opened[node][1].report.names) for node in in_turn}
        votes = Counter(item for names in listed.values() for item in names.items()).most_common()
        for (kind, order), _ in sorted(votes, key=lambda vote: plain(vote[0][1])):
            if kind not in names_in(self.run.state.names):
                self._note_names(kind, order)
        chosen = names_in(self.run.state.names)
        for kind, order in chosen.items():
            lacking = [opened[node][1].client for node, names in listed.items() if plain(names.get(kind, ()))]
            if lacking and self.run.traits.compares(kind) and not plain(order):
                clients = named(lacking, len(lacking))
                self.run.warn_once(f"{clients}: give names to the {kind}, or check that their order is {shown(order)}")
        others = [n for n, names in listed.items() if any(permuted(names.get(k, chosen[k]), chosen[k]) for k in chosen)]
        return {n: one for n, one in opened.items() if n not in others} | self._opened(others, unseen=unseen)

    def _note_names(self, kind: str, names: tuple[str, ...]) -> None:
        text = names_text({**names_in(self.run.state.names), kind: names})
        if len(text) <= MOST_NAMES:  # else no request could have them
            self.run.state.names = text

    def _refuse(self, node: int, name: str, error: Exception, *, again: bool = False) -> None:
        if not again:
            self._refused.add(node)
        who = name if name and name not in self.federation.nodes else f"at node {node}"
        self.run.round.fail(who, reason_of(who, error))

    def _common(self, reply: Reply) -> dict[str, Common]:
        report = reply.report
        traits = self.run.traits
        task = report.metric if report.labels == 1 else f"{report.metric} of {report.labels} labels"
        if report.further:
            task += f", and {self.run.config.metrics} of {report.further} labels"
        remedy = (
            "all clients of a run need the same task (set it with task=) and, for this metric, the same number of "
            "classes; an estimator has those of the labels or of a pandas.Categorical"
        )
        common = {"task": Common(task, remedy)}
        if report.common:
            remedy = "return the same examples as `common` for all clients, or leave it out"
            common["common test set"] = Common(report.common, remedy)
        if report.public and traits.public != "none" and self.run.public is None:
            common["digest of the public dataset"] = Common(
                report.public, "give all clients the same examples in the same order"
            )
        return common | dict(self.common(reply))

    def _claims(self, reply: Reply) -> Claims:
        traits = self.run.traits
        spec = reply.report.spec
        claims: Claims = [*self._common(reply).items(), ("lacks common", self._lacks_common_test(reply))]
        free = reply.report.free.split(",")
        claims += [(kind, names) for kind, names in names_in(reply.report.names).items() if kind not in free]
        if traits.networks == "equal":
            return [*claims, ("network", tuple(spec.items()))]
        arrays = spec.items() if traits.shares.averaged else ()
        return claims + [(f"array {key}", (self._one_shape and shape, dtype)) for key, (shape, dtype) in arrays]

    @property
    def _one_shape(self) -> bool:
        """Whether each shared array must have one shape at all clients; otherwise only its dtype must be equal."""
        return self.run.traits.networks not in ("widths", "parts")

    def _lacks_common_test(self, reply: Reply) -> bool:
        return self.run.config.test_on != "local" and not reply.report.common_test

    def _check_size(self, node: int, reply: Reply) -> None:
        """Check that the server has memory for a client's network and, if it is large, that the client can send it."""
        spec = reply.report.spec
        check_room(self.copies * bytes_of(spec), "the server needs memory for the client's network:")
        if not self.copies or bytes_of(spec) <= UNSEEN:
            return
        for _, message in self.federation.query([node], FIRST, Payload()):
            sent = self.federation.read(node, message)
            check(sent.arrays.get("model", {}), spec, "the client's network")
            return
        raise FedhetError(f"client {reply.client} did not send its network as the server asked: see the client's log")

    def _admit(self, node: int, reply: Reply, *, joining: bool) -> None:
        run = self.run
        report = reply.report
        claimed = reply.client
        report.client = self.federation.name_for(node, claimed)
        for name, group in reply.arrays.items():
            check_finite(group, f"the client's {name[:100]}")
        if (weight := run.flower_options.weighted_by_key) != FlowerOptions.weighted_by_key and not report.wrapped:
            raise FedhetError(
                f"weighted_by_key = {weight!r} names a metric of a client's own train function, but this client trains "
                "with fedhet's loop: leave weighted_by_key out, or use fedhet.wrap for the client's app"
            )
        check_claims(run.config, reply)
        self._check_network(report.spec)
        before = run.state.aside()
        try:
            self._agree(reply, joining=joining)
            if self._lacks_common_test(reply):
                self._test_on_own_parts()
        except Exception:  # a refused client changes nothing for the others
            run.state = before
            raise
        kept = 0 if self.federation.simulated else node
        record = run.state.clients.setdefault(
            report.client, ClientRecord(reply.examples, report.architecture, partition=report.partition, node=kept)
        )
        record.examples = reply.examples
        record.scales = report.scales
        self.federation.admit(node, reply, claimed)
        run.task = report.task
        run.metric = report.metric
        run.own_data = run.own_data or report.own_data
        run.noise[report.client] = report.noise
        if report.classes and self.federation.simulated:
            run.classes[report.client] = counts_in(report.classes)
        if report.device not in run.devices:
            run.devices.append(report.device)
        if report.note:
            run.warn_once(report.note, [report.client])

    def _check_network(self, spec: Spec) -> None:
        method = self.run.method.name
        traits = self.run.traits
        specs = self.federation.specs
        first, other = next(iter(specs.items()), ("", spec))
        if traits.networks == "equal" and spec != other:
            raise FedhetError(
                f"{method} needs equal architectures, and this client's differs from client {first}'s: "
                f"{difference(spec, other)}; use layer-average, or fedproto with fedproto.width, for different networks"
            )
        equal = "shapes and dtypes" if self._one_shape else "dtypes"
        for key, (shape, dtype) in spec.items() if traits.shares.averaged else ():
            client = next((client for client in specs if key in specs[client]), None)
            if client is None:
                continue
            other_shape, other_dtype = specs[client][key]
            if dtype != other_dtype or (self._one_shape and shape != other_shape):
                array = f"the head's {key.removeprefix('head.')}" if traits.shares is HEAD else key
                raise FedhetError(
                    f"{method} averages {array} over clients, but this client's is {dtype}{list(shape)} and client "
                    f"{client}'s is {other_dtype}{list(other_shape)}: shared arrays must have equal {equal}"
                )

    def _agree(self, reply: Reply, *, joining: bool) -> None:
        """Check values that all clients must share, such as the task; a new client is shown to the method (`accept`).

        Raises a FedhetError if a value differs from that of the other clients. Arrays of the client that the shared
        model lacks are added to it with initial values, unless the client is `joining` after the last round.
        """
        self._agree_on_names(reply)
        state = self.run.state
        traits = self.run.traits
        common = self._common(reply)
        for name, (value, remedy) in common.items():
            if (other := state.common.get(name, value)) != value:
                raise FedhetError(f"the client's {name} is {value}, and the other clients have {other}: {remedy}")
        state.common = state.common | {name: value for name, (value, _) in common.items()}
        if reply.client not in state.clients:
            if traits.public != "none":
                digest, size = self._public_dataset(reply)
                state.public = state.public or digest
                state.public_size = state.public_size or size
            self.accept(reply)
        if traits.shares.averaged and not joining:
            arrays = state.model | self.run.initial
            missing = {key: array for key, array in reply.report.spec.items() if key not in arrays}
            if missing and (first := self.first_arrays(missing)) is not None:
                state.model = state.model | first

    def _agree_on_names(self, reply: Reply) -> None:
        run = self.run
        report = reply.report
        for kind, names in names_in(report.names).items():
            chosen = names_in(run.state.names).get(kind, names)
            if alike(kind, names, chosen):
                self._note_names(kind, merged(chosen, names))
                continue
            if kind in report.free.split(","):
                continue
            # A method for any networks does not average heads of different sizes.
            others = [r.report for r in self.federation.known.values() if r.report.outputs == report.outputs]
            apart = kind == CLASSES and run.traits.averages_model and run.traits.networks == "any"
            if not apart or not all(alike(kind, names, names_in(each.names).get(kind, ())) for each in others):
                whose = unlike(f"the client's {kind}", names, chosen)
                lists = ", also those of which a client has no example" if {*names} < {*chosen} else ""
                raise FedhetError(f"{whose}: give all clients the same {kind}{lists}")

    def _public_dataset(self, reply: Reply) -> tuple[str, int]:
        """Return digest and size of the server's public dataset, else the client's; raise a FedhetError without one."""
        report = reply.report
        config = self.run.config
        public = self.run.public
        digest, size = (report.public, report.public_size) if public is None else (public.digest, len(public))
        if config.options.public_union and report.own_data:
            raise FedhetError(no_union(config))
        if digest and size < (least := config.options.least_public):
            raise FedhetError(f"the public dataset has {size} examples, but at least {least} are needed: add examples")
        if digest:
            return digest, size
        labelled = "labelled " if self.run.traits.public == "labelled" else ""
        held_out = "" if report.own_data else "set public-samples and dataset, or "
        raise FedhetError(
            f"there is no {labelled}public dataset, but the method needs it: {held_out}have the clients' data function "
            "return it as `public`, or pass it as public=... to the strategy or to make_server_app"
            f"{_without_labels(config) if labelled else ''}"
        )

    def _test_on_own_parts(self) -> None:
        """Set `test-on = local`; raise a FedhetError if the user set another value or there are common test sets."""
        run = self.run
        if "test-on" in run.config.chosen or self.federation.known:
            raise FedhetError(
                f"test-on = {run.config.test_on} needs a common test set: return it as `common` from the data "
                "function, or set test-on = local"
            )
        run.config = run.config.on_own_test_parts()
        log.info("%s", run.config.remarks[-1][1])


def _without_labels(config: Config) -> str:
    """Return "; if its examples have no labels, set KEY = VALUE", or "" if no key makes labels unnecessary."""
    for key, spec in config.specs().items():
        if "." in key and (value := spec.metadata["at_need"]) is not None:
            options = replace(config.options, **{spec.name: value})
            if registry.traits(config.replace(options=options)).public == "inputs":
                return f"; if its examples have no labels, set {key} = {value}"
    return ""


def _comes_last(reply: Reply, count: int) -> bool:
    if not count:
        return False
    if reply.report.partition is None:
        raise FedhetError(
            f"unseen-clients = {count} selects the last partitions, but the client's node reports no partition: set "
            "partition-id and num-partitions in its node config"
        )
    partition, partitions = reply.report.partition
    return partition >= partitions - count


def most_alike_first(claims: Mapping[int, Claims]) -> list[int]:
    """Return node ids, sorted by the number of properties (`claims`) that differ from the most frequent value."""
    votes = Counter(claim for claimed in claims.values() for claim in claimed)
    most = {name: count for (name, _), count in reversed(votes.most_common())}
    return sorted(claims, key=lambda node: sum(votes[claim] < most[claim[0]] for claim in claims[node]))
