"""FedAvg, server half: the clients' models are averaged by their numbers of examples (McMahan et al., AISTATS 2017)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedhet.errors import FedhetError
from fedhet.matching import class_weighted_average
from fedhet.methods import fedavg
from fedhet.server import ArraysBy, FederatedStrategy, State, check_class_counts
from fedhet.wire import Reply, Spec, check


@dataclass
class FedAvgState(State):
    """`classes` holds how many examples of each class clients have, by the name of their output layer."""

    classes: ArraysBy = field(default_factory=dict)


class FedAvg(FederatedStrategy[fedavg.FedAvgParameters, FedAvgState]):
    """W(t) = sum_i n_i / n W_i(t), over the clients of round t that have the array: the base's average.

    With `last-layer = classes`, row c of the output layer is sum_i n_ic / n_c W_ic(t), n_ic the examples of class c
    that client i has (FedMA: Wang et al., ICLR 2020, section 3); a class that nobody of the round has is averaged as
    everything else.
    """

    method = fedavg.method
    state_class = FedAvgState

    def welcome(self, client: str, reply: Reply) -> None:
        """Class counts, where the average needs them: one a row of the output layer."""
        if self.parameters.last_layer != "classes":
            return
        head, counts = reply.told.text("head"), reply.arrays.get("classes", {})
        rows = {shape[:1] for shape, _ in _of(reply.report.spec, head).values()}
        if len(rows) != 1:
            raise FedhetError(f"fedavg.last-layer = classes needs a row for each class in all arrays of its {head!r}")
        check(counts, {"counts": (rows.pop(), "int64")}, "its class counts")
        check_class_counts(counts["counts"], reply)
        if other := next((known for known in self.state.classes if head not in self.state.classes[known]), None):
            raise FedhetError(f"its output layer is {head!r}, unlike that of client {other}")
        self.state.classes[client] = {head: counts["counts"]}

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """The average by examples; then that of the output layer by classes, if that is wanted."""
        metrics = super().aggregate_fit(round, replies)
        if self.parameters.last_layer == "classes":
            head = next(iter(self.state.classes[next(iter(replies))]))
            counts = np.stack([self.state.classes[client][head] for client in replies])
            held = counts.any(axis=0)
            for name in _of(self.specs[next(iter(replies))], head):
                average = self.state.model[name].copy()
                own = class_weighted_average([reply.arrays["model"][name] for reply in replies.values()], counts)
                average[held] = own[held]
                self.state.model[name] = average
        return metrics


def _of(spec: Spec, module: str) -> Spec:
    """The arrays of a module."""
    return {name: of for name, of in spec.items() if name.startswith(f"{module}.")}
