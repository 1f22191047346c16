"""Client side of FedSimSiam: trains the encoder to predict the projection of one view from another view."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedhet.algorithms.contrast import negative_cosine
from fedhet.client import Loss, Payload, Step, Term
from fedhet.models.representation import Representation
from fedhet.strategies.fedsimsiam import Keys

from .families.contrast import LinearEvaluation, layer


class FedSimSiam(LinearEvaluation[Keys]):
    @classmethod
    def modules(cls, inputs: int, keys: Keys, dtype: torch.dtype) -> Mapping[str, nn.Module]:
        """Return the `projector`, of three layers, and the `predictor`, of two with a bottleneck (section 3)."""
        width = keys.width
        last = nn.Linear(width // 4, width, dtype=dtype)
        projector = [*layer(inputs, width, dtype), *layer(width, width, dtype), *layer(width, width, dtype)[:2]]
        return {
            "projector": nn.Sequential(*projector),
            "predictor": nn.Sequential(*layer(width, width // 4, dtype), last),
        }

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        phi = self.client.representation
        return (Term(distance_of_views, captures={"phi": phi}, phi=phi),)


def distance_of_views(step: Step, phi: Representation) -> Tensor:
    """Return minus the mean cosine of each view's prediction and the other view's projection, in a step."""
    projections = step.beside("projector", phi, step.captured["phi"])
    predictions = step.beside("predictor", phi, projections)
    return negative_cosine(predictions, projections.roll(len(projections) // 2, 0))
