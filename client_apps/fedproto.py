"""FedProto, client side: prototypes of classes in the space of the representation (Tan et al., AAAI 2022)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedhet.client import Client, ClientSide
from fedhet.client.client_side import P
from fedhet.data.reading import LazyInputs
from fedhet.errors import ModelError
from fedhet.messages import Payload, to_arrays, to_tensor
from fedhet.methods.included.fedproto import FedProtoParameters, WidthParameters
from fedhet.methods.options import Config
from fedhet.models import place_before
from fedhet.models.representation import Representation, head_name
from fedhet.training import BATCH, Loss, Phase, Step, forward
from fedhet.utils.text import log

W = TypeVar("W", bound=WidthParameters)


class ByClass(ClientSide[P], ABC):
    """Sends its own mean vector of each class, and receives the mean over clients.

    Attributes:
        classes: (k,) int64, those that have a global vector.
        prototypes: (k, width), the global vectors.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.classes = torch.empty(0, dtype=torch.long, device=client.device)
        self.prototypes = torch.empty(0, device=client.device)

    @property
    @abstractmethod
    def until(self) -> Representation | None:
        """Whether the vectors (n, width) of n inputs are Phi; else they are the network's outputs."""

    def handshake(self, payload: Payload) -> Payload:
        """Return the width of the vectors; raises DataError where examples have no single class."""
        self.client.check_classes()
        return Payload(values={"width": self._vectors_of(self.client.data.train.inputs[:2]).shape[1]})

    def begin(self, payload: Payload) -> None:
        """The global vectors."""
        if sent := payload.arrays.get("prototypes"):
            self.classes = to_tensor(sent["classes"]).to(self.client.device)
            self.prototypes = to_tensor(sent["means"]).to(self.client.device)

    def rows(self) -> Tensor:
        """Return the row of each class among the global vectors, (classes,) int64; -1 if it has none."""
        count = 1 + int(torch.cat([self.classes, self.client.data.train.labels]).max())
        row_of = torch.full((count,), -1, device=self.client.device)
        row_of[self.classes] = torch.arange(len(self.classes), device=self.client.device)
        return row_of

    def end(self, payload: Payload) -> Payload:
        """Return the mean vector of each class with as many examples as the node asks for, and their numbers."""
        train = self.client.data.train
        batches = [(self._vectors_of(inputs), labels) for inputs, labels in train.batches(BATCH)]
        vectors, labels = map(torch.cat, zip(*batches, strict=True))
        classes, rows, counts = labels.unique(return_inverse=True, return_counts=True)
        sums = vectors.new_zeros(len(classes), vectors.shape[1]).index_add_(0, rows, vectors)
        enough = counts >= self.client.least
        if few := classes[~enough].tolist():
            log.warning(
                "client %s keeps the means of classes %s, of which it has fewer than %d examples (min-examples)",
                *(self.client.name, few, self.client.least),
            )
        means = {"means": sums / counts[:, None], "classes": classes, "counts": counts}
        return Payload({"prototypes": to_arrays({name: of_all[enough] for name, of_all in means.items()}, "float32")})

    def _vectors_of(self, inputs: Tensor | LazyInputs) -> Tensor:
        vectors = self.client.read(inputs, until=self.until)
        vectors = vectors if self.until else self.client.task.outputs.scores(vectors)
        return vectors if vectors.dtype == torch.float64 else vectors.float()


class SameWidth(ClientSide[W]):
    """Has a Phi that the key `width` brings to one width at all clients."""

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        """With `width`, replace a linear head by a linear layer `projection` and a linear layer `head`.

        Raises a ModelError where another module is named as head, since the width of its input is not known.
        """
        if not (width := config.parameters.width):
            return model
        name = head_name(model, config.head)
        head = model.get_submodule(name)
        if not isinstance(head, nn.Linear):
            if config.head:
                raise ModelError(_no_linear(head, config))
            return model  # which the handshake refuses
        projection = nn.Linear(head.in_features, width, dtype=head.weight.dtype)
        return place_before(model, name, {"projection": projection}, width)

    @classmethod
    def head_of(cls, config: Config) -> str:
        """The layer behind the one that brings Phi to its width."""
        return f"{config.head}.head" if config.head and config.parameters.width else config.head

    def handshake(self, payload: Payload) -> Payload:
        """Raise a ModelError for a head to project behind whose input is of no known width."""
        self.client.check_classes()
        head = self.client.model.get_submodule(self.client.head)
        if self.parameters.width and not isinstance(head, nn.Linear):
            raise ModelError(_no_linear(head, self.client.config))
        return super().handshake(payload)

    def check_linear_head(self, why: str) -> None:
        """Raise a ModelError, or a DataError for another task, unless the head is linear, with a bias and all classes.

        Args:
            why: the reason for which the method needs such a head.
        """
        client, method = self.client, self.client.config.method_name
        client.check_classes(outputs=True)
        head = client.model.get_submodule(client.head)
        if not isinstance(head, nn.Linear) or head.bias is None or head.out_features != client.outputs:
            raise ModelError(
                f"{method} needs an nn.Linear with a bias and {client.outputs} outputs as head, not a {head}: {why}"
            )


class OneWidth(SameWidth[W], ByClass[W]):
    """Sends its own mean Phi of each class, of one width at all clients."""

    @property
    def until(self) -> Representation:
        """Phi."""
        return self.client.representation


def _no_linear(head: nn.Module, config: Config) -> str:
    return f"{config.method_name}.width needs an nn.Linear as head, not a {type(head).__name__}"


class FedProto(OneWidth[FedProtoParameters]):
    """Pulls Phi towards the global prototype of the label; sends its own mean Phi of each class."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """One phase, with Phi of every batch."""
        captures = {"phi": self.client.representation}
        return [replace(phase, captures=captures) for phase in super().phases(payload)]

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """The term lambda * mean_d (Phi(x)_d - C_y,d)^2, over the examples whose class has a global prototype."""
        if not len(self.classes):
            return ()
        row_of = self.rows()

        def distance(step: Step) -> Tensor:
            rows = row_of[step.labels]
            known = (rows >= 0).float()[:, None]
            share = known.mean().clamp(min=1 / len(rows))
            distance = ((step.captured["phi"] - self.prototypes[rows]) * known).square().mean()
            return self.parameters.weight * (distance / share)

        return (distance,)

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """Return minus squared distances to the candidates' global prototypes; without any, the head's outputs."""
        rows = self.candidates()
        if not len(rows):
            return super().evaluate(when)
        candidates, prototypes = self.classes[rows], self.prototypes[rows]
        data = self.client.data
        evaluated = [part.labels for part in (data.test, data.validation, data.common) if part is not None]
        # At least two, since one column would be the logit of two classes.
        classes = max(2, self.client.outputs, 1 + int(torch.cat([candidates, *evaluated]).max()))

        def nearest(inputs: Tensor) -> Tensor:
            phi, _ = forward(self.client.model, inputs, until=self.until, learns=False)
            distances = torch.cdist(phi.float(), prototypes).square()
            # A class that is no candidate is far below all others, yet finite, so that the loss is a number.
            scores = torch.full((len(phi), classes), -1e4, device=phi.device)
            scores[:, candidates] = -distances
            return scores

        return nearest

    def candidates(self) -> Tensor:
        """The rows of the global prototypes among which is predicted, (candidates,) int64; none: by the head."""
        known = torch.arange(len(self.classes), device=self.client.device)
        if self.parameters.predict == "prototype":
            return known[torch.isin(self.classes, self.client.data.train.labels)]
        return known if self.parameters.predict == "all-prototypes" else known[:0]
