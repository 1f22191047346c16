"""Base class of client sides that fit a scikit-learn classifier to the client's examples and train no network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.client import ClientSide
from fedhet.messages import Payload
from fedhet.strategies.families.classifiers import Keys
from fedhet.training import Phase, Trained

LEAST = 1e-6
"""Lowest probability of a class, so that the cross entropy of a wrong prediction is finite."""


class Classifier(ClientSide[Keys], ABC):
    """Base class of client sides that fit a scikit-learn classifier to the client's examples and train no network."""

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
        outputs = self.client.model(self.client.transform(self.client.data.train.inputs[:1]))
        outputs = self.client.task.outputs.scores(outputs)
        columns = torch.as_tensor(self._classifier.classes_, device=outputs.device)

        def predict(batch: Tensor) -> Tensor:
            with np.errstate(invalid="ignore", divide="ignore"):  # nan from label spreading
                fitted = torch.from_numpy(self._classifier.predict_proba(flat(batch))).to(outputs)
            fitted = torch.where(fitted.isfinite(), fitted, 1 / len(columns))
            probabilities = torch.full((len(batch), outputs.shape[-1]), LEAST).to(outputs)
            probabilities[:, columns] = fitted.clamp_min(LEAST)
            return probabilities.log()

        return predict

    @cached_property
    def _classifier(self) -> Any:
        inputs, labels = self.client.data.train.at(slice(None))
        return self.fitted(flat(self.client.transform(inputs)), labels.cpu().numpy())

    @abstractmethod
    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Return a scikit-learn classifier fitted to features (n, d) and labels (n,)."""


def flat(batch: Tensor) -> NDArray[Any]:
    """Return inputs (n, ...) as floating-point vectors (n, d) in NumPy."""
    return batch.detach().flatten(1).to(torch.promote_types(batch.dtype, torch.float32)).cpu().numpy()
