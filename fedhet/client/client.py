"""The client on which the hooks of a method's client side work."""

from collections.abc import Callable, Mapping
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
from fedhet.models.copies import Start
from fedhet.models.representation import ROWS_AT_ONCE, Representation, in_precision, scores_of
from fedhet.tasks import Task
from fedhet.training import BATCH, Optimisation, Privacy, Trained, learning_rate, read, reestimate
from fedhet.utils.inputs import Inputs, parts_of
from fedhet.utils.randomness import derive_seed, torch_generator


@dataclass
class Client:
    """One client while it handles one message; `data` and `representation`, the network, are on `device`.

    Attributes:
        config: the run's configuration, with this node's own settings.
        transform: function from raw inputs to the network's inputs.
        augment: function that augments a raw training batch; None without augmentation.
        own_data: whether the data come from a user's function instead of the configured data set.
        tokens: number of tokens in an example, if the network makes a prediction for each token; otherwise 1.
        least: minimum number of examples behind every number that leaves the node (`min-examples`).
        secret: secret seed of a node with a policy; None for other nodes.
        privacy: differential privacy of the client's training; None for ordinary training.
        outputs: number of values in a prediction, such as class scores.
        part: the client's part of the configured network, for methods whose clients train parts of different sizes.
        starts: mean and standard deviation of each array in a newly built network, if the method needs them.
        memory: named tensors that the method keeps between rounds (see `ClientSide.remembers`).
        trained: the combined result of the training phases so far.
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
    privacy: Privacy | None = None
    outputs: int = 0
    part: Submodel | None = None
    starts: Mapping[str, Start] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    trained: Trained = field(default_factory=Trained)

    @property
    def model(self) -> nn.Module:
        """The client's network."""
        return self.representation.model

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The network's state dict, whose tensors share memory with the network."""
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
        """The floating-point dtype of the network's parameters; None for a network without parameters."""
        return self.representation.precision

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the network's device, with floating-point values in the network's dtype."""
        return in_precision(tensor.to(self.device), self.precision)

    @cached_property
    def public(self) -> PublicDataset:
        """The public dataset that the request names, on the device; raises `LostState` if the client lacks it."""
        brought = [] if self.data.public is None else [self.data.public, self.data.public.unlabelled]
        public = next((each for each in brought if each.digest == self.request.public), None)
        if public is None:
            public = self.store.public_dataset(self.request.public)
        example = self.data.train.inputs[:1]
        expected, shape = example.shape, public.inputs.shape
        if parts_of(example).keys() != parts_of(public.inputs).keys():
            raise WireError(
                f"the request's public dataset has {', '.join(parts_of(public.inputs))}, but this client's examples "
                f"have {', '.join(parts_of(example))}: choose a public dataset with the same inputs"
            )
        padded = isinstance(example, Inputs)  # to the longest text
        if len(shape) != len(expected) or (len(expected) != 3 and shape[1] != expected[1] and not padded):
            raise WireError(
                f"the request's public dataset has examples of shape {list(shape[1:])}, but this client's examples "
                f"have shape {list(expected[1:])}: choose a public dataset that fits"
            )
        return relabelled(resident(public, self.device), self.task.outputs.labels)

    def work_on(self, model: nn.Module) -> None:
        """Replace the client's network by `model`, which has the same structure."""
        before, self.representation = self.representation, Representation(model, self.head, self.representation.what)
        self.representation.places = before.places

    @property
    def root(self) -> int:
        """The seed of the client's random streams: the run's seed, or a secret one on a node with a policy."""
        return self.config.seed if self.secret is None else derive_seed(self.secret, self.config.seed)

    def seed(self, *purpose: object) -> int:
        """Return a seed that depends on `purpose`, the client and the round."""
        return derive_seed(self.root, *purpose, self.name, self.request.round)

    def generator(self, *purpose: object) -> torch.Generator:
        """Return a random generator whose seed depends on `purpose`, the client and the round."""
        return torch_generator(self.root, *purpose, self.name, self.request.round)

    def optimisation(self, part: int = 0, parts: int = 1) -> Optimisation:
        """Return the optimiser and learning rate for this round; a closing round has those of the last training round.

        Args:
            part: index of the phase in the round, for rates that change with each step; negative for phases of the
                previous round.
            parts: number of phases in the round, which all have the same number of steps.
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
        """Transform raw inputs to a training batch; augment them if this is configured and `generator` is given."""
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
        """Return the network's outputs for raw inputs in evaluation mode (see `fedhet.training.read`)."""
        return read(self.model, inputs, self.transform, until=until, rows=rows, tokens=tokens)

    def scores(self, inputs: Tensor, kind: Literal["logits", "probabilities"], tokens: Tensor | None = None) -> Tensor:
        """Return class scores (n, C) for raw inputs in evaluation mode; `tokens` (n,) selects one token per input."""
        outputs = self.read(inputs, rows=ROWS_AT_ONCE, tokens=tokens)
        return scores_of(self.task.outputs.scores(outputs), len(inputs), kind)

    def check_classes(self, *, outputs: bool = False) -> None:
        """Raise `DataError` unless each example has one class and, with `outputs`, the network an output per class."""
        if outputs and self.task.name == "binary":
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs an output for each class, but the network has "
                "one output for both classes of a binary task: give it two outputs"
            )
        if self.data.train.labels.ndim != 1:
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs examples with exactly one class each, but the "
                f"task is {self.task.name}: choose another method"
            )

    def check_scores(self, reason: str, *, tokens: bool = False, numbers: bool = False) -> None:
        """Raise `DataError` unless the network returns one vector of class scores for each example.

        `reason`, a clause of the message, says why the method needs class scores. With `tokens`, a vector for each
        token is accepted, too; with `numbers`, the outputs of a regression.
        """
        outputs = self.task.outputs
        several = outputs.places == "pixels" or (self.tokens > 1 and not tokens)
        if several or (outputs.meaning == "numbers" and not numbers):
            got = "numbers" if not several else f"vectors for each {outputs.places.removesuffix('s')}"
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs one vector of class scores for each example, "
                f"{reason}, but the outputs of a {self.task.name} are {got}: choose another method"
            )

    def reestimate(self, chosen: Callable[[str], bool] = lambda name: True) -> None:
        """Re-estimate the running statistics that `chosen` selects by name from the client's training examples."""
        reestimate(self.model, self.data.train.inputs, self.transform, chosen)
