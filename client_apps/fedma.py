"""FedMA, client side: train the layers that the server has not matched yet (Wang et al., ICLR 2020, algorithm 1).

In a pass, the server matches the layers in order, and matched layers are not trained any more. Between the rounds of a
pass, a client keeps its network: the matched layers as in the global model, then its own layers. The inputs of the
client's own layers have the order of the global units, with zeros for units that the client does not have.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.algorithms.graphs import cut_out, tie
from fedhet.algorithms.matching import due, patch
from fedhet.client import Client
from fedhet.messages import Arrays, Payload, cast, to_arrays
from fedhet.methods.included.matching import FedMAOptions
from fedhet.training import Optimisation, Phase

from .pfnm import Matched

LAST_WEIGHT_DECAY = 1e-4
"""Weight decay in the output layer's round, as in the authors' code."""


class FedMA(Matched[FedMAOptions]):
    """Trains all layers in the first round of a pass, then only the layers that are not matched yet."""

    remembers = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._done = 0  # number of groups that are matched in this pass
        self._own: dict[int, np.ndarray[Any, Any]] = {}  # by matched group, the global units of the client's units
        self._complete = self._begins = self._lost = False

    # ---- the server's message

    def begin(self, payload: Payload) -> None:
        """Replace the client's first layers by the layers that the server has matched."""
        place = payload.values.get("place")
        if place is not None:
            kept = self._kept(place)
            if kept is None:
                self._lost = self._begins = True
                return
            self._done = place[1]
            self._go_on(kept, payload)
        elif "model" in payload.arrays:
            self._use(payload.arrays["model"])
            self._own = {int(index): array for index, array in payload.arrays.get("assignments", {}).items()}
            self._complete = True
            if self.client.config.batch_norm == "local":
                self.client.reestimate()
        self._begins = place is None or self._complete

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """Return the network to evaluate, or None in the middle of a pass, when there is no global model."""
        there = self._complete if when == "received" else not self._lost
        return super().evaluate(when) if there else None

    def _kept(self, place: Sequence[int]) -> Arrays | None:
        """Return the network that the client kept after the round `place`, or None if it is lost."""
        memory = self.client.memory
        if "place" not in memory or memory["place"].tolist() != list(place):
            return None
        parts: dict[str, Arrays] = {"assignment": {}, "model": {}}
        for key, array in to_arrays({key: tensor for key, tensor in memory.items() if key != "place"}).items():
            part, _, name = key.partition("/")
            parts[part][name] = array
        self._own = {int(index): array for index, array in parts["assignment"].items()}
        return parts["model"]

    def _go_on(self, state: Arrays, payload: Payload) -> None:
        """Put the layers that were matched since the client's last round into its network (`state`)."""
        groups, arrays = self.groups, payload.arrays
        known = self._done
        while f"group-{self._done}" in arrays:
            settled = {name: array.astype(np.float32) for name, array in arrays[f"group-{self._done}"].items()}
            assignment = arrays["assignments"][str(self._done)]
            state = patch(state, groups, self._done, assignment, settled.pop("rows"), settled)
            self._own[self._done] = assignment
            self._done += 1
        if last := arrays.get("last"):
            state = tie(state | {name: array.astype(state[name].dtype) for name, array in last.items()}, groups)
            self._complete = True
        self._use(state)
        if self._done > known:
            settled_names = self._settled_names()
            self.client.reestimate(lambda name: name in settled_names)

    def _settled_names(self) -> set[str]:
        """Return the names of the arrays of all matched layers, including running statistics."""
        groups = [self.groups[index] for index in range(self._done)]
        names = {slot.parameter for group in groups for slot in group.rows + group.completes}
        layers = {name.rpartition(".")[0] for name in names}
        kinds = self.groups.kinds.items()
        return names | {name for name, kind in kinds if kind == "statistic" and name.rpartition(".")[0] in layers}

    # ---- training

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase, which trains all layers at the start of a pass, and later the layers not matched yet."""
        if self._lost:
            return []
        if self._begins:
            if self._complete and "step" in payload.values:
                self._cut_out()
            return [Phase(self.client.request.epochs, self.client.optimisation())]
        settled = self._settled_names()
        epochs = self.options.retrain_epochs or self.client.config.local_epochs
        if self._done == len(self.groups):
            epochs *= self.options.last_epochs
        return [Phase(epochs, self._optimisation(), trains=lambda name: name not in settled)]

    def _optimisation(self) -> Optimisation:
        usual = self.client.optimisation()
        if self._done < len(self.groups):
            return replace(usual, weight_decay=0.0)  # the paper, appendix B
        return replace(usual.at(self.options.last_learning_rate), weight_decay=LAST_WEIGHT_DECAY)

    def _cut_out(self) -> None:
        """Continue with the client's units of the global model, or with the first units without an assignment."""
        groups = self.groups
        units = {group.index: self._own.get(group.index, np.arange(group.width)) for group in groups}
        self._use(cut_out(to_arrays(self.client.tensors), groups, units))
        self._own, self._done, self._complete = {}, 0, False

    def end(self, payload: Payload) -> Payload:
        """Return the layers to match next, or in the last round of a pass the output layer and the class counts."""
        memory, client, groups = self.client.memory, self.client, self.groups
        number, step = payload.values["pass"], payload.values["step"]
        memory.clear()
        if self._lost:
            memory["place"] = torch.tensor([-1, 0])
            return Payload(values={"lost": True})
        memory |= {f"model/{name}": tensor for name, tensor in client.tensors.items()}
        memory |= {f"assignment/{index}": torch.from_numpy(units.copy()) for index, units in self._own.items()}
        memory["place"] = torch.tensor([number, self._done])
        names = due(groups, self._done, step, statistics=client.config.batch_norm == "aggregate")
        update = cast(to_arrays({name: client.tensors[name] for name in names}), client.config.wire_dtype)
        return Payload({"update": update} | (self.class_counts() if step == len(groups) else {}))
