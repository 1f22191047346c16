"""Models with the interface of scikit-learn's estimators (`fit`, `predict_proba` or `predict`) in place of networks."""

import hashlib
from collections.abc import Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.errors import ModelError

LEAST = 1e-6
"""Weight of equal probabilities in those of an estimator, so that the cross entropy of a wrong prediction is finite."""


def is_estimator(model: Any) -> bool:
    """Return whether an object can be fitted to examples and predicts classes or numbers, and is no network."""
    # Some of scikit-learn's predict only once they are fitted, but their classes have the method.
    parts = model, type(model)
    methods = {name for name in ("fit", "predict_proba", "predict") for p in parts if callable(getattr(p, name, None))}
    return "fit" in methods and len(methods) > 1 and not isinstance(model, nn.Module | type)


class Estimator(nn.Module):
    """An estimator as a module without parameters.

    Its outputs are logarithms of class probabilities (n, outputs), for a binary task the logit (n, 1), or predicted
    numbers (n, outputs). Before it is fitted, they are zeros or, for numbers, `start`.

    Attributes:
        estimator: the estimator, without what it has learnt.
        outputs: number of classes or of predicted numbers.
        meaning: what the outputs are: `classes`, `logit` or `numbers`.
        start: the numbers (outputs,) that are predicted before the first fit.
        columns: names of the columns of inputs (n, d), if they have names; the estimator then gets a data frame.
    """

    def __init__(self, estimator: Any) -> None:
        super().__init__()
        self.estimator = _unfitted(estimator)
        self.outputs = 0
        self.meaning = "classes"
        self.start = torch.zeros(1)
        self.columns: tuple[str, ...] = ()
        self.forget()

    @property
    def title(self) -> str:
        """The name of the estimator's class; for a pipeline, that of its last step."""
        return type(self._last).__name__

    @property
    def _last(self) -> Any:
        return getattr(self.estimator, "steps", [("", self.estimator)])[-1][1]

    def _get_name(self) -> str:
        return self.title

    def extra_repr(self) -> str:
        """Return the estimator with its parameters."""
        return repr(self.estimator)

    def seed(self, seed: int) -> None:
        """Set each parameter `random_state` that is None, also those of a pipeline's steps."""
        parameters: Mapping[str, Any] = getattr(self.estimator, "get_params", dict)()
        chosen = {name for name, value in parameters.items() if value is None and name.endswith("random_state")}
        if chosen:
            self.estimator.set_params(**dict.fromkeys(chosen, seed % 2**32))

    def forget(self) -> None:
        """Return to the state before the first fit."""
        self._fitted: Any = None
        self._classes: NDArray[Any] | None = None
        self._key = ""

    def fit(self, inputs: Tensor, labels: Tensor, soft: tuple[Tensor, Tensor] | None = None, *, threads: int) -> None:
        """Fit the estimator to examples, forgetting others.

        Args:
            inputs: (n, ...) floats.
            labels: (n,) classes, or (n, outputs) numbers.
            soft: inputs (m, ...) and their class probabilities (m, outputs). Each example is repeated for each class,
                with its probability as weight; if the estimator takes no weights, it has its most probable class.
            threads: number of threads of libraries that compute in several.

        Raises:
            ModelError: the estimator refuses the examples, or does not predict classes where labels are classes.
        """
        from threadpoolctl import threadpool_limits

        features = flat(inputs)
        targets = labels.cpu().numpy()
        weights: dict[str, NDArray[Any]] = {}
        if soft is not None and len(soft[0]):
            rows, values, weight = _copies(*soft, weighted=bool(self._weights))
            features = np.concatenate([features, flat(soft[0])[rows]])
            targets = np.concatenate([targets, values])
            if self._weights:
                weights = {self._weights: np.concatenate([np.ones(len(labels)), weight])}
        arrays = [features, targets, *weights.values()]
        key = hashlib.blake2b(b"".join(array.tobytes() for array in arrays)).hexdigest()
        if key == self._key:  # an equal fit
            return
        with threadpool_limits(threads):
            try:
                new, classes = self._fit(self._table(features), targets, weights)
            except Exception as error:  # an estimator of the user's may raise anything
                raise ModelError(f"fitting {self.title} raised {type(error).__name__}: {error}") from error
        if self.meaning != "numbers" and not hasattr(new, "classes_"):
            raise ModelError(f"{self.title} has no classes_ after fit, but the labels are classes: return a classifier")
        self._fitted, self._classes, self._key = new, classes, key

    def _fit(self, table: Any, labels: NDArray[Any], weights: Mapping[str, Any]) -> tuple[Any, NDArray[Any] | None]:
        """Return a fitted estimator, and the classes by its numbers for them if these are other ones."""
        try:
            return fitted(_unfitted(self.estimator), table, labels, weights), None
        except ValueError as error:
            if "Invalid classes inferred" not in str(error):
                raise
        # XGBoost numbers the classes that it sees from 0 and, unlike others, refuses other numbers.
        classes, numbers = np.unique(labels, return_inverse=True)
        return fitted(_unfitted(self.estimator), table, numbers, weights), classes

    def _table(self, features: NDArray[Any]) -> Any:
        if features.shape[1] != len(self.columns):
            return features
        try:
            from pandas import DataFrame
        except ImportError:  # the names are those of another library's table
            return features
        return DataFrame(features, columns=[*self.columns])

    @property
    def _weights(self) -> str:
        """The name by which `fit` takes weights of examples, empty if it takes none."""
        if "sample_weight" not in signature(self._last.fit).parameters:
            return ""
        return "sample_weight" if self._last is self.estimator else f"{self.estimator.steps[-1][0]}__sample_weight"

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs (n, outputs) for inputs (n, ...), or (n, 1) for a logit."""
        width = 1 if self.meaning == "logit" else self.outputs
        if self._fitted is None:
            return self.start.expand(len(inputs), width).to(inputs.device)
        if self.meaning == "numbers":
            predicted = np.asarray(self._fitted.predict(self._table(flat(inputs))), dtype=np.float64)
            return torch.from_numpy(predicted.reshape(len(inputs), width)).to(inputs.device)
        table = self._table(flat(inputs))
        logs = log_probabilities(self._fitted, table, self.outputs, self._classes).to(inputs.device)
        return logs if self.meaning == "classes" else logs[:, 1:] - logs[:, :1]

    def undecided(self, inputs: Tensor) -> bool:
        """Return whether `predict` chooses another class than the most probable one for some inputs (n, ...)."""
        predict = getattr(self._fitted, "predict", None)
        if self.meaning == "numbers" or predict is None:
            return False
        table = self._table(flat(inputs))
        chosen = np.asarray(self._fitted.classes_)[_probabilities(self._fitted, table).argmax(1)]
        # CatBoost's predictions are a column.
        return bool((np.ravel(predict(table)) != chosen).any())


def _unfitted(estimator: Any) -> Any:
    from sklearn.base import clone  # takes a second to import

    return clone(estimator, safe=False)


def fitted(
    estimator: Any, features: Any, labels: NDArray[Any], weights: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Return `estimator` fitted to features (n, d), or a constant if all labels are of one class.

    `weights` has the weights (n,) of the examples by the name of `fit`'s argument, or is empty.
    """
    from sklearn.dummy import DummyClassifier

    if labels.dtype.kind in "biu" and len(np.unique(labels)) == 1:
        return DummyClassifier().fit(features, labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    return estimator.fit(features, labels, **weights)


def log_probabilities(estimator: Any, features: Any, classes: int, numbered: NDArray[Any] | None = None) -> Tensor:
    """Return the logarithms (n, classes), in float64, of a fitted classifier's probabilities for features (n, d).

    `numbered` has the classes by the classifier's numbers for them, if these are other ones.

    The mean with equal probabilities, whose weight is `LEAST`, keeps the order of small probabilities and their ties.
    All add up to 1, also those in float32. Without `predict_proba`, scores of `decision_function` are taken for logits
    if their order agrees with `predict`.
    """
    columns = torch.as_tensor(np.asarray(estimator.classes_).astype(np.int64))
    if numbered is not None:
        columns = torch.as_tensor(numbered)[columns]
    probabilities = torch.zeros(len(features), classes, dtype=torch.float64)
    values = torch.from_numpy(_probabilities(estimator, features)).to(probabilities)
    values = torch.where(values.isfinite(), values, 1 / len(columns))
    probabilities[:, columns] = values / values.sum(1, keepdim=True).clamp(min=LEAST)
    return (LEAST / classes + (1 - LEAST) * probabilities).log()


def _probabilities(estimator: Any, features: Any) -> NDArray[Any]:
    """Return a fitted classifier's probabilities (n, C) of its C classes for features (n, d)."""
    if callable(getattr(estimator, "predict_proba", None)):
        with np.errstate(invalid="ignore", divide="ignore"):  # nan from label spreading
            return np.asarray(estimator.predict_proba(features))
    predicted = np.ravel(estimator.predict(features))[:, None] == estimator.classes_
    if not callable(getattr(estimator, "decision_function", None)):
        return predicted
    scores = torch.from_numpy(np.asarray(estimator.decision_function(features), dtype=np.float64))
    if scores.ndim == 1:  # of two classes, that of the second
        scores = torch.stack([torch.zeros_like(scores), scores], 1)
    probabilities = scores.softmax(1).numpy()
    agrees = predicted[np.arange(len(predicted)), probabilities.argmax(1)]
    return np.where(agrees[:, None], probabilities, predicted)


def _copies(inputs: Tensor, targets: Tensor, *, weighted: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the rows, classes and weights of the copies of examples with class probabilities `targets` (m, C)."""
    probabilities = targets.cpu().numpy()
    if not weighted:
        return np.arange(len(probabilities)), probabilities.argmax(1), np.ones(len(probabilities))
    rows, classes = np.nonzero(probabilities)
    return rows, classes, probabilities[rows, classes]


def flat(batch: Tensor) -> NDArray[Any]:
    """Return inputs (n, ...) as floating-point vectors (n, d) in NumPy, in float64 if float32 lacks their digits."""
    least = torch.float64 if batch.dtype in (torch.int32, torch.int64) else torch.float32
    return batch.detach().reshape(len(batch), -1).to(torch.promote_types(batch.dtype, least)).cpu().numpy()
