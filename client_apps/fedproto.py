"""Client side of FedProto and FedTGP: trains Phi towards global prototypes, and sends the mean Phi of each class."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fedhet.client import Loss, Payload, Step, Term
from fedhet.models.representation import Representation
from fedhet.strategies.fedproto import Keys

from .families.by_class import ByClass, SameWidth


class FedProto(SameWidth[Keys], ByClass[Keys]):
    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        if not len(self.classes):
            return ()
        phi = {"phi": self.client.representation}
        rows = self.rows()
        weight = self.options.weight
        term = Term(distance, captures=phi, weighted=True, row_of=rows, prototypes=self.prototypes, weight=weight)
        return (term,)

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        data = self.client.data
        by = self.options.predict
        chosen = torch.full_like(self.classes, by != "head", dtype=torch.bool)
        if by == "prototype" and not self.client.privacy:  # which classes the client has is private
            chosen = torch.isin(self.classes, data.train.labels)
        if not chosen.any():
            return super().evaluate(when)
        candidates = self.classes[chosen]
        evaluated = [part.labels for part in (data.test, data.validation, data.common) if part is not None]
        # At least two, since a single column would be one logit for two classes.
        classes = max(2, self.client.outputs, 1 + int(torch.cat([candidates, *evaluated]).max()))
        rows = torch.full((classes,), -1, device=candidates.device)
        rows[candidates] = torch.arange(len(candidates), device=candidates.device)
        return ByPrototype(self.client.representation, self.prototypes[chosen], rows)

    def loaded(self, beside: Mapping[str, Tensor]) -> nn.Module:
        return ByPrototype(self.client.representation, **beside)


class ByPrototype(nn.Module):
    """A network that predicts by the nearest prototype: minus squared distances of its `representation` are scores.

    For a network with one output, the difference of both classes' scores is the logit of a binary task.
    `rows` (classes,) are the classes' rows in `prototypes` (k, d); classes with -1 have none, and are never the best.
    """

    prototypes: Tensor
    rows: Tensor

    def __init__(self, representation: Representation, prototypes: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.network = representation.model
        self._representation = representation
        self.site = representation.site  # where a batch of networks has its representations
        self.register_buffer("prototypes", prototypes)
        self.register_buffer("rows", rows)

    # A hook joins named inputs into `inputs`. They are in the signature for torch.export, which reads it.
    def forward(self, inputs: Tensor | None = None, **named: Tensor) -> Tensor:
        with self._representation.capture() as phi:  # torch.export cannot trace a pass that ends before the head
            outputs = self.network(inputs)
        scores = self.scores(phi())
        # The logit of a binary task, as from the network.
        return scores.diff(dim=1) if outputs.shape[1:] == (1,) else scores

    def scores(self, phi: Tensor) -> Tensor:
        """Return scores (n, classes) for representations (n, d)."""
        # In this mode, rounding does not depend on the number of examples in the batch.
        mode = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(phi.float(), self.prototypes, compute_mode=mode).square()
        # Other classes are far below all candidates, yet finite, so that the loss is a number.
        lowest = (-2 * distances.amax(1, keepdim=True)).clamp(max=-1e4)
        return torch.where(self.rows >= 0, -distances[:, self.rows], lowest)


def distance(step: Step, row_of: Tensor, prototypes: Tensor, weight: float) -> Tensor:
    """Return `weight` times the mean squared distance of a step's representations to the prototypes of the labels.

    `row_of` (classes,) has the row of each class in `prototypes` (k, width), or -1 for a class without a prototype; its
    examples are left out of the mean.
    """
    rows = row_of[step.labels]
    in_mean = (rows >= 0).float()
    apart = step.mean(((step.captured["phi"] - prototypes[rows]) * in_mean[:, None]).square().mean(1))
    return weight * (apart / step.mean(in_mean).clamp(min=1 / len(rows)))
