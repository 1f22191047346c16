"""Who is there: clients by their own names, whatever nodes they are at, and what each shares."""

import math
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import Grid
from fedhet.rows import client_order
from fedhet.server.run import named
from fedhet.state import State
from fedhet.text import log
from fedhet.wire import Reply, Spec, WireError, difference, without_widths

GRACE = 10.0
"""Seconds to wait for nodes that must be there and are only just starting."""

UNLIKE = "needs equal architectures"
"""Words in the reason for which a client with a network unlike the others' is refused."""

TAKES_UNLIKE = "layer-average, or fedproto with fedproto.width, takes networks that differ"

MOST_PREDICTIONS = 2**28
"""Predictions of one example: a text has one for each character, a scan one for each pixel."""


class Common(NamedTuple):
    """A value that all clients of a run must have in common, and what to do if they have not."""

    value: int | str
    remedy: str


@dataclass
class Roster:
    """The clients that were admitted.

    Attributes:
        nodes: the node of each client that is there, in order of client name.
        refused: nodes that cannot take part, and the name that others go by too, where that is why.
        specs: names, shapes and dtypes of what each client shares, of those that left too.
        untrained: for each shared key that is not trained, its kind at the first client that has it.
        waiting: nodes whose clients come after the last round.
        keys: for each shared key, what its arrays are like, and the first client that has it.
        metric: name of the task's metric, and the first client that named it; it has so many `labels`.
        counts: the numbers of each client's examples, which it says in every reply.
    """

    nodes: dict[str, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    specs: dict[str, Spec] = field(default_factory=dict)
    untrained: dict[str, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    keys: dict[str, tuple[tuple[tuple[int, ...], str], str]] = field(default_factory=dict)
    metric: tuple[str, str] | None = None
    labels: int = 1
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def new_nodes(self, grid: Grid, *, unseen_clients: bool) -> list[int]:
        """Return new nodes, with waiting ones if it is time for unseen clients; forget nodes that left."""
        present = set(grid.get_node_ids())
        self.nodes = {client: node for client, node in self.nodes.items() if node in present}
        self.refused = {node: name for node, name in self.refused.items() if node in present}
        alone = self.refused.keys() - self.rivals({node: name for node, name in self.refused.items() if name})
        self.refused = {node: name for node, name in self.refused.items() if not name or node not in alone}
        self.waiting = set() if unseen_clients else self.waiting & present
        return sorted(present - set(self.nodes.values()) - self.refused.keys() - self.waiting)

    def rivals(self, claims: Mapping[int, str]) -> dict[int, list[int]]:
        """The other nodes, refused ones too, that go by the name of a node, for each that has any.

        Args:
            claims: nodes that are no clients, and the name that each goes by.
        """
        by_name: dict[str, set[int]] = {name: {node} for name, node in self.nodes.items()}
        for node, name in (*self.refused.items(), *claims.items()):
            by_name.setdefault(name, set()).add(node)
        return {node: others for node, name in claims.items() if (others := sorted(by_name[name] - {node}))}

    def contest(self, name: str, others: Sequence[int]) -> str:
        """Why a node cannot go by a name that others go by as well."""
        also = f"nodes {', '.join(map(str, others))} do" if len(others) > 1 else f"node {others[0]} does"
        whose = (
            "which had it first" if name in self.nodes else "and nobody can tell whose it is: none of them is admitted"
        )
        return f"it goes by the name {name!r}, as {also}, {whose}; each needs a partition-id (or name) of its own"

    def check(self, method: str, reply: Reply, *, networks: str, averaged: bool) -> None:
        """Check in the handshake that a client fits the known ones.

        Args:
            method: its name, for errors.
            reply: the answer.
            networks: how they may differ (`Traits.alike`).
            averaged: whether arrays of one shared key are averaged, so that they must be alike.

        Raises:
            FedhetError: with the first thing in which it differs, and from whom.
        """
        name, report = reply.client, reply.report
        if self.metric and (report.metric, report.labels) != (self.metric[0], self.labels):
            raise FedhetError(
                f"its task is measured by {_measure(report.metric, report.labels)}, that of client {self.metric[1]} by "
                f"{_measure(self.metric[0], self.labels)}: all clients of a run need the same task, which task= names"
            )
        if networks in ("equal", "widths") and self.specs:
            first = min(self.specs, key=client_order)
            theirs, spec = self.specs[first], report.spec
            if networks == "widths":
                theirs, spec = without_widths(theirs), without_widths(spec)
            if spec != theirs:
                but = " but for their widths" * (networks == "widths")
                raise FedhetError(
                    f"{method} {UNLIKE}{but}, and this one is not that of client {first}: {difference(spec, theirs)}"
                )
        one_shape = networks not in ("widths", "parts")
        for key, (shape, dtype) in report.spec.items() if averaged else ():
            (known_shape, known_dtype), owner = self.keys.get(key, ((shape, dtype), name))
            if dtype != known_dtype or (one_shape and shape != known_shape):
                raise FedhetError(
                    f"{method} averages {key} over clients, and this one's is {dtype}{list(shape)}, that of "
                    f"client {owner} {known_dtype}{list(known_shape)}: what is shared must be alike"
                )

    def check_that_clients_can_be_scored(self, test_on: str) -> None:
        """Check that a client has a test example, or raise a FedhetError, unless the common test set alone counts."""
        without = [client for client in self.nodes if not self.counts[client]["test examples"]]
        if test_on == "global" or not without:
            return
        if len(without) == len(self.nodes):
            raise FedhetError(
                f"no client has a test example, so nothing could be said of what is learnt (test-on = {test_on}): give "
                "clients test parts, or a common test set with test-on = global"
            )
        log.warning("%s: no test examples, so their own models are not scored", named(without))

    def check_counts(self, reply: Reply) -> None:
        """Raise a WireError if a reply has other numbers of examples than the handshake, or metrics of more."""
        for kind, count in _counts(reply).items():
            before = self.counts[reply.client][kind]
            if count != before:
                raise WireError(f"it has {count} {kind} now, and had {before} in its handshake")
        for name, measured in reply.measured.items():
            examples = reply.validation_examples if name.startswith("validation-") else reply.test_examples
            most = math.inf if name.startswith("common-") else examples * max(examples, MOST_PREDICTIONS)
            if len(measured.metric.values) != self.labels or max(measured.metric.weights) > most:
                raise WireError(f"its metric {name} is of other labels, or weighs more, than it has examples for")
            if self.metric and self.metric[0] != "r2" and min(measured.metric.values) < 0:
                raise WireError(f"its metric {name} is below 0, which {self.metric[0]} cannot be")

    def admit(self, reply: Reply, node: int) -> None:
        """Take a client in that was checked."""
        name, report = reply.client, reply.report
        self.nodes[name], self.specs[name] = node, report.spec
        self.untrained = report.untrained | self.untrained
        self.counts[name] = _counts(reply)
        if self.metric is None:
            self.metric, self.labels = (report.metric, name), report.labels
        for key, spec in report.spec.items():
            self.keys.setdefault(key, (spec, name))
        self.nodes = {client: self.nodes[client] for client in sorted(self.nodes, key=client_order)}


def _counts(reply: Reply) -> dict[str, int]:
    return {
        "training examples": reply.examples,
        "test examples": reply.test_examples,
        "validation examples": reply.validation_examples,
    }


def _measure(metric: str, labels: int) -> str:
    return metric if labels == 1 else f"{metric} of {labels} labels"


def most_alike_first(opened: Mapping[int, tuple[Hashable, Reply]], *, averaged: bool) -> list[int]:
    """Return nodes in the order in which they are admitted, so that one alone does not decide for all.

    Those of the most frequent kind (`compatibility`) come first, and of a kind those whose arrays most others have
    alike, where arrays of one shared key are averaged.
    """
    kinds = Counter(kind for kind, _ in opened.values())
    arrays = {node: reply.report.spec.items() if averaged else () for node, (_, reply) in opened.items()}
    votes = Counter(array for each in arrays.values() for array in each)
    most: dict[str, int] = {}
    for (key, _), count in votes.items():
        most[key] = max(most.get(key, 0), count)
    unlike = {node: sum(votes[array] < most[array[0]] for array in each) for node, each in arrays.items()}
    return sorted(opened, key=lambda node: (-kinds[opened[node][0]], unlike[node]))


def with_remedy(reasons: str) -> str:
    """Return reasons for refusals, and which methods would take the clients if networks that differ are one of them."""
    return f"{reasons}; {TAKES_UNLIKE}" if UNLIKE in reasons else reasons


def agree_on_public_dataset(
    state: State, reply: Reply, public: PublicDataset | None, *, labelled: bool, without_labels: str = ""
) -> None:
    """Check that a client has the server's public dataset, or else that of the clients admitted before it.

    Args:
        state: the run's state, in which it is kept.
        reply: the client's answer to the handshake.
        public: the server's public dataset.
        labelled: whether labels are needed.
        without_labels: the settings by which they are not; may be empty.

    Raises:
        FedhetError: it has none, or another one.
    """
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
            "its public dataset is not that of the other clients: all must have the same examples in one order"
        )


def agree(known: Mapping[str, int | str], values: Mapping[str, Common]) -> dict[str, int | str]:
    """Return what clients have in common, with a new client's values; one unlike the known value is a FedhetError."""
    for name, (value, remedy) in values.items():
        if (other := known.get(name, value)) != value:
            raise FedhetError(f"its {name} is {value}, that of the other clients {other}: {remedy}")
    return {**known, **{name: value for name, (value, _) in values.items()}}


def await_nodes(grid: Grid, wanted: int, *, exact: bool, patience: float) -> None:
    """Wait until so many nodes are there, or at least so many after so many seconds; a FedhetError if they are not."""
    started = time.monotonic()
    while True:
        count, waited = len(list(grid.get_node_ids())), time.monotonic() - started
        if waited >= max(patience, GRACE) or (count >= wanted and (exact or waited >= patience)):
            break
        time.sleep(0.1)
    if exact and count != wanted:
        raise ConfigError(
            f"clients = {wanted}, but there are {count} nodes: leave the key out, start as many nodes (in a "
            "simulation: num-supernodes), or give them time to come (wait-for-clients, in seconds)"
        )
    if count < wanted:
        raise FedhetError(f"there are {count} nodes, and {wanted} are needed (min-clients)")
