"""Classical learning alone, client side: scikit-learn on a client's own examples, with no network and no peers.

The controls from outside: a method for networks that does not beat them has not shown that networks, or peers, help.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.client import ClientSide
from fedhet.learning import Phase, Trained
from fedhet.methods._classical import ClassicalParameters
from fedhet.wire import Payload

P = TypeVar("P", bound=ClassicalParameters)

LEAST = 1e-6
"""The lowest probability of a class, so that the cross entropy of a wrong prediction is finite."""


class Classical(ClientSide[P]):
    """Trains no network; predictions are those of a classifier of inputs."""

    def handshake(self, payload: Payload) -> Payload:
        """Nothing is told.

        Raises:
            DataError: examples have no single class.
        """
        self.client.check_classes()
        return Payload()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """None."""
        return ()

    def end(self, payload: Payload) -> Payload:
        """Nothing is sent; the training loss is that of the classifier on the client's own examples."""
        train, task = self.client.data.train, self.client.task
        loss = task.loss(self.evaluate("trained")(self.client.transform(train.inputs[:])), train.labels)
        self.client.trained = Trained(float(loss), epochs=1)
        return Payload()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        """Log probabilities (n, classes) by the classifier."""
        outputs = self.client.model(self.client.transform(self.client.data.train.inputs[:1]))
        columns = torch.as_tensor(self._classifier.classes_, device=outputs.device)

        def predict(batch: Tensor) -> Tensor:
            known = torch.from_numpy(self._classifier.predict_proba(_flat(batch))).to(outputs)
            probabilities = torch.full((len(batch), outputs.shape[-1]), LEAST).to(outputs)
            probabilities[:, columns] = known.clamp_min(LEAST)
            return probabilities.log()

        return predict

    @cached_property
    def _classifier(self) -> Any:
        train = self.client.data.train
        return self.fitted(self._features(train.inputs[:]), train.labels.cpu().numpy())

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """A classifier of scikit-learn, fitted to the client's features (n, d) and labels (n,)."""
        raise NotImplementedError

    def _features(self, inputs: Tensor) -> NDArray[Any]:
        return _flat(self.client.transform(inputs))


def _flat(batch: Tensor) -> NDArray[Any]:
    return batch.detach().flatten(1).cpu().numpy()
