"""The contract of a method's client side: its hooks, and the client on which they work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from fedhet import registry
from fedhet.client.size import Size
from fedhet.client.state import ClientStore
from fedhet.data import ClientData, PublicDataset, resident
from fedhet.data.examples import relabelled
from fedhet.data.reading import LazyInputs
from fedhet.errors import DataError, FedhetError
from fedhet.graphs import PermutationGroups, resizable_groups
from fedhet.learning import BATCH, Loss, Optimisation, Phase, Trained, learning_rate, read, reestimate
from fedhet.method import Traits
from fedhet.options import Config, Parameters
from fedhet.randomness import derive_seed, follow_torch, torch_generator
from fedhet.representations import Representation
from fedhet.representations.features import ROWS_AT_ONCE, in_precision, scores_of
from fedhet.sharing import NetworkDescription
from fedhet.task import Task
from fedhet.wire import Payload, Request, WireError, load_into, to_arrays

P = TypeVar("P", bound=Parameters)


@dataclass
class Client:
    """One client while it handles one message.

    Attributes:
        name: the client's own name.
        config: the run's configuration, with this node's own settings.
        request: the server's request.
        data: its examples, on the device.
        representation: its network, on the device, whose inner layer gives Phi; not shared during a message.
        architecture: the network's name.
        task: loss, metric and prediction.
        device: the device on which it computes.
        transform: from raw inputs to a model's.
        augment: draws variants of a raw training batch; None without augmentation.
        store: its files.
        own_data: whether its data come from a user's function, not from the configured data set.
        tokens: number of tokens of an example with predictions; 1 if predictions are not for tokens.
        least: least number of examples behind every number that leaves the node.
        secret: seed of a node with a policy, which no server knows; None for other nodes.
        outputs: number of scores, or numbers, of a prediction.
        size: its part of the configured network, if clients may have parts.
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
    size: Size | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)
    trained: Trained = field(default_factory=Trained)

    @property
    def model(self) -> nn.Module:
        """The network itself."""
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

    def beside(self, tensor: Tensor) -> Tensor:
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
        """Continue with another network of the same structure and other widths."""
        places, self.representation = self.representation.places, Representation(model, self.head)
        self.representation.places = places

    @property
    def root(self) -> int:
        """The seed of the client's own random streams: the run's, or at a node with a policy one that only it knows."""
        return self.config.seed if self.secret is None else derive_seed(self.secret, self.config.seed)

    def seed(self, *purpose: object) -> int:
        """Return a seed for one purpose of this client in this round."""
        return derive_seed(self.root, *purpose, self.name, self.request.round)

    def generator(self, *purpose: object) -> torch.Generator:
        """Return a random stream for one purpose of this client in this round."""
        return torch_generator(self.root, *purpose, self.name, self.request.round)

    def optimisation(self, part: int = 0, parts: int = 1) -> Optimisation:
        """Return the configured optimisation for this round; the closing round has the last round's rate.

        Args:
            part: the phase of the round, if the rate changes by step; negative for one of the previous round.
            parts: number of phases, which all have the same number of steps.
        """
        config, bf16 = self.config, self.config.precision == "bf16"
        round, rounds = min(self.request.round, config.rounds), max(config.rounds, 1)
        stepwise = config.lr_schedule == "one-cycle"
        before, share = max(round - 1 + (part / parts if stepwise else 0), 0), 1 / parts

        def schedule(done: float) -> float:
            return learning_rate(config.lr_schedule, config.learning_rate, (before + done * share) / rounds)

        settings = (config.momentum, config.weight_decay, self.data.batch_size or config.batch_size)
        changing = schedule if stepwise else None
        return Optimisation(
            config.optimizer, schedule(0.0), *settings, changing, bf16, self.least, config.clip_gradients
        )

    def prepare(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Transform raw inputs to a training batch, augmented with `generator` if that is configured."""
        if self.augment is None or generator is None:
            return self.transform(inputs)
        if self.own_data:
            follow_torch()
        return self.transform(self.augment(inputs, generator))

    def read(
        self,
        inputs: Tensor | LazyInputs,
        *,
        until: Representation | None = None,
        rows: int = BATCH,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the network's outputs, or Phi, for raw inputs in evaluation mode (see `fedhet.learning.read`)."""
        return read(self.model, inputs, self.transform, until=until, rows=rows, tokens=tokens)

    def scores(self, inputs: Tensor, kind: Literal["logits", "probabilities"], tokens: Tensor | None = None) -> Tensor:
        """Return class scores (n, C) of raw inputs in evaluation mode; raises `ModelError` for other outputs.

        If the network has outputs for each token, `tokens` (n,) names one token of each input.
        """
        outputs = self.read(inputs, rows=ROWS_AT_ONCE, tokens=tokens)
        return scores_of(self.task.outputs.scores(outputs), len(inputs), kind)

    def check_classes(self, *, outputs: bool = False) -> None:
        """Check that each example has one class, with `outputs` that each class has an output; raises `DataError`."""
        if outputs and self.task.name == "binary":
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs an output for each class, and a binary task has "
                "one for both: give the network two"
            )
        if self.data.train.labels.ndim != 1:
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs examples of one class each, and their task is "
                f"{self.task.name}"
            )

    def check_scores(self, reason: str, *, tokens: bool = False, numbers: bool = False) -> None:
        """Check that each example has one vector of class scores; raises `DataError` with the reason.

        Args:
            reason: why they are needed, a clause of the message.
            tokens: whether one vector for each token is accepted.
            numbers: whether a vector of numbers is accepted.
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
        """Re-estimate BatchNorm's statistics from the training examples (see `fedhet.learning.reestimate`)."""
        reestimate(self.model, self.data.train.inputs, self.transform, chosen)


class ClientSide(Generic[P]):
    """The client side of a method. An object is made for every message. Subclasses override hooks.

    By default the network is trained on the client's examples, and shared arrays travel. The hooks are called in this
    order, depending on the message:

    - a network is built: `adapt`, `head_of`, and `groups_of` and `cut` if clients have parts of one network;
    - a question: `handshake` or `answer`;
    - training: `begin`, evaluation before training, `phases` (with `terms`), `end`, evaluation after training;
    - evaluation: `begin`, evaluation of the received model and of the client's own; `finish` at the end of a run.

    An evaluation calls `evaluate`, then `refine`. A phase can be followed by one, too (`Phase.measured`).
    """

    role: ClassVar[str] = "client"
    remembers: ClassVar[bool] = False
    """Whether `client.memory` is kept between rounds."""
    takes_any_loop: ClassVar[bool] = True
    """Whether a user's own train function may replace fedhet's (`fedhet.wrap`); not inherited by subclasses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_any_loop = cls.__dict__.get("takes_any_loop", False)

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        """Return a newly built model in the form that the method needs."""
        return model

    @classmethod
    def head_of(cls, config: Config) -> str:
        """Return the name of the head of a model from `adapt`; empty for the last `nn.Linear`."""
        return config.head

    @classmethod
    def groups_of(cls, model: nn.Module, inputs: Tensor) -> PermutationGroups:
        """Return the groups of units by which clients have parts of a model from `adapt`; by default all hidden ones.

        Args:
            model: the whole network.
            inputs: (2, ...) transformed examples.
        """
        return resizable_groups(model, inputs, partly=True)

    @classmethod
    def cut(cls, model: nn.Module, size: Size) -> nn.Module:
        """Return a client's part of a model from `adapt`, or the whole, where that is the size."""
        return size.cut(model)

    @property
    def parameters(self) -> P:
        """The method's own parameters."""
        parameters: P = self.client.config.parameters
        return parameters

    @cached_property
    def traits(self) -> Traits:
        """The method's traits, for these parameters."""
        return registry.traits(self.client.config)

    def shared_names(self) -> dict[str, str]:
        """Return the shared key of each shared array of the network, by name (see `Sharing`)."""
        return self._names

    @cached_property
    def _names(self) -> dict[str, str]:
        client = self.client
        head = client.head if callable(self.traits.shares.keys) else ""  # a network may have none
        network = NetworkDescription(client.model, head, client.architecture)
        aggregated = client.config.batch_norm == "aggregate"
        return self.traits.shares.names(network, client.names, statistics=aggregated)

    def shared(self) -> dict[str, Tensor]:
        """Return the shared tensors by shared key, not copied; by default those of the network."""
        tensors = self.client.tensors
        return {key: tensors[name] for name, key in self.shared_names().items()}

    def share(self) -> Payload:
        """Return the shared arrays, as they travel."""
        shared = self.shared()
        return Payload({"model": to_arrays(shared, self.client.config.wire_dtype)} if shared else {})

    def handshake(self, payload: Payload) -> Payload:
        """Return what the method needs to know at the handshake."""
        return Payload()

    def answer(self, question: str, payload: Payload) -> Payload:
        """Answer a question that the method asks within a round."""
        raise FedhetError(f"{self.client.config.method_name} asks its clients nothing, but was asked {question!r}")

    def begin(self, payload: Payload) -> None:
        """Load what the server sent, before evaluation and training."""
        if model := payload.arrays.get("model"):
            load_into(self.shared(), model)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the terms that are added to the task's loss."""
        return ()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return the phases of training, in order."""
        return [Phase(self.client.request.epochs, self.client.optimisation(), terms=self.terms(payload))]

    def end(self, payload: Payload) -> Payload:
        """Return the reply after training: shared arrays, and the means of values that loss terms recorded."""
        reply = self.share()
        reply.values |= self.client.trained.means
        return reply

    def refine(self, when: str) -> Sequence[Phase]:
        """Return phases to train before an evaluation (of `received` or `trained`), which are undone afterwards."""
        return ()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """Return a function from batch to outputs for an evaluation (of `received`, `trained` or a phase), or None."""
        return self.client.model

    def finish(self, payload: Payload) -> Payload:
        """Return the reply to the evaluation at the end of the run."""
        return Payload()

    def personal(self) -> dict[str, Tensor]:
        """Return the tensors to save as the client's own model at the end of a run; by default those of its network."""
        return self.client.tensors


AnySide = ClientSide[Any]
