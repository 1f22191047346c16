"""Client side of FedRE: trains with the server's head, and sends one random mix of its mean representations."""

import numpy as np
import torch
from torch import Tensor

from fedhet.messages import Payload

from .fedgh import FedGH


class FedRE(FedGH):
    def end(self, payload: Payload) -> Payload:
        sent = super().end(payload).arrays["prototypes"]
        means, classes = sent["means"], sent["classes"]
        weights = self.uniform(len(classes)).numpy()
        if self.client.privacy:
            # Of noisy sums, the mean of a class with few examples is mostly noise.
            weights = weights * sent["counts"]
        # No row is sent if all classes have too few examples.
        rows = min(len(classes), 1)
        mixed = np.zeros((rows, means.shape[1]))
        labels = np.zeros((rows, self.client.outputs))
        if rows:
            weights = weights / weights.sum()
            mixed[0] = weights @ means.astype(np.float64)
            labels[0, classes] = weights
        return Payload({"prototypes": {"means": mixed.astype(np.float32), "classes": labels.astype(np.float32)}})

    def uniform(self, count: int) -> Tensor:
        """Return numbers from U(0, 1), (count,) float64; at a node with a secret, the server cannot compute them."""
        stream = self.client.order("mixing weights")
        if stream is None:
            return torch.rand(count, dtype=torch.float64, generator=self.client.generator("mixing weights"))
        return torch.special.ndtr(stream.normal(torch.Size([count])))
