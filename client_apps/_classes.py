"""Vectors by class, made and looked up, for FedProto and FD."""

import logging
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedhet.client import Client, ClientSide
from fedhet.client.side import P
from fedhet.data.reading import LazyInputs
from fedhet.representations import Representation
from fedhet.wire import Payload, to_arrays, to_tensor

log = logging.getLogger("flwr").getChild("fedhet")


class ByClass(ClientSide[P], ABC):
    """Sends its own mean vector of each class, and receives the mean over clients.

    Attributes:
        classes: (k,) int64, those that have a global vector.
        prototypes: (k, width), the global vectors.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.classes, self.prototypes = torch.empty(0, dtype=torch.long), torch.empty(0)

    @property
    @abstractmethod
    def until(self) -> Representation | None:
        """Whether the vectors (n, width) of n inputs are Phi; else they are the network's outputs."""

    def handshake(self, payload: Payload) -> Payload:
        """The width of the vectors.

        Raises:
            DataError: examples have no single class.
        """
        self.client.check_classes()
        return Payload(values={"width": self._vectors_of(self.client.data.train.inputs[:2]).shape[1]})

    def begin(self, payload: Payload) -> None:
        """The global vectors."""
        if sent := payload.arrays.get("prototypes"):
            self.classes = to_tensor(sent["classes"]).to(self.client.device)
            self.prototypes = to_tensor(sent["means"]).to(self.client.device)

    def rows(self) -> Tensor:
        """For each class its row among the global vectors, (classes,) int64; -1 where it has none."""
        count = 1 + int(torch.cat([self.classes, self.client.data.train.labels]).max())
        row_of = torch.full((count,), -1, device=self.client.device)
        row_of[self.classes] = torch.arange(len(self.classes), device=self.client.device)
        return row_of

    def end(self, payload: Payload) -> Payload:
        """The mean vector of each class that this client holds, and how many examples it is over.

        Means over fewer examples than the node asks for stay here.
        """
        train = self.client.data.train
        vectors = self._vectors_of(train.inputs)
        classes, rows, counts = train.labels.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(classes), vectors.shape[1], device=vectors.device).index_add_(0, rows, vectors)
        enough = counts >= self.client.least
        if few := classes[~enough].tolist():
            log.warning(
                "client %s keeps the means of classes %s, of which it has fewer than %d examples (min-examples)",
                *(self.client.name, few, self.client.least),
            )
        means = {"means": sums / counts[:, None], "classes": classes, "counts": counts}
        return Payload({"prototypes": to_arrays({name: of_all[enough] for name, of_all in means.items()})})

    def _vectors_of(self, inputs: Tensor | LazyInputs) -> Tensor:
        return self.client.read(inputs, until=self.until).float()
