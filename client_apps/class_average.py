"""Class-average, client side: FedAvg, with the numbers of examples of each class and a rate of the last round."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedhet.client import Client, ClientSide
from fedhet.errors import DataError, ModelError
from fedhet.learning import Phase
from fedhet.methods.class_average import ClassAverageParameters
from fedhet.models.arrays import tied_names
from fedhet.wire import Arrays, Payload


class ClassAverage(ClientSide[ClassAverageParameters]):
    """One phase of training; the last round's rate may be another."""

    def handshake(self, payload: Payload) -> Payload:
        """Return the numbers of examples of each class, and the name of the layer whose rows the classes are."""
        client = self.client
        rows = next((name for name in client.tensors if name.startswith(f"{client.head}.")), None)
        client.check_classes(outputs=True)
        if client.task.name != "classification" or rows is None:
            raise DataError(
                f"client {client.name}: class-average needs examples of one class each and an output layer with weights"
            )
        tied = {name: first for pair in tied_names(client.model).items() for name, first in (pair, pair[::-1])}
        if other := next(
            (name for name in client.tensors if name in tied and name.startswith(f"{client.head}.")), None
        ):
            raise ModelError(
                f"class-average averages the output layer by classes, and its {other} is tied to {tied[other]}, which "
                "is averaged otherwise: use fedavg"
            )
        return Payload({"classes": class_counts(client, rows)}, {"head": client.head})

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """One phase; at the last rate in the last round, and in the closing one behind it."""
        phases, rate = super().phases(payload), self.parameters.last_learning_rate
        if self.client.request.round < self.client.config.rounds:
            return phases
        return [replace(phase, optimisation=phase.optimisation.at(rate)) for phase in phases]


def class_counts(client: Client, output: str) -> Arrays:
    """`counts`, (classes,) int64: a client's examples of each class, which is a row of this array of its network."""
    classes = client.tensors[output].shape[0]
    labels = client.data.train.labels.flatten().cpu().numpy()
    return {"counts": np.bincount(labels, minlength=classes).astype(np.int64)}
