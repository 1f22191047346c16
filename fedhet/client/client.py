"""The client on which a method's hooks work, while it handles one message."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fedhet.client.state import ClientStore
from fedhet.client.submodel import Submodel
from fedhet.data import ClientData, PublicDataset, resident
from fedhet.data.examples import relabelled
from fedhet.data.reading import LazyInputs
from fedhet.errors import DataError
from fedhet.messages import Request, WireError
from fedhet.methods.options import Config
from fedhet.models.representation import ROWS_AT_ONCE, Representation, in_precision, scores_of
from fedhet.tasks import Task
from fedhet.training import BATCH, Optimisation, Trained, learning_rate, read, reestimate
from fedhet.utils.randomness import derive_seed, torch_generator


@dataclass
class Client:
    """One client while it handles one message.

    Attributes:
        name: the client's name.
        config: the run's configuration, with this node's own settings.
        request: the server's request.
        data: its examples, on the device.
        representation: its network, on the device, with the inner layer that gives Phi.
        architecture: the network's name.
        task: loss, metric and prediction.
        device: the device on which it computes.
        transform: from raw inputs to the network's.
        augment: draws variants of a raw training batch; None without augmentation.
        store: its files.
        own_data: whether its data come from a user's function instead of the configured data set.
        tokens: number of tokens of an example with predictions; 1 if predictions are not for tokens.
        least: least number of examples behind every number that leaves the node.
        secret: secret seed of a node with a policy; None for other nodes.
        outputs: number of scores, or numbers, of a prediction.
        part: its part of the configured network, if the method's clients have parts.
        memory: named tensors that the method keeps between rounds (see `ClientSide.remembers`).
        trained: the result of the phases so far.
    """

    name: str
    config: Config
    request: Request
    data: ClientData
    representation: Representation
    architecture: str
    task: Task
    device: torch.device
    transform: Callable[[Tensor], Tensor]
    augment: Callable[[Tensor, torch.Generator], Tensor] | None
    store: ClientStore
    own_data: bool = False
    tokens: int = 1
    least: int = 1
    secret: int | None = None
    outputs: int = 0
    part: Submodel | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)
    trained: Trained = field(default_factory=Trained)

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self.representation.model

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The network's state dict, which shares its memory."""
        return self.model.state_dict()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the network's arrays, in the order of its state dict."""
        return self.representation.names

    @property
    def head(self) -> str:
        """Name of the module whose input is the representation."""
        return self.representation.head

    @property
    def precision(self) -> torch.dtype | None:
        """The floating dtype of the network's parameters; None without parameters."""
        return self.representation.precision

    def to_device(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the network's device, and convert floats to its dtype."""
        return in_precision(tensor.to(self.device), self.precision)

    def find_public(self) -> PublicDataset:
        """Return the public dataset that the request names: the client's own, labelled or not, or a stored one.

        Raises:
            LostState: the dataset is not stored (any more).
            WireError: its examples have other axes, features or channels than the client's own.
        """
        brought = [] if self.data.public is None else [self.data.public, self.data.public.unlabelled]
        public = next((each for each in brought if each.digest == self.request.public), None)
        if public is None:
            public = self.store.public_dataset(self.request.public)
        expected, shape = self.data.train.inputs[:1].shape, public.inputs.shape
        if len(shape) != len(expected) or (len(expected) != 3 and shape[1] != expected[1]):
            raise WireError(
                f"the request's public dataset has examples of shape {list(shape[1:])}, and this client's are of "
                f"{list(expected[1:])}"
            )
        return public

    @cached_property
    def public(self) -> PublicDataset:
        """The public dataset, on the device, with labels if the method needs them (see `find_public`)."""
        return relabelled(resident(self.find_public(), self.device), self.task.outputs.labels)

    def work_on(self, model: nn.Module) -> None:
        """Continue with another network of the same structure."""
        places, self.representation = self.representation.places, Representation(model, self.head)
        self.representation.places = places

    @property
    def root(self) -> int:
        """The seed of the client's random streams: the run's, or at a node with a policy a secret one."""
        return self.config.seed if self.secret is None else derive_seed(self.secret, self.config.seed)

    def seed(self, *purpose: object) -> int:
        """Return a seed for one purpose of this client in this round."""
        return derive_seed(self.root, *purpose, self.name, self.request.round)

    def generator(self, *purpose: object) -> torch.Generator:
        """Return a random stream for one purpose of this client in this round."""
        return torch_generator(self.root, *purpose, self.name, self.request.round)

    def optimisation(self, part: int = 0, parts: int = 1) -> Optimisation:
        """Return the configured optimisation for this round; a closing round has the last round's rate.

        Args:
            part: number of the phase in the round, for rates that change by step; negative for the previous round.
            parts: number of phases of the round, which all have the same number of steps.
        """
        config = self.config
        round, rounds = min(self.request.round, config.rounds), max(config.rounds, 1)
        stepwise = config.lr_schedule == "one-cycle"
        before, share = max(round - 1 + (part / parts if stepwise else 0), 0), 1 / parts

        def schedule(done: float) -> float:
            return learning_rate(config.lr_schedule, config.learning_rate, (before + done * share) / rounds)

        return Optimisation(
            optimizer=config.optimizer,
            learning_rate=schedule(0.0),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            batch_size=self.data.batch_size or config.batch_size,
            schedule=schedule if stepwise else None,
            bf16=config.precision == "bf16",
            least=self.least,
            clip_gradients=config.clip_gradients,
        )

    def prepare(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Transform raw inputs to a training batch, augmented with `generator` if that is configured."""
        if self.augment is None or generator is None:
            return self.transform(inputs)
        return self.transform(self.augment(inputs, generator))

    def read(
        self,
        inputs: Tensor | LazyInputs,
        *,
        until: Representation | None = None,
        rows: int = BATCH,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the network's outputs for raw inputs in evaluation mode, or with `until` their representations.

        See `fedhet.training.read`.
        """
        return read(self.model, inputs, self.transform, until=until, rows=rows, tokens=tokens)

    def scores(self, inputs: Tensor, kind: Literal["logits", "probabilities"], tokens: Tensor | None = None) -> Tensor:
        """Return class scores (n, C) of raw inputs in evaluation mode, or of one token (n,) of each input.

        Raises `ModelError` for other outputs.
        """
        outputs = self.read(inputs, rows=ROWS_AT_ONCE, tokens=tokens)
        return scores_of(self.task.outputs.scores(outputs), len(inputs), kind)

    def check_classes(self, *, outputs: bool = False) -> None:
        """Raise `DataError` unless each example has one class and, with `outputs`, each class has an output."""
        if outputs and self.task.name == "binary":
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs an output for each class, and a binary task has "
                "one for both: give the network two"
            )
        if self.data.train.labels.ndim != 1:
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs examples with exactly one class each, and the "
                f"task is {self.task.name}"
            )

    def check_scores(self, reason: str, *, tokens: bool = False, numbers: bool = False) -> None:
        """Raise `DataError` unless each example has one vector of class scores.

        Args:
            reason: why the method needs them, a clause of the message.
            tokens: whether to accept one vector for each token.
            numbers: whether to accept a vector of numbers.
        """
        outputs = self.task.outputs
        several = outputs.places == "pixels" or (self.tokens > 1 and not tokens)
        if several or (outputs.meaning == "numbers" and not numbers):
            got = "numbers" if not several else "for each pixel" if outputs.places == "pixels" else "for each token"
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs one vector of class scores for each example, "
                f"{reason}, and the outputs of a {self.task.name} are {got}"
            )

    def reestimate(self, chosen: Callable[[str], bool] = lambda name: True) -> None:
        """Re-estimate running statistics from the training examples (see `fedhet.training.reestimate`)."""
        reestimate(self.model, self.data.train.inputs, self.transform, chosen)
