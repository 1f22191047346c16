"""Label spreading, client side: its labels, spread over the public inputs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.methods.label_spreading import LabelSpreadingParameters

from ._classical import Classical  # noqa: TID251 - this folder is fedhet.client_apps


class LabelSpreading(Classical[LabelSpreadingParameters]):
    """The client's labels, spread over the neighbour graph of its own and the public inputs (Zhou et al., 2003)."""

    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        """Fit it to both; public examples have no label."""
        from sklearn.semi_supervised import LabelSpreading

        public = self._features(self.client.public.inputs)
        everything = np.concatenate([features, public])
        known = np.concatenate([labels, np.full(len(public), -1)])
        neighbours = min(self.parameters.neighbours, len(everything))
        classifier = LabelSpreading(kernel="knn", n_neighbors=neighbours, alpha=self.parameters.alpha, max_iter=200)
        return _Certain(classifier.fit(everything, known))


class _Certain:
    """Label spreading, with even odds where no label reaches an example instead of a division by zero."""

    def __init__(self, classifier: Any) -> None:
        self.classifier, self.classes_ = classifier, classifier.classes_

    def predict_proba(self, features: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(invalid="ignore", divide="ignore"):
            found: NDArray[Any] = self.classifier.predict_proba(features)
        return np.where(np.isfinite(found), found, 1 / len(self.classes_))
