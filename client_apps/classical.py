"""The methods of scikit-learn, client side: a client's own examples, no network and no peers.

The controls from outside: a method for networks that does not beat them has not shown that networks, or peers, help.
"""

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
from fedhet.methods.included._classical import ClassicalParameters
from fedhet.training import Phase, Trained

LEAST = 1e-6
"""The lowest probability of a class, so that the cross entropy of a wrong prediction is finite."""


class Classical(ClientSide[ClassicalParameters], ABC):
    """Trains no network; a classifier of inputs predicts."""

    def handshake(self, payload: Payload) -> Payload:
        """Return nothing; raises DataError where examples have no single class."""
        self.client.check_classes()
        return Payload()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """None."""
        return ()

    def end(self, payload: Payload) -> Payload:
        """Return nothing; the training loss is that of the classifier on the client's own examples."""
        inputs, labels = self.client.data.train.at(slice(None))
        loss = self.client.task.loss(self.evaluate("trained")(self.client.transform(inputs)), labels)
        self.client.trained = Trained(float(loss), epochs=1)
        return Payload()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        """Return the classifier's log probabilities (n, classes); uniform ones if it gives none."""
        outputs = self.client.model(self.client.transform(self.client.data.train.inputs[:1]))
        outputs = self.client.task.outputs.scores(outputs)
        columns = torch.as_tensor(self._classifier.classes_, device=outputs.device)

        def predict(batch: Tensor) -> Tensor:
            with np.errstate(invalid="ignore", divide="ignore"):  # label spreading, where no label reaches an example
                known = torch.from_numpy(self._classifier.predict_proba(_flat(batch))).to(outputs)
            known = torch.where(known.isfinite(), known, 1 / len(columns))
            probabilities = torch.full((len(batch), outputs.shape[-1]), LEAST).to(outputs)
            probabilities[:, columns] = known.clamp_min(LEAST)
            return probabilities.log()

        return predict

    @cached_property
    def _classifier(self) -> Any:
        inputs, labels = self.client.data.train.at(slice(None))
        return self.fitted(self._features(inputs), labels.cpu().numpy())

    @abstractmethod
    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Return a classifier of scikit-learn, fitted to the client's features (n, d) and labels (n,)."""

    def _features(self, inputs: Tensor) -> NDArray[Any]:
        return _flat(self.client.transform(inputs))


class NearestNeighbour(Classical):
    """The class of the nearest of the client's own examples, by Euclidean distance of inputs (Cover and Hart, 1967)."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Keep the examples."""
        from sklearn.neighbors import KNeighborsClassifier

        return KNeighborsClassifier(1).fit(features, labels)


class LogisticRegression(Classical):
    """A linear classifier of inputs, with an L2 penalty."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Fit it; a client of one class says that class."""
        from sklearn.dummy import DummyClassifier
        from sklearn.linear_model import LogisticRegression

        if len(np.unique(labels)) == 1:
            return DummyClassifier().fit(features, labels)
        return LogisticRegression(max_iter=1000).fit(features, labels)


class LabelSpreading(Classical):
    """The client's labels, spread over the neighbour graph of its own and the public inputs (Zhou et al., 2003)."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Fit it to both; public examples have no label."""
        from sklearn.semi_supervised import LabelSpreading

        public = self._features(self.client.public.inputs)
        everything = np.concatenate([features, public])
        known = np.concatenate([labels, np.full(len(public), -1)])
        classifier = LabelSpreading(kernel="knn", n_neighbors=min(7, len(everything)), max_iter=200)
        return classifier.fit(everything, known)


def _flat(batch: Tensor) -> NDArray[Any]:
    return batch.detach().flatten(1).to(torch.promote_types(batch.dtype, torch.float32)).cpu().numpy()
