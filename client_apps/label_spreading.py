"""Client side that spreads labels over a k-NN graph of private and public inputs (Zhou et al., 2003)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.models.estimators import flat

from .families.classifiers import Classifier


class LabelSpreading(Classifier):
    def fitted(self, features: NDArray[Any], labels: NDArray[np.int64]) -> Any:
        from sklearn.semi_supervised import LabelSpreading

        public = flat(self.client.transform(self.client.public.inputs))
        everything = np.concatenate([features, public])
        targets = np.concatenate([labels, np.full(len(public), -1)])
        classifier = LabelSpreading(kernel="knn", n_neighbors=min(7, len(everything)), max_iter=200)
        return classifier.fit(everything, targets)
