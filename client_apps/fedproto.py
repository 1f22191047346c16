"""FedProto, client half: prototypes of classes in the space of the representation (Tan et al., AAAI 2022)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.client import Client, ClientHalf
from fedhet.config import Config
from fedhet.errors import DataError, ModelError
from fedhet.evaluation import BATCH
from fedhet.exchange import Exchange
from fedhet.representations import head_name
from fedhet.training import LossTerm, Phase, Step
from fedhet.wire import Payload, to_arrays, to_tensor

PROJECTION = "fedproto_projection"


class FedProto(ClientHalf):
    """Pulls Phi towards the global prototype of the label; sends its own mean Phi of each class."""

    personal = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.classes, self.prototypes = torch.empty(0, dtype=torch.long), torch.empty(0)

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        """With `fedproto.width`, the model carries weight and bias of a linear map from Phi to that width.

        Raises:
            ModelError: the head is no `nn.Linear`, so that the width of Phi is not known.
        """
        if config.parameters.width:
            head = model.get_submodule(head_name(model, config.head))
            if not isinstance(head, nn.Linear):
                raise ModelError(f"fedproto.width needs an nn.Linear as head, not a {type(head).__name__}")
            # As parameters, since a module would be taken for the head, and an nn.Sequential would call it.
            for name, parameter in nn.Linear(head.in_features, config.parameters.width).named_parameters():
                model.register_parameter(f"{PROJECTION}_{name}", parameter)
        return model

    def exchange(self) -> Exchange:
        """No weights."""
        return Exchange("nothing")

    def greet(self, payload: Payload) -> Payload:
        """The width of the representation.

        Raises:
            DataError: examples have no single class.
        """
        if self.client.data.train.labels.ndim != 1:
            raise DataError(f"client {self.client.name}: fedproto needs examples of one class each")
        return Payload(values={"width": self._embed(self.client.data.train.inputs[:2]).shape[1]})

    def receive(self, payload: Payload) -> None:
        """The global prototypes."""
        if sent := payload.arrays.get("prototypes"):
            self.classes = to_tensor(sent["classes"]).to(self.client.device)
            self.prototypes = to_tensor(sent["means"]).to(self.client.device)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """One phase, with Phi of every batch."""
        return [replace(phase, features_of=self.client.representation) for phase in super().phases(payload)]

    def terms(self, payload: Payload) -> tuple[LossTerm, ...]:
        """The term lambda * mean_d (Phi(x)_d - C_y,d)^2, over the examples whose class has a global prototype."""
        if not len(self.classes):
            return ()
        count = int(self.classes.max()) + 1
        row_of = torch.full((max(count, int(self.client.data.train.labels.max()) + 1),), -1, device=self.client.device)
        row_of[self.classes] = torch.arange(len(self.classes), device=self.client.device)

        def distance(step: Step) -> Tensor | None:
            rows = row_of[step.labels]
            known = rows >= 0
            assert step.features is not None
            if not known.any():
                return None
            embedded = self._project(step.features[known])
            return self.parameters.weight * F.mse_loss(embedded, self.prototypes[rows[known]])

        return (distance,)

    def reply(self, payload: Payload) -> Payload:
        """Mean Phi of each class that this client holds, and how many examples it is over."""
        train = self.client.data.train
        starts = range(0, len(train), BATCH)
        embedded = torch.cat([self._embed(train.inputs[start : start + BATCH]) for start in starts])
        classes, rows, counts = train.labels.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(classes), embedded.shape[1], device=embedded.device).index_add_(0, rows, embedded)
        means = sums / counts[:, None]
        return Payload({"prototypes": to_arrays({"means": means, "classes": classes, "counts": counts})})

    def scores(self) -> Callable[[Tensor], Tensor] | None:
        """Minus the squared distance to each class's global prototype; the head's outputs before there are any."""
        if self.parameters.predict == "head" or not len(self.classes):
            return None
        classes = 1 + int(torch.cat([self.classes, self.client.data.test.labels]).max())

        def nearest(inputs: Tensor) -> Tensor:
            distances = torch.cdist(self._project(self.client.representation(inputs)), self.prototypes).square()
            # A class without a prototype is far below all others, yet finite, so that the loss is a number.
            scores = torch.full((len(inputs), classes), -1e4, device=inputs.device)
            scores[:, self.classes] = -distances
            return scores

        return nearest

    @torch.no_grad()
    def _embed(self, inputs: Tensor) -> Tensor:
        self.client.model.eval()
        return self._project(self.client.representation(self.client.transform(inputs)))

    def _project(self, features: Tensor) -> Tensor:
        if not self.parameters.width:
            return features
        own = self.client.model._parameters
        weight, bias = own[f"{PROJECTION}_weight"], own[f"{PROJECTION}_bias"]
        assert weight is not None
        return F.linear(features, weight, bias)
