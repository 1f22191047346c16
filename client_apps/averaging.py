"""Client sides of FedProx, FedRep, local training, and scikit-learn classifiers that are trained locally."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.client import ClientSide
from fedhet.data import Examples
from fedhet.messages import Payload
from fedhet.methods.included.averaging import ClassicalOptions, FedProxOptions, FedRepOptions, LocalOptions
from fedhet.training import Loss, Phase, Step, Term, Trained


class FedProx(ClientSide[FedProxOptions]):
    """Client side of FedProx: adds mu/2 ||W - W(t-1)||^2 to the loss, for weights W and received weights W(t-1)."""

    takes_any_loop = True

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        start = [parameter.detach().clone() for parameter in self.client.model.parameters()]
        return (Term(proximal, weighted=True, public=True, mu=self.options.mu, start=start),)


def proximal(step: Step, mu: float, start: Sequence[Tensor]) -> Tensor:
    """Return mu/2 times the squared distance of a step's parameters to `start`, their values before training."""
    distances = [(now - then).square().sum() for now, then in zip(step.parameters.values(), start, strict=True)]
    return mu / 2 * torch.stack(distances).sum()


class FedRep(ClientSide[FedRepOptions]):
    """Client side of FedRep: trains the head, then the other layers; after the last round, only the head."""

    takes_any_loop = True

    def phases(self, payload: Payload) -> Sequence[Phase]:
        request, head = self.client.request, f"{self.client.head}."
        body = 0 if request.closing else min(self.options.body_epochs, request.epochs)
        optimisation = self.client.optimisation()
        return [
            Phase(request.epochs - body, optimisation, trains=lambda name: name.startswith(head)),
            Phase(body, optimisation, trains=lambda name: not name.startswith(head)),
        ]

    def end(self, payload: Payload) -> Payload:
        return Payload() if self.client.request.closing else super().end(payload)


class Local(ClientSide[LocalOptions]):
    """Client side of local training, which sends nothing."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        phases = super().phases(payload)
        if self.options.public == "unused":
            return phases
        train, public = self.client.data.train, self.client.public
        assert public.labels is not None  # as the traits say
        inputs, labels = train.at(slice(None))
        both = Examples(torch.cat([inputs, public.inputs]), torch.cat([labels, public.labels]))
        return [replace(phase, examples=both, augmented=True) for phase in phases]


LEAST = 1e-6  # lowest probability of a class, so that the cross entropy of a wrong prediction is finite


class Classical(ClientSide[ClassicalOptions], ABC):
    """Base class of client sides that fit a scikit-learn classifier to the client's examples and train no network."""

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
    """Client side that predicts the class of the client's nearest example (Cover and Hart, 1967)."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.neighbors import KNeighborsClassifier

        return KNeighborsClassifier(1).fit(features, labels)


class LogisticRegression(Classical):
    """Client side that fits a linear classifier with an L2 penalty, or a constant if there is only one class."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.dummy import DummyClassifier
        from sklearn.linear_model import LogisticRegression

        if len(np.unique(labels)) == 1:
            return DummyClassifier().fit(features, labels)
        return LogisticRegression(max_iter=1000).fit(features, labels)


class LabelSpreading(Classical):
    """Client side that spreads labels over a k-NN graph of private and public inputs (Zhou et al., 2003)."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.semi_supervised import LabelSpreading

        public = _flat(self.client.transform(self.client.public.inputs))
        everything = np.concatenate([features, public])
        known = np.concatenate([labels, np.full(len(public), -1)])
        classifier = LabelSpreading(kernel="knn", n_neighbors=min(7, len(everything)), max_iter=200)
        return classifier.fit(everything, known)


def _flat(batch: Tensor) -> NDArray[Any]:
    return batch.detach().flatten(1).to(torch.promote_types(batch.dtype, torch.float32)).cpu().numpy()
