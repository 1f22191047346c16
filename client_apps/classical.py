"""Classifiers from scikit-learn, client side: baselines without a network and without communication."""

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
from fedhet.methods.included.averaging import ClassicalOptions
from fedhet.training import Phase, Trained

LEAST = 1e-6
"""The lowest probability of a class, so that the cross entropy of a wrong prediction is finite."""


class Classical(ClientSide[ClassicalOptions], ABC):
    """Fits a scikit-learn classifier to the client's examples instead of training the client's network."""

    can_be_batched = False

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
        """Return a function from a batch to the classifier's log probabilities, uniform where they are not finite."""
        outputs = self.client.model(self.client.transform(self.client.data.train.inputs[:1]))
        outputs = self.client.task.outputs.scores(outputs)
        columns = torch.as_tensor(self._classifier.classes_, device=outputs.device)

        def predict(batch: Tensor) -> Tensor:
            with np.errstate(invalid="ignore", divide="ignore"):  # nan from label spreading
                known = torch.from_numpy(self._classifier.predict_proba(_flat(batch))).to(outputs)
            known = torch.where(known.isfinite(), known, 1 / len(columns))
            probabilities = torch.full((len(batch), outputs.shape[-1]), LEAST).to(outputs)
            probabilities[:, columns] = known.clamp_min(LEAST)
            return probabilities.log()

        return predict

    @cached_property
    def _classifier(self) -> Any:
        inputs, labels = self.client.data.train.at(slice(None))
        return self.fitted(_flat(self.client.transform(inputs)), labels.cpu().numpy())

    @abstractmethod
    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Return a scikit-learn classifier fitted to features (n, d) and labels (n,)."""


class NearestNeighbour(Classical):
    """Predicts the class of the client's nearest example by Euclidean distance (Cover and Hart, 1967)."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.neighbors import KNeighborsClassifier

        return KNeighborsClassifier(1).fit(features, labels)


class LogisticRegression(Classical):
    """Predicts by a linear classifier with an L2 penalty, or the class of all examples if there is only one."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.dummy import DummyClassifier
        from sklearn.linear_model import LogisticRegression

        if len(np.unique(labels)) == 1:
            return DummyClassifier().fit(features, labels)
        return LogisticRegression(max_iter=1000).fit(features, labels)


class LabelSpreading(Classical):
    """Spreads the client's labels over a nearest-neighbour graph of private and public inputs (Zhou et al., 2003)."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.semi_supervised import LabelSpreading

        public = _flat(self.client.transform(self.client.public.inputs))
        everything = np.concatenate([features, public])
        known = np.concatenate([labels, np.full(len(public), -1)])
        classifier = LabelSpreading(kernel="knn", n_neighbors=min(7, len(everything)), max_iter=200)
        return classifier.fit(everything, known)


def _flat(batch: Tensor) -> NDArray[Any]:
    return batch.detach().flatten(1).to(torch.promote_types(batch.dtype, torch.float32)).cpu().numpy()
