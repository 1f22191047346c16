"""Client sides of PFNM and FedMA.

PFNM (Yurochkin et al., ICML 2019): train a network and send it. FedMA (Wang et al., ICLR 2020, algorithm 1): in a pass,
the server matches the layers in order, and matched layers are not trained any more. Between the rounds of a pass, a
client keeps its network: the global model's matched layers, followed by the client's own layers. Inputs of the first
own layer are ordered like the global units, with zero weights for units that the client does not have.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedhet.algorithms.graphs import PermutationGroups, cut_out, resizable_groups, resize, tie
from fedhet.algorithms.matching import due, groups_to_json, patch
from fedhet.client import Client, ClientSide
from fedhet.errors import ModelError
from fedhet.messages import Arrays, Payload, to_arrays
from fedhet.methods.included.matching import FedMAOptions, PFNMOptions
from fedhet.training import Optimisation, Phase

from .families.by_class import class_counts

M = TypeVar("M", bound=PFNMOptions)


class Matched(ClientSide[M]):
    """Base class of the client sides of PFNM and FedMA, which resize the client's network to fit received arrays."""

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
        return Payload(values={"groups": groups_to_json(self.groups), "classes": classes})

    def class_counts(self) -> dict[str, Arrays]:
        """Return {"classes": {"counts": numbers of examples by class}}, or {} if the task is not classification."""
        classes = self.client.task.name == "classification"
        return {"classes": class_counts(self.client, self.groups.fixed[-1])} if classes else {}

    def _use(self, state: Arrays) -> None:
        self.client.work_on(resize(self._configured, state))


class PFNM(Matched[PFNMOptions]):
    """Client side of PFNM: trains its own network or, later, the units of the global model that match its units."""

    def begin(self, payload: Payload) -> None:
        if "model" in payload.arrays:
            self._use(payload.arrays["model"])
            if self.client.config.batch_norm == "local":
                self.client.reestimate()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        if "model" in payload.arrays:
            units = payload.arrays.get("assignments", {})
            assignments = {g.index: units.get(str(g.index), np.arange(g.width)) for g in self.groups}
            self._use(cut_out(to_arrays(self.client.tensors), self.groups, assignments))
        return super().phases(payload)

    def end(self, payload: Payload) -> Payload:
        reply = super().end(payload)
        reply.arrays |= self.class_counts()
        return reply


LAST_WEIGHT_DECAY = 1e-4  # when only the output layer is trained, as in the authors' code of FedMA


class FedMA(Matched[FedMAOptions]):
    """Client side of FedMA: trains all layers in a pass's first round, then those that the server has not matched."""

    remembers = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._own: dict[int, np.ndarray[Any, Any]] = {}  # by matched group, the global units of the client's units
        self._complete = self._begins = self._lost = False

    def begin(self, payload: Payload) -> None:
        arrays = payload.arrays
        self._begins = "group" not in arrays
        if "group" in arrays or "last" in arrays:
            self._lost = not self.client.memory
            if not self._lost:
                self._go_on(arrays)
        elif "model" in arrays:
            self._use(arrays["model"])
            self._complete = True
            if self.client.config.batch_norm == "local":
                self.client.reestimate()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        there = self._complete if when == "received" else not self._lost
        return super().evaluate(when) if there else None

    def _go_on(self, arrays: dict[str, Arrays]) -> None:
        kept: dict[str, Arrays] = {"assignment": {}, "model": {}}
        for key, array in to_arrays(self.client.memory).items():
            part, _, name = key.partition("/")
            kept[part][name] = array
        self._own = {int(index): array for index, array in kept["assignment"].items()}
        state, groups = kept["model"], self.groups
        if "group" in arrays:
            settled = {name: array.astype(np.float32) for name, array in arrays["group"].items()}
            index, units = len(self._own), arrays["assignment"]["units"]
            state = patch(state, groups, index, units, settled.pop("rows"), settled)
            self._own[index] = units
        if last := arrays.get("last"):
            state = tie(state | {name: array.astype(state[name].dtype) for name, array in last.items()}, groups)
            self._complete = True
        self._use(state)
        if "group" in arrays:
            settled_names = self._settled_names()
            self.client.reestimate(lambda name: name in settled_names)

    def _settled_names(self) -> set[str]:
        groups = [self.groups[index] for index in self._own]
        names = {slot.parameter for group in groups for slot in group.rows + group.completes}
        layers = {name.rpartition(".")[0] for name in names}
        kinds = self.groups.kinds.items()
        return names | {name for name, kind in kinds if kind == "statistic" and name.rpartition(".")[0] in layers}

    def phases(self, payload: Payload) -> Sequence[Phase]:
        if self._lost:
            return []
        if self._begins:
            if self._complete and "step" in payload.values:
                units = {group.index: self._own.get(group.index, np.arange(group.width)) for group in self.groups}
                self._use(cut_out(to_arrays(self.client.tensors), self.groups, units))
                self._own, self._complete = {}, False
            return [Phase(self.client.request.epochs, self.client.optimisation())]
        settled = self._settled_names()
        epochs = self.options.retrain_epochs or self.client.config.local_epochs
        if len(self._own) == len(self.groups):
            epochs *= self.options.last_epochs
        return [Phase(epochs, self._optimisation(), trains=lambda name: name not in settled)]

    def _optimisation(self) -> Optimisation:
        usual = self.client.optimisation()
        if len(self._own) < len(self.groups):
            return replace(usual, weight_decay=0.0)  # the paper, appendix B
        return replace(usual.at(self.options.last_learning_rate), weight_decay=LAST_WEIGHT_DECAY)

    def end(self, payload: Payload) -> Payload:
        client, groups, step = self.client, self.groups, payload.values["step"]
        client.memory.clear()
        if self._lost:
            return Payload()
        client.memory |= {f"model/{name}": tensor for name, tensor in client.tensors.items()}
        client.memory |= {f"assignment/{index}": torch.from_numpy(units.copy()) for index, units in self._own.items()}
        names = due(groups, step, statistics=client.config.batch_norm == "aggregate")
        update = to_arrays({name: client.tensors[name] for name in names})
        return Payload({"update": update} | (self.class_counts() if step == len(groups) else {}))
