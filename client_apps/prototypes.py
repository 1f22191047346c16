"""Client sides of FedProto, FedTGP, FD, FedGH and FedGen.

Mean vectors of classes are exchanged in FedProto (Tan et al., AAAI 2022), FedTGP (Zhang et al., AAAI 2024), FD (Jeong
et al., 2018, algorithm 1) and FedGH (Yi et al., ACM MM 2023). In FedGen (Zhu et al., ICML 2021, equation 5), the head h
also learns from representations that the server's generator G generates for noise e and classes y, drawn in proportion
to the number of examples of all clients:

    L = CE(h(Phi(x)), y') + weight CE(h(G(e, y)), y)    for an example x with label y'
"""

from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.client import Client, ClientSide
from fedhet.client.client import P
from fedhet.data.reading import LazyInputs
from fedhet.errors import ModelError
from fedhet.messages import Payload, load_into, to_arrays, to_tensor
from fedhet.methods.included.prototypes import FDOptions, FedGenOptions, FedProtoOptions, LearnerOptions, WidthOptions
from fedhet.methods.options import Config
from fedhet.models.networks import Generator, draw
from fedhet.models.registry import place_before
from fedhet.models.representation import Representation, head_name
from fedhet.training import BATCH, Loss, Step, Term
from fedhet.utils.text import log

from .matching import class_counts

W = TypeVar("W", bound=WidthOptions)


class ByClass(ClientSide[P]):
    """Base class of client sides that send mean vectors of classes, and receive global vectors of classes.

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

    def handshake(self, payload: Payload) -> Payload:
        self.client.check_classes()
        return Payload(values={"width": self._vectors_of(self.client.data.train.inputs[:2]).shape[1]})

    def begin(self, payload: Payload) -> None:
        if sent := payload.arrays.get("prototypes"):
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
        enough = counts >= max(self.client.least, 1)
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
        client, train = self.client, self.client.data.train
        assert client.privacy is not None
        size = client.optimisation().batch_size
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

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        if not (width := config.options.width):
            return model
        name = head_name(model, config.head)
        head = model.get_submodule(name)
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"{config.method_name}.width = {width} needs an nn.Linear as head, but {name} is a "
                f"{type(head).__name__}: set {config.method_name}.width = 0 for networks with representations of one "
                "width, or replace the head"
            )
        projection = nn.Linear(head.in_features, width, dtype=head.weight.dtype)
        return place_before(model, name, {"projection": projection}, width)

    @classmethod
    def head_of(cls, config: Config) -> str:
        return f"{config.head}.head" if config.head and config.options.width else config.head

    def check_linear_head(self, why: str) -> None:
        """Check that the head is an nn.Linear with bias and an output per class; `why` is the reason in the error."""
        client, method = self.client, self.client.config.method_name
        client.check_classes(outputs=True)
        head = client.model.get_submodule(client.head)
        if not isinstance(head, nn.Linear) or head.bias is None or head.out_features != client.outputs:
            raise ModelError(
                f"{method} needs an nn.Linear with a bias and {client.outputs} outputs as head, "
                f"not a {head}, since {why}: replace the head"
            )


class FedProto(SameWidth[FedProtoOptions], ByClass[FedProtoOptions]):
    """Client side of FedProto: trains representations (Phi) towards global prototypes; sends mean Phi by class."""

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        if not len(self.classes):
            return ()
        phi, rows, weight = {"phi": self.client.representation}, self.rows(), self.options.weight
        term = Term(distance, captures=phi, weighted=True, row_of=rows, prototypes=self.prototypes, weight=weight)
        return (term,)

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        data, by = self.client.data, self.options.predict
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

    `rows` (classes,) are the classes' rows in `prototypes` (k, d); classes with -1 have none, and are never the best.
    """

    prototypes: Tensor
    rows: Tensor

    def __init__(self, representation: Representation, prototypes: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.network, self._representation = representation.model, representation
        self.site = representation.site  # where a batch of networks has its representations
        self.register_buffer("prototypes", prototypes)
        self.register_buffer("rows", rows)

    def forward(self, inputs: Tensor) -> Tensor:
        with self._representation.capture() as phi:  # torch.export cannot trace a pass that ends before the head
            self.network(inputs)
        return self.scores(phi())

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
    known = (rows >= 0).float()
    apart = step.mean(((step.captured["phi"] - prototypes[rows]) * known[:, None]).square().mean(1))
    return weight * (apart / step.mean(known).clamp(min=1 / len(rows)))


class FedTGP(FedProto):
    """Client side of FedTGP: the same as for FedProto, with prototypes that the server has learned."""


class FD(ByClass[FDOptions]):
    """Client side of FD: distils the global mean prediction for each class into the network by a cross-entropy loss."""

    of_phi = False

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        if not len(self.classes):
            return ()
        rows, teacher, weight = self.rows(), self.prototypes.softmax(1), self.options.weight
        return (Term(distillation, weighted=True, row_of=rows, teacher=teacher, weight=weight),)


def distillation(step: Step, row_of: Tensor, teacher: Tensor, weight: float) -> Tensor:
    """Return `weight` times the mean cross entropy of a step's outputs to the teacher's predictions for the labels.

    `teacher` (k, C) has the predicted probabilities of C classes for examples of k classes. `row_of` (classes,) has the
    row of each class in it, or -1 for a class without a prediction; its examples are left out of the mean.
    """
    rows = row_of[step.labels]
    known = (rows >= 0).to(step.outputs.dtype)
    entropies = -(teacher[rows] * F.log_softmax(step.task.outputs.scores(step.outputs), 1)).sum(1) * known
    return weight * step.mean(entropies) / step.mean(known).clamp(min=1 / len(rows))


class FedGH(SameWidth[LearnerOptions], ByClass[LearnerOptions]):
    """Client side of FedGH: replaces the client's head by the server's head, then trains with the task's loss."""

    def handshake(self, payload: Payload) -> Payload:
        self.check_linear_head("the server trains one head for all")
        return super().handshake(payload)

    def begin(self, payload: Payload) -> None:
        load_into(self.client.model.get_submodule(self.client.head).state_dict(), payload.arrays["head"])


class FedGen(SameWidth[FedGenOptions]):
    """Client side of FedGen: adds the head's loss for generated representations to the task's loss."""

    def handshake(self, payload: Payload) -> Payload:
        self.check_linear_head("the server generates the head's inputs")
        return Payload({"classes": class_counts(self.client, f"{self.client.head}.weight")})

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        client, weight = self.client, self.options.weight
        if not weight or "generator" not in payload.arrays:
            return ()
        head = cast(nn.Linear, client.model.get_submodule(client.head))
        dtype = head.weight.dtype
        generator = Generator(*head.weight.shape).to(client.device, dtype).eval()
        load_into(generator.state_dict(), payload.arrays["generator"])
        counts = to_tensor(payload.arrays["classes"]["counts"])

        def drawn(number: int, examples: int) -> dict[str, Tensor]:
            noise = draw(counts, examples, client.generator("generated", number), dtype).to(client.device)
            with torch.no_grad():
                return {"inputs": generator(noise), "labels": noise[:, -1].long()}

        return (Term(generated, draw=drawn, head=head, weight=weight),)


def generated(step: Step, inputs: Tensor, labels: Tensor, head: nn.Linear, weight: float) -> Tensor:
    """Return `weight` times the loss of `head` by `step.task`, for generated representations (m, d) and labels (m,)."""
    return weight * step.task.loss(F.linear(inputs, head.weight, head.bias), labels)
