"""Base class of client sides that fit a scikit-learn classifier to the client's examples and train no network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedhet.client import ClientSide, Payload
from fedhet.data.reading import moved
from fedhet.models.estimators import flat, log_probabilities
from fedhet.strategies.families.classifiers import Keys
from fedhet.training import Phase, Trained


class Classifier(ClientSide[Keys], ABC):
    """Base class of client sides that fit a scikit-learn classifier to the client's examples and train no network."""

    takes_estimators = True  # It needs only the number of outputs of the client's model.
    trains_network = False

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_classes()
        return Payload()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        return ()

    def end(self, payload: Payload) -> Payload:
        inputs, labels = self.client.data.train.at(slice(None))
        loss = self.client.task.loss(self.evaluate("trained")(self.client.transform(inputs)), labels)
        self.client.trained = Trained(float(loss), epochs=1)
        return Payload()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        outputs = self.client.task.outputs.scores(self.client.read(self.client.data.train.inputs[:1]))
        return lambda batch: moved(log_probabilities(self._classifier, flat(batch), outputs.shape[-1]), outputs.device)

    @cached_property
    def _classifier(self) -> Any:
        inputs, labels = self.client.data.train.at(slice(None))
        return self.fitted(flat(self.client.transform(inputs)), labels.cpu().numpy())

    @abstractmethod
    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Return a scikit-learn classifier fitted to features (n, d) and labels (n,)."""
