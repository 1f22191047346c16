"""Base classes of methods that exchange mean vectors of classes, or need representations of the same width."""

from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedhet.client import Client, ClientSide
from fedhet.client.client_side import P
from fedhet.data.reading import LazyInputs
from fedhet.errors import ModelError
from fedhet.messages import Payload, to_arrays, to_tensor
from fedhet.methods.included.prototypes import WidthOptions
from fedhet.methods.options import Config
from fedhet.models import place_before
from fedhet.models.representation import Representation, head_name
from fedhet.training import BATCH
from fedhet.utils.text import log

W = TypeVar("W", bound=WidthOptions)


class ByClass(ClientSide[P]):
    """Client side that sends the client's mean vector of each class, and receives the global vectors of classes.

    Attributes:
        of_phi: whether vectors are representations (Phi); otherwise they are the network's outputs.
        classes: (k,) int64, the classes that have a global vector.
        prototypes: (k, width), the global vectors.
    """

    of_phi: ClassVar[bool] = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.classes = torch.empty(0, dtype=torch.long, device=client.device)
        self.prototypes = torch.empty(0, device=client.device)

    @property
    def until(self) -> Representation | None:
        """The representation at which a forward pass for vectors ends; None if vectors are outputs."""
        return self.client.representation if self.of_phi else None

    def handshake(self, payload: Payload) -> Payload:
        """Return the width of the vectors; raises a DataError unless each example has exactly one class."""
        self.client.check_classes()
        return Payload(values={"width": self._vectors_of(self.client.data.train.inputs[:2]).shape[1]})

    def begin(self, payload: Payload) -> None:
        """Load the received global vectors of classes."""
        if sent := payload.arrays.get("prototypes"):
            self.classes = to_tensor(sent["classes"]).to(self.client.device)
            self.prototypes = to_tensor(sent["means"]).to(self.client.device)

    def rows(self) -> Tensor:
        """Return the row of each class in `prototypes`, (classes,) int64; -1 for classes without a global vector."""
        count = 1 + int(torch.cat([self.classes, self.client.data.train.labels]).max())
        row_of = torch.full((count,), -1, device=self.client.device)
        row_of[self.classes] = torch.arange(len(self.classes), device=self.client.device)
        return row_of

    def end(self, payload: Payload) -> Payload:
        """Return mean vectors and numbers of examples, for all classes with at least `min-examples` examples."""
        train = self.client.data.train
        batches = [(self._vectors_of(inputs), labels) for inputs, labels in train.batches(BATCH)]
        vectors, labels = map(torch.cat, zip(*batches, strict=True))
        classes, rows, counts = labels.unique(return_inverse=True, return_counts=True)
        sums = vectors.new_zeros(len(classes), vectors.shape[1]).index_add_(0, rows, vectors)
        enough = counts >= self.client.least
        if few := classes[~enough].tolist():
            log.warning(
                "client %s does not send the means of classes %s, since it has fewer than %d examples of each "
                "(min-examples)",
                *(self.client.name, few, self.client.least),
            )
        means = {"means": sums / counts[:, None], "classes": classes, "counts": counts}
        return Payload({"prototypes": to_arrays({name: of_all[enough] for name, of_all in means.items()}, "float32")})

    def _vectors_of(self, inputs: Tensor | LazyInputs) -> Tensor:
        vectors = self.client.read(inputs, until=self.until)
        vectors = vectors if self.of_phi else self.client.task.outputs.scores(vectors)
        return vectors if vectors.dtype == torch.float64 else vectors.float()


class SameWidth(ClientSide[W]):
    """Client side whose representation has the same width on all clients, set by the option `width`."""

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        """Replace a linear head by two linear layers, `projection` (to `width` outputs) and `head`, if `width` is set.

        Raises a ModelError if the configured head is not an `nn.Linear`.
        """
        if not (width := config.options.width):
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
        """Return the name of the head, which follows the projection if `width` is set."""
        return f"{config.head}.head" if config.head and config.options.width else config.head

    def handshake(self, payload: Payload) -> Payload:
        """Raise a ModelError if the representation cannot be projected to `width`."""
        head = self.client.model.get_submodule(self.client.head)
        if self.options.width and not isinstance(head, nn.Linear):
            raise ModelError(_no_linear(head, self.client.config))
        return super().handshake(payload)

    def check_linear_head(self, why: str) -> None:
        """Raise a ModelError or DataError unless the head is linear, with a bias and an output for each class.

        Args:
            why: the reason why the method needs such a head, as a clause of the message.
        """
        client, method = self.client, self.client.config.method_name
        client.check_classes(outputs=True)
        head = client.model.get_submodule(client.head)
        if not isinstance(head, nn.Linear) or head.bias is None or head.out_features != client.outputs:
            raise ModelError(
                f"{method} needs an nn.Linear with a bias and {client.outputs} outputs as head, not a {head}: {why}"
            )


class OneWidth(SameWidth[W], ByClass[W]):
    """Client side that sends the client's mean representation of each class, with the same width on all clients."""


def _no_linear(head: nn.Module, config: Config) -> str:
    return f"{config.method_name}.width needs an nn.Linear as head, not a {type(head).__name__}: leave width unset"
