"""PFNM, server side: whole networks are matched in one round (Yurochkin et al., ICML 2019; FedMA's one-shot baseline).

Matching finds, for each hidden unit of a client, the global unit to average it with. The paper's method has one round.
In further rounds, clients start from their units of the global model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
from torch import nn

from fedhet.algorithms.graphs import PermutationGroups, resize, widths_of
from fedhet.algorithms.matching import Matching, assemble, average_rest, groups_to_json, match_networks
from fedhet.messages import Arrays, Payload, Reply, WireError
from fedhet.methods.included.matching import PFNMOptions, pfnm
from fedhet.server import ArraysBy, Common, FederatedStrategy, State, in_order
from fedhet.server.submodel import read_network
from fedhet.utils.randomness import derive_seed

from ._common import class_counts


@dataclass
class MatchedState(State):
    """The state of a method that matches units.

    Attributes:
        groups: the permutation groups of the clients' architecture (JSON), as the first client describes them.
        classes: whether labels are classes; None before the first client is admitted.
        assignments: by client and group, the global unit of each of the client's units.
    """

    groups: str = ""
    classes: bool | None = None
    assignments: ArraysBy = field(default_factory=dict)


M = TypeVar("M", bound=PFNMOptions)
T = TypeVar("T", bound=MatchedState)


class MatchedStrategy(FederatedStrategy[M, T]):
    """The server side of PFNM and FedMA: a global model of matched units, wider than the clients' networks."""

    state_class = MatchedState

    def common(self, reply: Reply) -> Mapping[str, Common]:
        """Return digests of layers and connections, with widths unless these may differ, and the kind of labels."""
        groups, equal = self._groups_of(reply), self.config.shared_init
        digest = sha256(groups_to_json(groups if equal else groups.with_widths([1] * len(groups))).encode()).hexdigest()
        remedy = "all clients need one architecture" + " in equal widths, or shared-init = false" * equal
        kind = "classes" if reply.values.flag("classes") else "numbers"
        return {
            "digest of layers and connections": Common(digest[:12], remedy),
            "kind of labels": Common(kind, "all clients need the same task"),
        }

    def admit(self, reply: Reply) -> None:
        state = self.state
        if state.classes is None:
            state.groups, state.classes = reply.values.text("groups", longest=2**20), reply.values.flag("classes")

    def _groups_of(self, reply: Reply) -> PermutationGroups:
        """Read the permutation groups in a client's reply; raise a WireError if they do not fit the client's arrays."""
        shapes = {name: shape for name, (shape, _) in reply.report.spec.items()}
        try:
            groups = read_network(reply.values.text("groups", longest=2**20))
            expected = groups.shapes(widths_of(shapes, groups))
            needed = {name for name in expected if groups.kinds.get(name) != "statistic"}
            if needed - shapes.keys() or not groups.fixed:
                raise ValueError("the names of the described arrays differ from the names of the shared arrays")
            if {name: expected[name] for name in shapes} != shapes:
                raise ValueError("the shapes of the described arrays differ from the shapes of the shared arrays")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise WireError(f"the client's description of its layers is invalid: {error}") from error
        return groups

    @property
    def groups(self) -> PermutationGroups:
        return read_network(self.state.groups)

    def widths(self, client: str) -> tuple[int, ...]:
        """Return the number of units that a client has in each permutation group."""
        return widths_of({name: shape for name, (shape, _) in self.federation.specs[client].items()}, self.groups)

    def fits(self, client: str) -> bool:
        """Return whether a client can start from the global model: none of its layers is wider than the global one."""
        shapes = {name: array.shape for name, array in self.state.model.items()}
        return all(n <= size for n, size in zip(self.widths(client), widths_of(shapes, self.groups), strict=True))

    @property
    def statistics(self) -> bool:
        """Whether running statistics are averaged."""
        return self.config.batch_norm == "aggregate"

    def matching(self) -> Matching:
        return Matching(**{each.name: getattr(self.options, each.name) for each in fields(PFNMOptions)})

    def check_classes(self, reply: Reply) -> None:
        """Check the client's class counts if labels are classes; raise a WireError if they are wrong."""
        if not self.state.classes:
            return
        classes = self.federation.specs[reply.client][self.groups.fixed[-1]][0][0]
        class_counts(reply, classes)

    def average_rest(
        self,
        states: Sequence[Arrays],
        replies: Mapping[str, Reply],
        assignments: Sequence[Mapping[int, Any]],
        sizes: Sequence[int],
    ) -> Arrays:
        """Average the arrays that are not matched, such as the output layer; `sizes` are the groups' global widths."""
        answers = replies.values()
        return average_rest(
            states,
            self.groups,
            examples=[reply.examples for reply in answers],
            class_counts=[reply.arrays["classes"]["counts"] for reply in answers] if self.state.classes else None,
            assignments=assignments,
            sizes=sizes,
            statistics=self.statistics,
        )

    def dtypes(self, replies: Mapping[str, Reply]) -> dict[str, str]:
        return {name: dtype for name, (_, dtype) in self.federation.specs[next(iter(replies))].items()}

    def keep_assignments(self, client: str, assignments: "Mapping[int, np.ndarray[Any, Any]]") -> None:
        kept = {str(index): assignment.astype(np.int32) for index, assignment in assignments.items()}
        self.state.assignments[client] = kept

    # ---- results

    def global_model(self) -> nn.Module | None:
        if not self.has_global_model:
            return None
        model = self.run.network_like(in_order(self.state.clients)[0])
        return resize(model, self.state.model)

    def matrices(self) -> dict[str, Any]:
        """Return, for each layer, a matrix (clients, global units) that is 1 where a client has the unit."""
        assigned = {client: self.state.assignments.get(client, {}) for client in in_order(self.state.clients)}
        last = str(len(self.groups) - 1)
        assigned = {client: by_group for client, by_group in assigned.items() if last in by_group}
        if not assigned or not self.state.model:
            return {}
        layers = []
        for group in self.groups:
            members = [by_group[str(group.index)] for by_group in assigned.values()]
            units = np.zeros((len(members), 1 + max(int(each.max()) for each in members)), dtype=int)
            for row, each in zip(units, members, strict=True):
                row[each] = 1
            layers.append({"name": group.name, "units": units.tolist()})
        return {"shared_filters": {"clients": list(assigned), "layers": layers}}


class PFNM(MatchedStrategy[PFNMOptions, MatchedState]):
    """Matches all layers in one round, without training in between."""

    method = pfnm

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the global model with each client's assignments, by which a client selects its units.

        A client that has no assignments starts from its own weights if one of its layers is wider than the global one.
        """
        payloads = super().configure_fit(round, clients)
        for client, payload in payloads.items():
            if assignments := self.state.assignments.get(client):
                payload.arrays["assignments"] = assignments
            elif payload.arrays and not self.fits(client):
                payload.arrays.clear()
        return payloads

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        self.check_classes(reply)

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        states = {
            client: {
                name: array.astype(self.federation.specs[client][name][1])
                for name, array in reply.arrays["model"].items()
            }
            for client, reply in replies.items()
        }
        states = dict(self.aggregator.clipped(states))
        random = np.random.RandomState(derive_seed(self.config.seed, "matching", round) % 2**32)
        settled, moved = match_networks(list(states.values()), self.groups, self.matching(), random)
        matches = [each.match for each in settled]
        assignments = [{i: match.assignments[j] for i, match in enumerate(matches)} for j in range(len(replies))]
        rest = self.average_rest(moved, replies, assignments, [len(match.counts) for match in matches])
        self.state.assignments.clear()  # those of an earlier global model are no longer valid
        for client, assignment in zip(replies, assignments, strict=True):
            self.keep_assignments(client, assignment)
        self.state.model = assemble(
            self.groups, self.dtypes(replies), [(each.match.weights, each.carried) for each in settled], rest
        )
        local = np.mean([sum(self.widths(client)) for client in replies])
        units = sum(len(match.counts) for match in matches)
        return {"units": float(units), "growth": float(units / local)}
