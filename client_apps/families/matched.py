"""Base class of client sides whose server matches hidden units: they resize the network to fit received arrays."""

from functools import cached_property
from typing import TypeVar

from fedhet.algorithms.graphs import PermutationGroups, resizable_groups, resize
from fedhet.algorithms.matching import groups_to_json
from fedhet.client import Arrays, Client, ClientSide, Payload
from fedhet.errors import ModelError
from fedhet.strategies.families.matched import MatchedKeys

from .by_class import class_counts

M = TypeVar("M", bound=MatchedKeys)


class Matched(ClientSide[M]):
    """Base class of client sides that work on their own network or on the global model, which is wider."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._configured = client.model

    @cached_property
    def groups(self) -> PermutationGroups:
        """The permutation groups (sets of units that must be permuted together) of the client's initial network."""
        groups = resizable_groups(self._configured, self.client.transform(self.client.data.train.inputs[:2]))
        if not groups.fixed:
            raise ModelError(f"the head {self.client.head!r} shares weights with another layer: give the head its own")
        return groups

    def handshake(self, payload: Payload) -> Payload:
        classes = self.client.task.name == "classification"
        output = self.groups.fixed[-1]
        if classes and len(self.client.tensors[output]) != self.client.outputs:
            raise ModelError(
                f"{output} serves only some classes: compute the scores of all classes by one linear layer"
            )
        return Payload(values={"groups": groups_to_json(self.groups), "classes": classes})

    def begin(self, payload: Payload) -> None:
        if "model" in payload.arrays:
            self.use(payload.arrays["model"])
            if self.client.config.batch_norm == "local":
                self.client.reestimate()

    def class_counts(self) -> dict[str, Arrays]:
        """Return {"classes": {"counts": numbers of examples by class}}, or {} if the task is not classification."""
        classes = self.client.task.name == "classification"
        return {"classes": class_counts(self.client, self.groups.fixed[-1])} if classes else {}

    def use(self, state: Arrays) -> None:
        """Work on a network with the arrays `state`, whose hidden layers may have other widths."""
        self.client.work_on(resize(self._configured, state))
