"""PFNM, client side: train a network and send it (Yurochkin et al., ICML 2019)."""

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from fedhet.algorithms.graphs import PermutationGroups, cut_out, resizable_groups, resize
from fedhet.algorithms.matching import groups_to_json
from fedhet.client import Client, ClientSide
from fedhet.messages import Arrays, Payload, to_arrays
from fedhet.methods.included.matching import PFNMOptions
from fedhet.training import Phase

M = TypeVar("M", bound=PFNMOptions)


class Matched(ClientSide[M]):
    """Client side of PFNM and FedMA: a network whose layers take the widths of the global model.

    The server matches units of clients within permutation groups, which are sets of units that can be permuted.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._configured = client.model

    @cached_property
    def groups(self) -> PermutationGroups:
        """The permutation groups of the client's network in its configured widths."""
        return resizable_groups(self._configured, self.client.transform(self.client.data.train.inputs[:2]))

    def handshake(self, payload: Payload) -> Payload:
        classes = self.client.task.name == "classification"
        return Payload(values={"groups": groups_to_json(self.groups), "classes": classes})

    def class_counts(self) -> dict[str, Arrays]:
        """Return the number of examples of each class; an empty dict unless the task is classification."""
        classes = self.client.task.name == "classification"
        return {"classes": class_counts(self.client, self.groups.fixed[-1])} if classes else {}

    def _use(self, state: Arrays) -> None:
        self.client.work_on(resize(self._configured, state))


class PFNM(Matched[PFNMOptions]):
    """Trains the client's own weights or, if there is a global model, the client's units of the global model."""

    def begin(self, payload: Payload) -> None:
        if "model" in payload.arrays:
            self._use(payload.arrays["model"])
            self.client.reestimate()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase on the client's units of the global model, or on the first units without an assignment."""
        if "model" in payload.arrays:
            units = payload.arrays.get("assignments", {})
            assignments = {g.index: units.get(str(g.index), np.arange(g.width)) for g in self.groups}
            self._use(cut_out(to_arrays(self.client.tensors), self.groups, assignments))
        return super().phases(payload)

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        reply.arrays |= self.class_counts()
        return reply


def class_counts(client: Client, output: str) -> Arrays:
    """Return a client's number of examples of each class, (classes,); `output` is an array with a row per class."""
    classes = client.tensors[output].shape[0]
    labels = client.data.train.labels.flatten().cpu().numpy()
    return {"counts": np.bincount(labels, minlength=classes).astype(np.int64)}
