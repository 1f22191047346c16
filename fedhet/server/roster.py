"""The admitted clients, and the checks that they fit together."""

import math
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import Grid
from fedhet.messages import Payload, Reply, Report, Spec, WireError, difference, without_widths
from fedhet.results.state import State
from fedhet.server.run import named
from fedhet.utils.statistics import client_order, in_order
from fedhet.utils.text import log

GRACE = 10.0
"""Seconds to wait for nodes that are required."""

UNLIKE = "needs equal architectures"
"""Words of the message that refuses a client whose network differs."""

TAKES_UNLIKE = "layer-average, or fedproto with fedproto.width, accepts different networks"

MOST_PREDICTIONS = 2**28
"""The largest number of predictions of one example: a text has one for each character, a scan one for each pixel."""


class Common(NamedTuple):
    """A value that must be the same for all clients of a run, with advice (`remedy`) for a client that differs."""

    value: int | str
    remedy: str


@dataclass
class Roster:
    """The admitted clients.

    Attributes:
        nodes: the node of each client that is connected, in order of client name.
        refused: nodes that cannot take part; the value is a client name if several nodes claim it, or else empty.
        waiting: nodes of unseen clients, which join after the last round.
        known: the handshake reply of each client, without payload, in order of admission; clients that left are kept.
        specs: names, shapes and dtypes of each known client's shared arrays.
        keys: for each shared array, its shape and dtype, and the first client that has it.
    """

    nodes: dict[str, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    known: dict[str, Reply] = field(default_factory=dict)
    specs: dict[str, Spec] = field(default_factory=dict)
    keys: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)

    def new_nodes(self, grid: Grid, *, unseen_clients: bool) -> list[int]:
        """Return new nodes, and with `unseen_clients` also the waiting nodes; remove nodes that left."""
        present = set(grid.get_node_ids())
        self.nodes = {client: node for client, node in self.nodes.items() if node in present}
        self.refused = {node: name for node, name in self.refused.items() if node in present}
        unrivalled = self.refused.keys() - self.rivals({node: name for node, name in self.refused.items() if name})
        self.refused = {node: name for node, name in self.refused.items() if not name or node not in unrivalled}
        self.waiting = set() if unseen_clients else self.waiting & present
        return sorted(present - set(self.nodes.values()) - self.refused.keys() - self.waiting)

    def rivals(self, claims: Mapping[int, str]) -> dict[int, list[int]]:
        """Return the other nodes with the same name, for each node in `claims` whose name is not unique."""
        by_name: dict[str, set[int]] = {name: {node} for name, node in self.nodes.items()}
        for node, name in (*self.refused.items(), *claims.items()):
            by_name.setdefault(name, set()).add(node)
        return {node: others for node, name in claims.items() if (others := sorted(by_name[name] - {node}))}

    def contest(self, name: str, others: Sequence[int]) -> str:
        """Return the reason for refusing a node whose client name is also claimed by the nodes `others`."""
        nodes = f"node{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        belongs = f"belongs to {nodes}" if name in self.nodes else f"is also claimed by {nodes}: none is admitted"
        return f"the client's name {name!r} {belongs}; each node needs its own partition-id (or name)"

    def check(self, method: str, reply: Reply, *, networks: str, averaged: bool) -> None:
        """Raise a FedhetError if a client does not fit the clients admitted before.

        `networks` says how networks may differ (see `Traits.alike`). `averaged` arrays with the same key must have the
        same dtype, and the same shape unless widths may differ.
        """
        report, first = reply.report, next(iter(self.known.values()), reply)
        task, tasks = _task(report), _task(first.report)
        if task != tasks:
            raise FedhetError(
                f"the client's task is measured by {task}, and client {first.client}'s by {tasks}: all clients of a "
                "run need the same task; set it with task="
            )
        if networks in ("equal", "widths") and self.known:
            theirs, spec = first.report.spec, report.spec
            if networks == "widths":
                theirs, spec = without_widths(theirs), without_widths(spec)
            if spec != theirs:
                first = self.known[min(self.known, key=client_order)]
                but = " except for their widths" * (networks == "widths")
                raise FedhetError(
                    f"{method} {UNLIKE}{but}, and this client's differs from client {first.client}'s: "
                    f"{difference(spec, theirs)}"
                )
        one_shape = networks not in ("widths", "parts")
        for key, (shape, dtype) in report.spec.items() if averaged else ():
            known_shape, known_dtype, client = self.keys.get(key, (shape, dtype, ""))
            if dtype != known_dtype or (one_shape and shape != known_shape):
                raise FedhetError(
                    f"{method} averages {key} over clients, but this client's is {dtype}{list(shape)} and client "
                    f"{client}'s is {known_dtype}{list(known_shape)}: shared arrays must have equal "
                    f"{'shapes and ' * one_shape}dtypes"
                )

    def check_that_clients_can_be_scored(self, test_on: str) -> None:
        """Raise a FedhetError if no client has test examples, unless clients are evaluated on the common test set."""
        without = [client for client in self.nodes if not self.known[client].test_examples]
        if test_on == "global" or not without:
            return
        if len(without) == len(self.nodes):
            raise FedhetError(
                f"no client has test examples, so no model can be evaluated (test-on = {test_on}): give "
                "clients test parts, or provide a common test set and set test-on = global"
            )
        log.warning("%s: no test examples, so their own models are not scored", named(without))

    def check_counts(self, reply: Reply) -> None:
        """Raise a WireError if numbers of examples differ from the handshake, or a metric counts too many examples."""
        known = self.known[reply.client]
        wrapped = known.report.wrapped  # the user's own functions count their examples
        for kind, count, before in (
            ("training", reply.examples, known.examples),
            ("test", reply.test_examples, known.test_examples),
            ("validation", reply.validation_examples, known.validation_examples),
        ):
            if count != before and not wrapped:
                raise WireError(f"the client has {count} {kind} examples now, but had {before} in its handshake")
        metric, labels = known.report.metric, known.report.labels
        for name, measured in reply.measured.items():
            examples = reply.validation_examples if name.startswith("validation-") else reply.test_examples
            most = math.inf if name.startswith("common-") else examples * max(examples, MOST_PREDICTIONS)
            if len(measured.metric.values) != labels or max(measured.metric.weights) > most:
                raise WireError(
                    f"the client's metric {name} must have {labels} values (one per label), with weights up to {most:g}"
                )
            if metric != "r2" and min(measured.metric.values) < 0:
                raise WireError(f"the client's metric {name} is negative: {metric} must be at least 0")

    def admit(self, reply: Reply, node: int) -> None:
        """Add a client that passed the checks, at the end of `nodes` (see `sort`)."""
        self.known[reply.client], self.specs[reply.client] = replace(reply, payload=Payload()), reply.report.spec
        for key, (shape, dtype) in reply.report.spec.items():
            self.keys.setdefault(key, (shape, dtype, reply.client))
        self.nodes[reply.client] = node

    def sort(self) -> None:
        """Sort `nodes` by client name."""
        self.nodes = {client: self.nodes[client] for client in in_order(self.nodes)}


def _task(report: Report) -> str:
    return report.metric if report.labels == 1 else f"{report.metric} of {report.labels} labels"


def most_alike_first(opened: Mapping[int, tuple[Hashable, Reply]], *, averaged: bool, one_shape: bool) -> list[int]:
    """Return nodes in the order of admission, so that the majority decides which clients fit.

    Clients with the most frequent `Hooks.compatibility` come first; among them, if arrays are `averaged`, those with
    the most arrays of the most frequent dtype and, with `one_shape`, shape.
    """
    kinds = Counter(kind for kind, _ in opened.values())
    arrays = {
        node: [(key, (shape if one_shape else (), dtype)) for key, (shape, dtype) in reply.report.spec.items()]
        for node, (_, reply) in opened.items()
        if averaged
    }
    votes = Counter(array for each in arrays.values() for array in each)
    most: dict[str, int] = {}
    for (key, _), count in votes.items():
        most[key] = max(most.get(key, 0), count)
    unlike = {node: sum(votes[array] < most[array[0]] for array in each) for node, each in arrays.items()}
    return sorted(opened, key=lambda node: (-kinds[opened[node][0]], unlike.get(node, 0)))


def with_remedy(reasons: str) -> str:
    """Return reasons for refusals, with the methods that accept different networks if that is a reason."""
    return f"{reasons}; {TAKES_UNLIKE}" if UNLIKE in reasons else reasons


def agree_on_public_dataset(
    state: State, reply: Reply, public: PublicDataset | None, *, labelled: bool, without_labels: str = ""
) -> None:
    """Raise a FedhetError, with the advice `without_labels`, unless all clients have the same public dataset."""
    report = reply.report
    digest, size = (report.public, report.public_size) if public is None else (public.digest, len(public))
    if not digest:
        instead = f"set {without_labels}, which needs no labels; or " if without_labels else ""
        held_out = "" if report.own_data else "set public-samples, or "
        raise FedhetError(
            f"there is no {'labelled ' * labelled}public dataset to align on: {instead}{held_out}have the clients' "
            "data function return it as `public`, or give make_server_app(public=...)"
        )
    if not state.public:
        state.public, state.public_size = digest, size
    elif public is None and (state.public, state.public_size) != (digest, size):
        raise FedhetError(
            "the client's public dataset differs from the other clients': all need the same examples in the same order"
        )


def agree(known: Mapping[str, int | str], values: Mapping[str, Common]) -> dict[str, int | str]:
    """Return `known` with a new client's `values` added; raise a FedhetError if a value differs from the known one."""
    for name, (value, remedy) in values.items():
        if (other := known.get(name, value)) != value:
            raise FedhetError(f"the client's {name} is {value}, and the other clients have {other}: {remedy}")
    return {**known, **{name: value for name, (value, _) in values.items()}}


def await_nodes(grid: Grid, wanted: int, *, exact: bool, patience: float) -> None:
    """Wait up to `patience` seconds for `wanted` nodes; raise a FedhetError for fewer (with `exact`, also for more)."""
    started = time.monotonic()
    while True:
        count, waited = len(list(grid.get_node_ids())), time.monotonic() - started
        if waited >= max(patience, GRACE) or (count >= wanted and (exact or waited >= patience)):
            break
        time.sleep(0.1)
    if exact and count != wanted:
        raise ConfigError(
            f"clients = {wanted}, but {count} nodes are connected: leave the key out, start {wanted} nodes (in a "
            "simulation: num-supernodes), or wait longer for them (wait-for-clients, in seconds)"
        )
    if count < wanted:
        raise FedhetError(
            f"only {count} nodes are connected, and {wanted} are needed: start more nodes, or lower min-clients "
            "(min_available_nodes)"
        )
