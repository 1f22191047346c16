"""Class-average, server side: FedAvg, but rows of the output layer are weighted by the examples of their class.

Row c of the output layer is sum_i n_ic / n_c W_ic(t), where client i has n_ic examples of class c, as in FedMA (Wang
et al., ICLR 2020, section 3). A class that no client of the round has is averaged like everything else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedhet.errors import FedhetError
from fedhet.matching import class_weighted_average
from fedhet.methods import class_average
from fedhet.server import ArraysBy, Common, FederatedStrategy, State, class_counts
from fedhet.wire import Reply, Spec


@dataclass
class ClassAverageState(State):
    """`classes` holds the number of examples of each class, by client and name of its output layer."""

    classes: ArraysBy = field(default_factory=dict)


class ClassAverage(FederatedStrategy[class_average.ClassAverageParameters, ClassAverageState]):
    """Averages the clients' models by examples, and their output layers by examples of each class."""

    method = class_average.method
    state_class = ClassAverageState

    def common(self, reply: Reply) -> Mapping[str, Common]:
        """Return the name of the output layer."""
        return {"output layer": Common(reply.values.text("head"), "name the same module as head")}

    def admit(self, reply: Reply) -> None:
        """Keep the client's class counts, one for each row of the output layer."""
        head = reply.values.text("head")
        rows = {shape[:1] for shape, _ in _of(reply.report.spec, head).values()}
        if len(rows) != 1 or () in rows:
            raise FedhetError(f"class-average needs a row for each class in all arrays of its {head!r}")
        self.state.classes[reply.client] = {head: class_counts(reply, *rows.pop())}

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the models by examples, then the output layer by examples of each class."""
        metrics = super().aggregate_fit(round, replies)
        first = next(iter(replies))
        head = next(iter(self.state.classes[first]))
        counts = np.stack([self.state.classes[client][head] for client in replies])
        held = counts.any(axis=0)
        for name in _of(self.federation.specs[first], head):
            average = self.state.model[name].copy()
            rows = class_weighted_average([reply.arrays["model"][name] for reply in replies.values()], counts)
            average[held] = rows[held]
            self.state.model[name] = average
        return metrics


def _of(spec: Spec, module: str) -> Spec:
    """Return the specification of a module's arrays."""
    return {name: of for name, of in spec.items() if name.startswith(f"{module}.")}
