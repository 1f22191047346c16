"""The server side that FedMA and PFNM share: the clients' permutation groups, and the results of a matching."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from torch import nn

from fedhet.errors import FedhetError
from fedhet.graphs import PermutationGroups, resize, widths_of
from fedhet.matching import Matching, average_rest, describe, pictures, understand
from fedhet.methods._matching import MatchingParameters
from fedhet.server import ArraysBy, FederatedStrategy, State, check_class_counts, in_order
from fedhet.sharing import is_statistic
from fedhet.wire import Arrays, Reply, WireError, check, to_tensor


@dataclass
class MatchedState(State):
    """The state of a method that matches.

    Attributes:
        groups: the permutation groups of the clients' architecture, as the first of them describes them.
        classes: whether labels are classes; None before the first client.
        assignments: the global unit of each unit of each client, by group.
        filters: the clients' first convolutions as they were before matching.
    """

    groups: Any = None
    classes: bool | None = None
    assignments: ArraysBy = field(default_factory=dict)
    filters: Arrays = field(default_factory=dict)


M = TypeVar("M", bound=MatchingParameters)
T = TypeVar("T", bound=MatchedState)


class MatchedStrategy(FederatedStrategy[M, T]):
    """A server side whose global model has wider layers than the clients', made of units that were matched."""

    state_class = MatchedState

    def compatibility(self, reply: Reply) -> Hashable:
        """The same permutation groups but for their widths, and labels of the same kind."""
        groups = self._understood(self._groups_in(reply), reply)
        alike = groups.with_widths([1] * len(groups))
        return super().compatibility(reply), describe(alike), reply.values.flag("classes")

    @staticmethod
    def _groups_in(reply: Reply) -> str:
        return reply.values.text("groups", longest=2**20)

    def admit(self, reply: Reply) -> None:
        """Check that the client's permutation groups are those of the others but for their widths."""
        state, groups, classes = self.state, self._groups_in(reply), reply.values.flag("classes")
        if (groups, classes) == (state.groups, state.classes):
            return
        told = self._understood(groups, reply)
        if state.classes is None:
            state.groups, state.classes = groups, classes
            return
        if told.with_widths(self.groups.widths) != self.groups or classes != state.classes:
            raise FedhetError(
                f"{self.method.name} needs one architecture and task, and this one's layers are connected otherwise, "
                "or its labels are of another kind"
            )
        if self.config.shared_init:
            raise FedhetError(
                f"{self.method.name} cannot start clients of other widths than the first one's from one network: set "
                "shared-init = false"
            )

    def _understood(self, groups: str, reply: Reply) -> PermutationGroups:
        """The groups that a client describes; raises WireError where its arrays are of others."""
        shapes = {name: shape for name, (shape, _) in reply.report.spec.items()}
        try:
            told = understand(groups)
            made = told.shapes(widths_of(shapes, told))
            if {name for name in made if not is_statistic(name)} - shapes.keys() or not told.fixed:
                raise ValueError("they are of other arrays than it shares")
            if {name: made[name] for name in shapes} != shapes:
                raise ValueError("they are of arrays of other shapes than it shares")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise WireError(f"what it tells of its layers cannot be used: {error}") from error
        return told

    @cached_property
    def groups(self) -> PermutationGroups:
        """The permutation groups of the clients' architecture, in the first one's widths."""
        return understand(self.state.groups)

    def widths(self, client: str) -> tuple[int, ...]:
        """How many units of each group a client has."""
        return widths_of({name: shape for name, (shape, _) in self.federation.specs[client].items()}, self.groups)

    def fits(self, client: str) -> bool:
        """Whether a client without units in the global model can take its first ones: it is nowhere wider."""
        shapes = {name: array.shape for name, array in self.state.model.items()}
        return all(own <= size for own, size in zip(self.widths(client), widths_of(shapes, self.groups), strict=True))

    def matching(self) -> Matching:
        """The keys of matching, for the functions that match."""
        return Matching(**{name: getattr(self.parameters, name) for name in MatchingParameters.__dataclass_fields__})

    def check_classes(self, reply: Reply) -> None:
        """Check class counts, where labels are classes: one a class, none negative; raises WireError."""
        if not self.state.classes:
            return
        classes = self.federation.specs[reply.client][self.groups.fixed[-1]][0][0]
        check(reply.arrays.get("classes", {}), {"counts": ((classes,), "int64")}, "its class counts")
        check_class_counts(reply.arrays["classes"]["counts"], reply)

    def average_rest(
        self,
        states: Sequence[Arrays],
        replies: Mapping[str, Reply],
        assignments: Sequence[Mapping[int, Any]],
        sizes: Sequence[int],
    ) -> Arrays:
        """Average what is not matched, with all groups in the global order (see `fedhet.matching.average_rest`)."""
        answers = replies.values()
        return average_rest(
            states,
            self.groups,
            examples=[reply.examples for reply in answers],
            class_counts=[reply.arrays["classes"]["counts"] for reply in answers] if self.state.classes else None,
            assignments=assignments,
            sizes=sizes,
            statistics=self.config.batch_norm == "aggregate",
        )

    def dtypes(self, replies: Mapping[str, Reply]) -> dict[str, str]:
        """The dtypes of the model's arrays, by name."""
        return {name: dtype for name, (_, dtype) in self.federation.specs[next(iter(replies))].items()}

    def keep_assignments(self, client: str, assignments: "Mapping[int, np.ndarray[Any, Any]]") -> None:
        """Keep the global unit of each of a client's units, by group: int32, as they travel."""
        kept = {str(index): assignment.astype(np.int32) for index, assignment in assignments.items()}
        self.state.assignments[client] = kept

    # ---- results

    def global_model(self) -> nn.Module | None:
        """The global model in its own widths, None before the first pass is complete."""
        if not self.has_global_model:
            return None
        model = self.networks.like(in_order(self.state.clients)[0])
        return resize(model, {name: to_tensor(array) for name, array in self.state.model.items()})

    def keep_filters(self, states: "Mapping[str, Arrays]") -> None:
        """Keep the clients' first convolution as it was before matching, for the report."""
        name = self._first_convolution()
        if name is not None:
            self.state.filters = {client: state[name].copy() for client, state in states.items()}

    def matrices(self) -> dict[str, Any]:
        """Which clients share which global units; for images some first filters side by side (the paper's figure 5)."""
        own = {client: self.state.assignments.get(client, {}) for client in in_order(self.state.clients)}
        last = str(len(self.groups) - 1)
        own = {client: assignments for client, assignments in own.items() if last in assignments}
        if not own or not self.state.model:
            return {}
        found: dict[str, Any] = {"shared_filters": pictures.membership(self.groups, own)}
        if name := self._first_convolution():
            first = {client: mine["0"] for client, mine in own.items()}
            found["filters"] = pictures.filters(name, self.state.filters, self.state.model[name], first)
        return found

    def _first_convolution(self) -> str | None:
        """The weight (L, C, h, w) of the first group's first layer, if that is a convolution of images."""
        first = self.groups[0].rows[0] if self.groups else None
        return first.parameter if first and not first.axis and len(self.groups.axes[first.parameter]) == 4 else None
