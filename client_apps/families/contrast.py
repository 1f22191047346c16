"""What contrastive methods share at a client: projection heads, two views, and linear evaluation."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedhet.client import Client, ClientSide, Payload, Phase
from fedhet.data import Examples
from fedhet.data.views import random_views, two_views
from fedhet.errors import DataError, ModelError, Refused
from fedhet.methods.options import Config, Options
from fedhet.models.registry import Beside
from fedhet.models.representation import head_name
from fedhet.strategies.families.contrast import EncoderKeys

V = TypeVar("V", bound=Options)
E = TypeVar("E", bound=EncoderKeys)


def layer(inputs: int, outputs: int, dtype: torch.dtype) -> list[nn.Module]:
    """Return a new linear layer (n, inputs) -> (n, outputs) without bias, BatchNorm and a ReLU."""
    return [nn.Linear(inputs, outputs, bias=False, dtype=dtype), nn.BatchNorm1d(outputs, dtype=dtype), nn.ReLU()]


class TwoViews(ClientSide[V]):
    """Base class of client sides that train an encoder without labels, on two views of each example.

    A mini-batch has the first views of its examples, then the second ones: `terms` have twice as many rows as examples
    in `step.captured["phi"]`, to which they apply the `modules` beside the head. The head itself is not trained.
    """

    needs_labels = False

    @classmethod
    @abstractmethod
    def modules(cls, inputs: int, keys: V, dtype: torch.dtype) -> Mapping[str, nn.Module]:
        """Return new modules by name that loss terms apply to representations (n, inputs), such as `projector`."""

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        name = head_name(model, config.head)
        head = model.get_submodule(name)
        if not isinstance(head, nn.Linear):
            kind = type(head).__name__
            raise ModelError(f"{config.family} needs an nn.Linear as head, but {name} is a {kind}: replace the head")
        placed = Beside(cls.modules(head.in_features, config.options, head.weight.dtype), head)
        if not name:
            return placed
        model.set_submodule(name, placed)
        return model

    @classmethod
    def head_of(cls, config: Config) -> str:
        return config.head and f"{config.head}.head"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        if client.privacy:
            raise Refused(
                f"this node trains with differential privacy (dp-noise), which clips the loss of each example, but "
                f"{client.config.method_name} compares examples with each other: choose another method"
            )

    def phases(self, payload: Payload) -> Sequence[Phase]:
        client = self.client
        head = f"{client.head}."
        views = two_views(client.augment or random_views)
        phase = Phase(client.request.epochs, client.optimisation(), terms=self.terms(payload), task_weight=0.0)
        return [replace(phase, augment=views, trains=lambda name: not name.startswith(head))]


class LinearEvaluation(TwoViews[E]):
    """Base class of client sides whose received encoder is evaluated: for this, the head alone is trained on labels."""

    @classmethod
    def modules(cls, inputs: int, keys: E, dtype: torch.dtype) -> Mapping[str, nn.Module]:
        # SimCLR's code normalises projections, so that all of them cannot move in one direction.
        projector = [*layer(inputs, inputs, dtype), *layer(inputs, keys.width, dtype)[:2]]
        return {"projector": nn.Sequential(*projector)}

    def refine(self, when: str) -> Sequence[Phase]:
        head = f"{self.client.head}."
        rate = self.options.probe_learning_rate
        steps = replace(self.client.optimisation(), optimizer="adam", learning_rate=rate, schedule=None)
        phase = Phase(self.options.probe_epochs, steps, examples=self.labelled)
        return [replace(phase, trains=lambda name: name.startswith(head))]

    @cached_property
    def labelled(self) -> Examples:
        """The examples on which the linear classifier is trained."""
        client = self.client
        train = client.data.train
        keys = self.options
        if keys.probe == "public":
            assert client.public.labels is not None  # as the traits say
            return Examples(client.public.inputs, client.public.labels)
        rows = train.labelled
        if train.groups is not None:
            # The examples of a group have one class, so that all of them have a label, or none.
            labelled = {*rows.tolist()}
            return replace(train, groups=tuple(group for group in train.groups if int(group[0]) in labelled))
        if len(rows) < client.least:
            family = client.config.family
            raise DataError(
                f"client {client.name}: its training examples have {len(rows) or 'no'} labels for the linear "
                f"classifier that is evaluated, which needs {client.least}: set {family}.probe = public, which uses "
                "the labels of the public dataset"
            )
        drawn = torch.randperm(len(rows), generator=client.generator("labels", lasting=True))
        return train.subset(rows[drawn[: max(client.least, round(keys.labels * len(rows)))]])

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        # Only the classifier of the received encoder is trained.
        return super().evaluate(when) if when == "received" else None
