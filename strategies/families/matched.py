"""Methods whose server matches the hidden units of clients' networks, and averages matched units.

Matching finds, for each hidden unit of a client, the global unit to average it with. A group is a set of hidden units
that must be permuted together; in a plain network, the units of one layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedhet.algorithms.graphs import PermutationGroups, resize, widths_of
from fedhet.algorithms.matching.groups import Matching, average_rest, groups_to_json
from fedhet.messages import Arrays, Reply, WireError, check_room
from fedhet.methods.options import Options, Value, option
from fedhet.methods.sharing import Sharing
from fedhet.server import STRUCTURE, ArraysBy, Common, FederatedStrategy, State, Traits, in_order

from .by_class import class_counts
from .submodels import described, read_network

MATCHED = Traits(
    networks="widths",
    shares=Sharing("everything", statistics="always"),
    common_init=True,
    other_arrays="whole",
    sends={"update": "weights", "classes": "statistics", "groups": STRUCTURE},
    inside="",
)
"""Traits of methods that match hidden units."""

PAPER: Mapping[str, Value] = {
    "clients": 16,
    "shared-init": False,
    "local-epochs": 150,
    "batch-size": 64,
    "learning-rate": 0.01,
    "momentum": 0.9,
}
"""The settings of the FedMA paper."""


@dataclass(frozen=True)
class MatchedKeys(Options):
    """Keys of the matching algorithm, BBP-MAP (Yurochkin et al., ICML 2019)."""

    gamma: float = option(7.0, "mass of the beta process; larger: more global units (LSTMs: 0.001)", above=0)
    average: Literal["map", "mean"] = option(
        "map", "global weights: the posterior mean (the authors' code) or the plain mean (the paper)"
    )
    variances: Literal["fixed", "estimated"] = option(
        "fixed", "variances of local and global units: fixed at 1, or estimated for each layer"
    )
    max_growth: float = option(
        0.0, "maximum global width as a multiple of the widest client's; 0: no limit", at_least=1, or_zero=True
    )


@dataclass
class MatchedState(State):
    """The state of a method that matches hidden units.

    Attributes:
        groups: the sets of hidden units that must be permuted together in the clients' networks, as JSON.
        classes: whether labels are classes; None before the first client is admitted.
        assignments: by client and group, the index in the global model of each of the client's units.
    """

    groups: str = ""
    classes: bool | None = None
    assignments: ArraysBy = field(default_factory=dict)


M = TypeVar("M", bound=MatchedKeys)
T = TypeVar("T", bound=MatchedState)


class MatchedStrategy(FederatedStrategy[M, T]):
    """Base class of PFNM and FedMA, whose global model has matched units and is wider than the clients' networks."""

    def common(self, reply: Reply) -> Mapping[str, Common]:
        groups = described(reply.values.text("groups", longest=2**20), reply.report.spec, complete=True)
        if not groups.fixed:
            raise WireError("the client's network has no output layer: end the network with a linear layer")
        # Matching needs at least 12 bytes for each pair of hidden units of a layer.
        size = 12 * max((group.width for group in groups), default=0) ** 2
        check_room(size, "the server needs memory to match the client's hidden units:")
        remedy = "all clients need one architecture"
        if self.config.shared_init:
            remedy += " in equal widths, or shared-init = false"
        else:
            groups = groups.with_widths([1] * len(groups))
        digest = sha256(groups_to_json(groups).encode()).hexdigest()
        kind = "classes" if reply.values.flag("classes") else "numbers"
        return {
            "digest of layers and connections": Common(digest[:12], remedy),
            "kind of labels": Common(kind, "all clients need the same task"),
        }

    def admit(self, reply: Reply) -> None:
        if self.state.classes is None:
            self.state.groups = reply.values.text("groups", longest=2**20)
            self.state.classes = reply.values.flag("classes")

    @property
    def groups(self) -> PermutationGroups:
        return read_network(self.state.groups)

    def widths(self, client: str) -> tuple[int, ...]:
        return widths_of({name: shape for name, (shape, _) in self.federation.specs[client].items()}, self.groups)

    def fits(self, client: str) -> bool:
        """Return whether a client can start from the global model: its network is at most as wide in all layers."""
        shapes = {name: array.shape for name, array in self.state.model.items()}
        return all(n <= size for n, size in zip(self.widths(client), widths_of(shapes, self.groups), strict=True))

    def matching(self) -> Matching:
        return Matching(**{key.name: getattr(self.options, key.name) for key in fields(MatchedKeys)})

    def check_classes(self, reply: Reply) -> None:
        if self.state.classes:
            class_counts(reply, self.federation.specs[reply.client][self.groups.fixed[-1]][0][0])

    def average_rest(
        self,
        states: Sequence[Arrays],
        replies: Mapping[str, Reply],
        assignments: Sequence[Mapping[int, Any]],
        sizes: Sequence[int],
    ) -> Arrays:
        """Return the average of the arrays that are not matched, such as the output layer.

        `states` has each client's arrays, and `assignments` the global index of each unit, by index of the layer; both
        are in the order of `replies`. `sizes` has the global model's number of units in each layer.
        """
        counts = [reply.arrays["classes"]["counts"] * reply.counted for reply in replies.values() if self.state.classes]
        return average_rest(
            states,
            self.groups,
            examples=[*self.aggregator.weights(replies).values()],
            class_counts=counts or None,
            assignments=assignments,
            sizes=sizes,
            statistics=self.config.batch_norm == "aggregate",
        )

    def dtypes(self, replies: Mapping[str, Reply]) -> dict[str, str]:
        return {name: dtype for name, (_, dtype) in self.federation.specs[next(iter(replies))].items()}

    def keep_assignments(self, client: str, assignments: Mapping[int, NDArray[Any]]) -> None:
        kept = {str(index): assignment.astype(np.int32) for index, assignment in assignments.items()}
        self.state.assignments[client] = kept

    def global_model(self) -> nn.Module | None:
        if not self.has_global_model:
            return None
        return resize(self.run.network_like(in_order(self.state.clients)[0]), self.state.model)
