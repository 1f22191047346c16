"""Client side of FedMA: trains all layers in a pass's first round, then those that the server has not matched.

Between the rounds of a pass, a client keeps its network: the global model's matched layers, followed by the client's
own layers. Inputs of the first own layer are ordered like the global units, with zero weights for units that the client
does not have.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.algorithms.graphs import cut_out, rows, tie, widths
from fedhet.algorithms.matching import due, patch
from fedhet.client import Client
from fedhet.messages import Arrays, Payload, WireError, check_places, check_room, to_arrays
from fedhet.strategies.fedma import Keys
from fedhet.training import Optimisation, Phase

from .families.matched import Matched

LAST_WEIGHT_DECAY = 1e-4
"""Weight decay when only the output layer is trained, as in the authors' code."""


class FedMA(Matched[Keys]):
    remembers = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        # By matched group, the global units of the client's units.
        self._own: dict[int, NDArray[Any]] = {}
        self._complete = False
        self._begins = False

    def begin(self, payload: Payload) -> None:
        arrays = payload.arrays
        self._begins = "group" not in arrays
        if "group" in arrays or "last" in arrays:
            self._go_on(arrays)
        elif "model" in arrays:
            super().begin(payload)
            self._complete = True

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        return super().evaluate(when) if self._complete or when != "received" else None

    def _go_on(self, arrays: dict[str, Arrays]) -> None:
        kept: dict[str, Arrays] = {"assignment": {}, "model": {}}
        for key, array in to_arrays(self.client.remembered).items():
            part, _, name = key.partition("/")
            kept[part][name] = array
        self._own = {int(index): array for index, array in kept["assignment"].items()}
        state = kept["model"]
        groups = self.groups
        if "group" in arrays:
            self._check_units(arrays, state)
            settled = {name: array.astype(np.float32) for name, array in arrays["group"].items()}
            index = len(self._own)
            units = arrays["assignment"]["units"]
            state = patch(state, groups, index, units, settled.pop("rows"), settled)
            self._own[index] = units
        if last := arrays.get("last"):
            state = tie(state | {name: array.astype(state[name].dtype) for name, array in last.items()}, groups)
            self._complete = True
        self.use(state)
        if "group" in arrays:
            settled_names = self._settled_names()
            self.client.reestimate(lambda name: name in settled_names)

    def _check_units(self, arrays: dict[str, Arrays], state: Arrays) -> None:
        """Check the global units of the next group; raise a WireError if they do not fit, or need too much memory.

        Arrays of other layers grow with their number, too, for which the server sends nothing.
        """
        index = len(self._own)
        units = arrays.get("assignment", {}).get("units")
        matched = arrays["group"].get("rows")
        if units is None or matched is None or matched.ndim != 2 or index >= len(self.groups):
            raise WireError("the server sent units of no group of the client's network: use one version of fedhet")
        check_places(units, len(matched), "units")
        own = rows(state, self.groups, index).shape
        if own != (len(units), matched.shape[1]):
            raise WireError(
                f"the server sent {len(units)} units of {matched.shape[1]} weights, but the client's network has "
                f"{own[0]} of {own[1]}: do not change the network during a run"
            )
        sizes = [*widths(state, self.groups)]
        sizes[index] = len(matched)
        entries = sum(map(math.prod, self.groups.shapes(sizes).values()))
        check_room(entries * np.dtype(np.float32).itemsize, "the global units need")

    def _settled_names(self) -> set[str]:
        groups = [self.groups[index] for index in self._own]
        names = {slot.parameter for group in groups for slot in group.rows + group.completes}
        layers = {name.rpartition(".")[0] for name in names}
        kinds = self.groups.kinds.items()
        return names | {name for name, kind in kinds if kind == "statistic" and name.rpartition(".")[0] in layers}

    def phases(self, payload: Payload) -> Sequence[Phase]:
        if self._begins:
            if self._complete and "step" in payload.values:
                units = {group.index: self._own.get(group.index, np.arange(group.width)) for group in self.groups}
                self.use(cut_out(to_arrays(self.client.tensors), self.groups, units))
                self._own = {}
                self._complete = False
            return [Phase(self.client.request.epochs, self.client.optimisation())]
        settled = self._settled_names()
        epochs = self.options.retrain_epochs or self.client.config.local_epochs
        if len(self._own) == len(self.groups):
            epochs *= self.options.last_epochs
        return [Phase(epochs, self._optimisation(), trains=lambda name: name not in settled)]

    def _optimisation(self) -> Optimisation:
        optimisation = self.client.optimisation()
        if len(self._own) < len(self.groups):
            return replace(optimisation, weight_decay=0.0)  # the paper, appendix B
        return replace(optimisation.at(self.options.last_learning_rate), weight_decay=LAST_WEIGHT_DECAY)

    def end(self, payload: Payload) -> Payload:
        client = self.client
        groups = self.groups
        step = payload.values["step"]
        client.memory.clear()
        client.memory |= {f"model/{name}": tensor for name, tensor in client.tensors.items()}
        client.memory |= {f"assignment/{index}": torch.from_numpy(units.copy()) for index, units in self._own.items()}
        names = due(groups, step, statistics=client.config.batch_norm == "aggregate")
        update = to_arrays({name: client.tensors[name] for name in names})
        return Payload({"update": update} | (self.class_counts() if step == len(groups) else {}))
