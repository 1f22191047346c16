"""The client side that FedMA and PFNM share."""

from functools import cached_property
from typing import TypeVar

from fedhet.client import Client, ClientSide
from fedhet.graphs import PermutationGroups, architecture_graph, permutation_groups, resize
from fedhet.matching import describe
from fedhet.methods._matching import MatchingParameters
from fedhet.wire import Arrays, Payload, to_tensor

from .class_average import class_counts  # noqa: TID251 - this folder is fedhet.client_apps

M = TypeVar("M", bound=MatchingParameters)


class Matched(ClientSide[M]):
    """A client side whose network is matched: it knows its permutation groups, and works in other widths."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._configured = client.model

    @cached_property
    def groups(self) -> PermutationGroups:
        """The permutation groups of the client's model as it was configured."""
        client = self.client
        return permutation_groups(architecture_graph(self._configured, client.transform(client.data.train.inputs[:2])))

    def handshake(self, payload: Payload) -> Payload:
        """Return the permutation groups, and whether the outputs are classes."""
        classes = self.client.task.name == "classification"
        return Payload(values={"groups": describe(self.groups), "classes": classes})

    def class_counts(self) -> dict[str, Arrays]:
        """The numbers of examples of each class; nothing where labels are no classes."""
        classes = self.client.task.name == "classification"
        return {"classes": class_counts(self.client, self.groups.fixed[-1])} if classes else {}

    def _use(self, state: Arrays) -> None:
        """Go on with a network of these weights, in their widths."""
        self.client.work_on(resize(self._configured, {name: to_tensor(array) for name, array in state.items()}))
