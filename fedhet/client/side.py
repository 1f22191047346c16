"""The contract of a method's client side: its hooks, and the client that it works with."""

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
from fedhet.learning import BATCH, Loss, Optimisation, Phase, Trained, learning_rate, read, reestimate
from fedhet.method import Traits
from fedhet.options import Config, Parameters
from fedhet.randomness import derive_seed, torch_generator
from fedhet.representations import Representation
from fedhet.representations.features import ROWS_AT_ONCE, in_precision, precision, scores_of
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
        request: what is asked.
        data: its examples, on the device.
        representation: its network, on the device and its alone until the message is answered, which gives Phi.
        architecture: the network's name.
        task: loss, metric and prediction.
        device: where it computes.
        transform: from raw inputs to a model's.
        augment: draws variants of a raw training batch; None without augmentation.
        store: its files.
        own_data: whether its data are not the configured data set's.
        tokens: for how many tokens an example has a prediction; 1 where tokens have none.
        least: examples that must be behind every number that leaves it; means of fewer stay here.
        outputs: how many scores, or numbers, a prediction has.
        size: how much of the configured network its own is, where clients may have parts of it.
        memory: named tensors that the method wants kept from one round to the next (see `ClientSide.remembers`).
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
    def head(self) -> str:
        """Name of the module whose input is the representation."""
        return self.representation.head

    @property
    def precision(self) -> torch.dtype | None:
        """The floating dtype that the network computes in; None without parameters."""
        return precision(self.model)

    def beside(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is compared with the network's values: on its device, and floats in its dtype."""
        return in_precision(tensor.to(self.device), self.precision)

    def find_public(self) -> PublicDataset:
        """The public dataset that the request names: the client's own, labelled or not, or one that was kept.

        Raises:
            LostState: it is not here (any more).
            WireError: its examples have other axes, features or channels than the client's own.
        """
        brought = [] if self.data.public is None else [self.data.public, self.data.public.unlabelled]
        public = next((each for each in brought if each.digest == self.request.public), None)
        if public is None:
            public = self.store.public_dataset(self.request.public)
        own, shape = self.data.train.inputs[:1].shape, public.inputs.shape
        if len(shape) != len(own) or (len(own) != 3 and shape[1] != own[1]):
            raise WireError(
                f"the request's public dataset has examples of shape {list(shape[1:])}, and this client's are of "
                f"{list(own[1:])}"
            )
        return public

    @cached_property
    def public(self) -> PublicDataset:
        """The public dataset, on the device, with labels if the method needs them (see `find_public`)."""
        return relabelled(resident(self.find_public(), self.device), self.task.outputs.labels)

    def work_on(self, model: nn.Module) -> None:
        """Go on with another network of the same structure, whose widths differ from the configured ones."""
        places, self.representation = self.representation.places, Representation(model, self.head)
        self.representation.places = places

    def seed(self, *purpose: object) -> int:
        """A seed for one purpose of this client in this round."""
        return derive_seed(self.config.seed, *purpose, self.name, self.request.round)

    def generator(self, *purpose: object) -> torch.Generator:
        """A random stream for one purpose of this client in this round."""
        return torch_generator(self.config.seed, *purpose, self.name, self.request.round)

    def optimisation(self, part: int = 0, parts: int = 1) -> Optimisation:
        """How parameters are stepped in this round, as configured; the closing round has the last round's rate.

        Args:
            part: which of the round's phases it is for, if the rate changes by step; negative: of the round before.
            parts: how many phases there are, each of as many steps.
        """
        config, bf16 = self.config, self.config.precision == "bf16"
        round, rounds = min(self.request.round, config.rounds), max(config.rounds, 1)
        stepwise = config.lr_schedule == "one-cycle"
        before, share = max(round - 1 + (part / parts if stepwise else 0), 0), 1 / parts

        def schedule(done: float) -> float:
            return learning_rate(config.lr_schedule, config.learning_rate, (before + done * share) / rounds)

        settings = (config.momentum, config.weight_decay, self.data.batch_size or config.batch_size)
        return Optimisation(config.optimizer, schedule(0.0), *settings, schedule if stepwise else None, bf16)

    def prepare(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """A model's training batch of raw inputs, augmented if that is configured."""
        return self.transform(self.augment(inputs, generator) if self.augment else inputs)

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

        Of networks with outputs for each token, those of one token (n,) of each input.
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
            reason: for which they are needed, in words.
            tokens: whether one for each token will do.
            numbers: whether a vector of numbers will do.
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
        """Take BatchNorm's statistics anew from the client's training examples (see `fedhet.learning.reestimate`)."""
        reestimate(self.model, self.data.train.inputs, self.transform, chosen)


class ClientSide(Generic[P]):
    """The client side of a method, made anew for every message. Subclasses override what they need.

    By default the network is trained on the client's examples, and what is shared travels. The hooks are called in this
    order, when a network is built, and by what a message asks for:

    - build: `adapt`, `head_of`;
    - questions: `handshake`, or `answer`;
    - training: `begin`, an evaluation of what was received, `phases` (with `terms`), `end`, one of what was trained;
    - evaluation: `begin`, an evaluation of what was received, and of the client's own model; at a run's end `finish`.

    An evaluation calls `evaluate`, then `refine`; some follow on single phases, too (`Phase.measured`).
    """

    role: ClassVar[str] = "client"
    remembers: ClassVar[bool] = False
    """Whether `client.memory` is kept from round to round."""
    takes_any_loop: ClassVar[bool] = True
    """Whether a user's own train function may stand in for fedhet's (`fedhet.wrap`); not inherited by subclasses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_any_loop = cls.__dict__.get("takes_any_loop", False)

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        """A freshly built model as this method needs it."""
        return model

    @classmethod
    def head_of(cls, config: Config) -> str:
        """Name of the head of a model that `adapt` made; empty: the last `nn.Linear`."""
        return config.head

    @property
    def parameters(self) -> P:
        """The method's own parameters."""
        found: P = self.client.config.parameters
        return found

    @cached_property
    def traits(self) -> Traits:
        """The method's answers to the contract's six questions, for these parameters."""
        return registry.traits(self.client.config)

    def shared_names(self) -> dict[str, str]:
        """The shared key of each of the network's arrays that is shared, by name, as the method's `Sharing` says."""
        client = self.client
        head = client.head if callable(self.traits.shares.keys) else ""  # which a network may lack
        network = NetworkDescription(client.model, head, client.architecture)
        aggregated = client.config.batch_norm == "aggregate"
        return self.traits.shares.names(network, client.tensors, statistics=aggregated)

    def shared(self) -> dict[str, Tensor]:
        """The tensors that are shared, by shared key, in the client's memory; by default those of the network."""
        tensors = self.client.tensors
        return {key: tensors[name] for name, key in self.shared_names().items()}

    def share(self) -> Payload:
        """Return what is shared, as it travels."""
        shared = self.shared()
        return Payload({"model": to_arrays(shared, self.client.config.wire_dtype)} if shared else {})

    def handshake(self, payload: Payload) -> Payload:
        """Answer the server's handshake with whatever the method wants to know first."""
        return Payload()

    def answer(self, question: str, payload: Payload) -> Payload:
        """Answer a method's question of its own, within a round."""
        raise FedhetError(f"{self.client.config.method_name} asks its clients nothing, but was asked {question!r}")

    def begin(self, payload: Payload) -> None:
        """Take in what the server sent, before anything is evaluated or trained."""
        if model := payload.arrays.get("model"):
            load_into(self.shared(), model)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the terms that are added to the task's loss."""
        return ()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return the phases of training, in order."""
        return [Phase(self.client.request.epochs, self.client.optimisation(), terms=self.terms(payload))]

    def end(self, payload: Payload) -> Payload:
        """Return what is sent back after training: what is shared, and the means of what the terms recorded."""
        reply = self.share()
        reply.values |= self.client.trained.means
        return reply

    def refine(self, when: str) -> Sequence[Phase]:
        """Return phases of training before an evaluation of what was `received` or `trained`, undone behind it."""
        return ()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """From a prepared batch to outputs, of what was `received` or `trained` (or `Phase.measured`); or None."""
        return self.client.model

    def finish(self, payload: Payload) -> Payload:
        """Return what is sent back at the evaluation at the end."""
        return Payload()

    def personal(self) -> dict[str, Tensor]:
        """The tensors that are saved as the client's own model at the end of a run; by default those of its network."""
        return self.client.tensors


AnySide = ClientSide[Any]
