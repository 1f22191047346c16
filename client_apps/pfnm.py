"""PFNM, client side: train a network and send it (Yurochkin et al., ICML 2019)."""

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from fedhet.algorithms.graphs import PermutationGroups, cut_out, resizable_groups, resize
from fedhet.algorithms.matching import groups_to_json
from fedhet.client import Client, ClientSide
from fedhet.messages import Arrays, Payload, to_arrays
from fedhet.methods.included.pfnm import PFNMParameters
from fedhet.training import Phase

M = TypeVar("M", bound=PFNMParameters)


class Matched(ClientSide[M]):
    """The client side of PFNM and FedMA: a network with permutation groups that can take other widths."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._configured = client.model

    @cached_property
    def groups(self) -> PermutationGroups:
        """The permutation groups of the client's model in its configured widths."""
        return resizable_groups(self._configured, self.client.transform(self.client.data.train.inputs[:2]))

    def handshake(self, payload: Payload) -> Payload:
        """Return the permutation groups, and whether the outputs are classes."""
        classes = self.client.task.name == "classification"
        return Payload(values={"groups": groups_to_json(self.groups), "classes": classes})

    def class_counts(self) -> dict[str, Arrays]:
        """Return the number of examples of each class; nothing if labels are not classes."""
        classes = self.client.task.name == "classification"
        return {"classes": class_counts(self.client, self.groups.fixed[-1])} if classes else {}

    def _use(self, state: Arrays) -> None:
        """Continue with a network of these weights, in their widths."""
        self.client.work_on(resize(self._configured, state))


class PFNM(Matched[PFNMParameters]):
    """Trains the client's own weights, or its units of the global model."""

    def begin(self, payload: Payload) -> None:
        """Load the global model in its widths."""
        if "model" in payload.arrays:
            self._use(payload.arrays["model"])
            self.client.reestimate()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase for the client's units of the global model, or for the first ones if it has none of them."""
        if "model" in payload.arrays:
            units = payload.arrays.get("assignments", {})
            assignments = {g.index: units.get(str(g.index), np.arange(g.width)) for g in self.groups}
            self._use(cut_out(to_arrays(self.client.tensors), self.groups, assignments))
        return super().phases(payload)

    def end(self, payload: Payload) -> Payload:
        """Return the network, and the number of examples of each class."""
        reply = super().end(payload)
        reply.arrays |= self.class_counts()
        return reply


def class_counts(client: Client, output: str) -> Arrays:
    """Return `counts` (classes,) int64: a client's training examples of each class, a row of the array `output`."""
    classes = client.tensors[output].shape[0]
    labels = client.data.train.labels.flatten().cpu().numpy()
    return {"counts": np.bincount(labels, minlength=classes).astype(np.int64)}
