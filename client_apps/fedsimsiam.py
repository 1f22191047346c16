"""Client side of FedSimSiam: trains the encoder to predict the projection of one view from another view."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedhet.algorithms.contrast import negative_cosine
from fedhet.messages import Payload
from fedhet.models.representation import Representation
from fedhet.strategies.fedsimsiam import Keys
from fedhet.training import Loss, Step, Term

from .families.contrast import LinearEvaluation


class FedSimSiam(LinearEvaluation[Keys]):
    @classmethod
    def modules(cls, inputs: int, keys: Keys, dtype: torch.dtype) -> Mapping[str, nn.Module]:
        """Return the `projector`, of three layers, and the `predictor`, of two with a bottleneck (section 3)."""
        width = keys.width
        last = nn.Linear(width // 4, width, dtype=dtype)
        projector = [*_layer(inputs, width, dtype), *_layer(width, width, dtype), *_layer(width, width, dtype)[:2]]
        return {
            "projector": nn.Sequential(*projector),
            "predictor": nn.Sequential(*_layer(width, width // 4, dtype), last),
        }

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        phi = self.client.representation
        return (Term(distance_of_views, captures={"phi": phi}, phi=phi),)


def _layer(inputs: int, outputs: int, dtype: torch.dtype) -> list[nn.Module]:
    linear = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    return [linear, nn.BatchNorm1d(outputs, dtype=dtype), nn.ReLU()]


def distance_of_views(step: Step, phi: Representation) -> Tensor:
    """Return minus the mean cosine of each view's prediction and the other view's projection, in a step."""
    projections = step.beside("projector", phi, step.captured["phi"])
    predictions = step.beside("predictor", phi, projections)
    return negative_cosine(predictions, projections.roll(len(projections) // 2, 0))
