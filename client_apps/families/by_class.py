"""Base classes of client sides that send a vector for each class, or need representations of one width."""

from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.client import Client, ClientSide
from fedhet.client.client import P
from fedhet.data.reading import LazyInputs
from fedhet.errors import ModelError
from fedhet.messages import Arrays, Payload, WireError, check_places, to_arrays, to_tensor
from fedhet.methods.options import Config
from fedhet.models.registry import place_before
from fedhet.models.representation import POOLED, head_name, isolated
from fedhet.strategies.families.by_class import MOST_CLASSES, WidthKeys
from fedhet.training import BATCH
from fedhet.utils.text import log

W = TypeVar("W", bound=WidthKeys)


class ByClass(ClientSide[P]):
    """Base class of client sides that send mean vectors of classes, and receive global vectors of classes.

    Attributes:
        of_phi: whether vectors are representations (Phi); otherwise they are the network's outputs.
        classes: (k,) int64, the classes that have a global vector.
        prototypes: (k, width), the global vectors.
    """

    noisy_sums = True
    of_phi: ClassVar[bool] = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.classes = torch.empty(0, dtype=torch.long, device=client.device)
        self.prototypes = torch.empty(0, device=client.device)

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_classes()
        return Payload(values={"width": self._vectors_of(self.client.data.train.inputs[:2]).shape[1]})

    def begin(self, payload: Payload) -> None:
        if sent := payload.arrays.get("prototypes"):
            # Memory is allocated for all classes up to the largest one, and for scores by each prototype.
            check_places(sent["classes"], MOST_CLASSES, "classes of prototypes")
            if len(sent["means"]) != len(sent["classes"]):
                raise WireError("the server sent prototypes that are not one for each class: use one version of fedhet")
            self.classes = to_tensor(sent["classes"]).to(self.client.device)
            self.prototypes = to_tensor(sent["means"]).to(self.client.device)
            self.client.check_size(
                "prototypes", self.prototypes, lambda: self._vectors_of(self.client.data.train.inputs[:BATCH])
            )

    def rows(self) -> Tensor:
        """Return the row in `prototypes` of each class, (classes,) int64; -1 for classes without a global vector."""
        count = 1 + int(torch.cat([self.classes, self.client.data.train.labels]).max())
        row_of = torch.full((count,), -1, device=self.client.device)
        row_of[self.classes] = torch.arange(len(self.classes), device=self.client.device)
        return row_of

    def end(self, payload: Payload) -> Payload:
        classes, means, counts = self._noisy_means() if self.client.privacy else self._means()
        enough = counts >= self.client.least
        if few := classes[~enough].tolist():
            log.warning(
                "client %s does not send the means of classes %s, since it has fewer than %d examples of each "
                "(min-examples)",
                *(self.client.name, few, self.client.least),
            )
        sent = {"means": means.float(), "classes": classes, "counts": counts}
        return Payload({"prototypes": to_arrays({name: of_all[enough] for name, of_all in sent.items()})})

    def _means(self) -> tuple[Tensor, Tensor, Tensor]:
        train = self.client.data.train
        batches = [(self._vectors_of(inputs), labels) for inputs, labels in train.batches(BATCH)]
        vectors, labels = map(torch.cat, zip(*batches, strict=True))
        classes, rows, counts = labels.unique(return_inverse=True, return_counts=True)
        sums = vectors.new_zeros(len(classes), vectors.shape[1]).index_add_(0, rows, vectors)
        return classes, sums / counts[:, None], counts

    def _noisy_means(self) -> tuple[Tensor, Tensor, Tensor]:
        client = self.client
        train = self.client.data.train
        assert client.privacy is not None
        size = client.optimisation().batch_size
        with isolated(client.model):
            sums, counts = client.privacy.class_sums(self._vectors_of, train, client.outputs, size)
        counts = counts.clamp_min(0)
        scaled = counts * (len(train) / counts.sum().clamp_min(1))  # the number of all examples is public
        return torch.arange(len(counts), device=sums.device), sums / counts.clamp_min(1)[:, None], scaled.long()

    def _vectors_of(self, inputs: Tensor | LazyInputs) -> Tensor:
        vectors = self.client.read(inputs, until=self.client.representation if self.of_phi else None)
        vectors = vectors if self.of_phi else self.client.task.outputs.scores(vectors)
        return vectors if vectors.dtype == torch.float64 else vectors.float()


class SameWidth(ClientSide[W]):
    """Base class of client sides whose option `width` sets the width of the representation on all clients."""

    @staticmethod
    def projection(inputs: int, width: int, dtype: torch.dtype) -> nn.Module:
        """Return new layers that map representations (n, inputs) to (n, width); by default one linear layer."""
        return nn.Linear(inputs, width, dtype=dtype)

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        if not (width := config.options.width):
            return model
        name = head_name(model, config.head)
        head = model.get_submodule(name)
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"{config.family}.width = {width} needs an nn.Linear as head, but {name} is a "
                f"{type(head).__name__}: set {config.family}.width = 0 for networks with representations of one "
                "width, or replace the head"
            )
        projection = cls.projection(head.in_features, width, head.weight.dtype)
        return place_before(model, name, {"projection": projection}, width)

    @classmethod
    def head_of(cls, config: Config) -> str:
        return f"{config.head}.head" if config.head and config.options.width else config.head

    def check_linear_head(self, why: str) -> None:
        """Check that the head is an nn.Linear with bias and an output per class; `why` is the reason in the error."""
        client = self.client
        method = self.client.config.method_name
        client.check_classes(outputs=True)
        head = client.model.get_submodule(client.head)
        if not isinstance(head, nn.Linear) or head.bias is None or head.out_features != client.outputs:
            raise ModelError(
                f"{method} needs an nn.Linear with a bias and {client.outputs} outputs as head, "
                f"not a {head}, since {why}: replace the head"
            )
        if client.representation.what not in ("", *POOLED):
            raise ModelError(f"{method} needs the head's inputs as representations, since {why}: unset representation")


def class_counts(client: Client, output: str) -> Arrays:
    """Return {"counts": numbers of examples by class}, for as many classes as the array called `output` has rows."""
    classes = client.tensors[output].shape[0]
    labels = client.data.train.labels.flatten().cpu().numpy()
    return {"counts": np.bincount(labels, minlength=classes).astype(np.int64)}
