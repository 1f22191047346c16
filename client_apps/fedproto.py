"""FedProto, client side: prototypes of classes in the space of the representation (Tan et al., AAAI 2022)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedhet.messages import Payload
from fedhet.methods.included.prototypes import FedProtoOptions
from fedhet.training import Loss, Phase, Step, Term, forward

from ._prototypes import OneWidth  # noqa: TID251 - this folder is fedhet.client_apps


class FedProto(OneWidth[FedProtoOptions]):
    """Trains representations (Phi) towards global prototypes of classes; sends the client's mean Phi of each class."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return one phase that captures the representation Phi of every batch."""
        captures = {"phi": self.client.representation}
        return [replace(phase, captures=captures) for phase in super().phases(payload)]

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the term lambda * mean_d (Phi(x)_d - C_y,d)^2 for examples with a global prototype C_y of label y."""
        if not len(self.classes):
            return ()
        return (Term(distance, row_of=self.rows(), prototypes=self.prototypes, weight=self.options.weight),)

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """Return a function that scores classes by minus squared distances to prototypes, or else the network.

        The network is returned if there are no prototypes to predict by.
        """
        rows = self.candidates()
        if not len(rows):
            return super().evaluate(when)
        candidates, prototypes = self.classes[rows], self.prototypes[rows]
        data = self.client.data
        evaluated = [part.labels for part in (data.test, data.validation, data.common) if part is not None]
        # At least two, since a single column would be one logit for two classes.
        classes = max(2, self.client.outputs, 1 + int(torch.cat([candidates, *evaluated]).max()))

        def nearest(inputs: Tensor) -> Tensor:
            phi, _ = forward(self.client.model, inputs, until=self.until, learns=False)
            distances = torch.cdist(phi.float(), prototypes).square()
            # Other classes are far below all candidates, yet finite, so that the loss is a number.
            scores = torch.full((len(phi), classes), -1e4, device=phi.device)
            scores[:, candidates] = -distances
            return scores

        return nearest

    def candidates(self) -> Tensor:
        """Return the rows of `prototypes` to predict by, (candidates,) int64; empty to predict by the head."""
        known = torch.arange(len(self.classes), device=self.client.device)
        if self.options.predict == "prototype":
            return known[torch.isin(self.classes, self.client.data.train.labels)]
        return known if self.options.predict == "all-prototypes" else known[:0]


def distance(step: Step, row_of: Tensor, prototypes: Tensor, weight: float) -> Tensor:
    """Return the weighted mean squared distance of Phi to the prototypes of the examples' classes."""
    rows = row_of[step.labels]
    known = (rows >= 0).float()[:, None]
    share = known.mean().clamp(min=1 / len(rows))
    apart = ((step.captured["phi"] - prototypes[rows]) * known).square().mean()
    return weight * (apart / share)
