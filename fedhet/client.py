"""What a method's client half is, and what it works with.

A `ClientHalf` says what travels (`exchange`), what is trained (`phases`, `terms`) and what is sent back (`reply`).
Model, data, optimiser, device, random streams and lasting state come from a `Client`, made anew for every message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedhet.config import Config
from fedhet.data import ClientData
from fedhet.errors import FedhetError
from fedhet.exchange import Exchange, load_into
from fedhet.randomness import derive_seed, torch_generator
from fedhet.representations import Representation
from fedhet.task import Task
from fedhet.training import LossTerm, Optimisation, Phase, scheduled
from fedhet.wire import Payload, to_arrays


class LostState(FedhetError):
    """A client lacks what the server believes it to have; the server greets it again."""


@dataclass(frozen=True)
class Request:
    """What the server asks of a client, beside the method's payload.

    Attributes:
        round: the round, from 1; 0 while greeting.
        expected: the round whose state the server believes the client to have; -1 for none.
        epochs: local epochs of this round.
        evaluate: whether to evaluate before and after.
        final: whether this is the evaluation at the end, when personal models are saved.
        question: what is asked, in a query.
        run: the run's own name, where the client's state folder serves several runs.
    """

    round: int = 0
    expected: int = -1
    epochs: int = 0
    evaluate: bool = False
    final: bool = False
    question: str = ""
    run: str = ""


@dataclass
class Client:
    """One client while it handles one message.

    Attributes:
        name: the client's own name.
        config: the run's configuration, with this node's own settings.
        request: what is asked.
        data: its examples, on the device.
        model: its network, on the device.
        representation: gives Phi of the network, and the name of its head.
        tensors: the network's state dict, which shares its memory.
        architecture: the architecture's name.
        task: loss, metric and prediction.
        device: where it computes.
        transform: from raw inputs to a model's.
        augment: draws variants of a raw training batch; None without augmentation.
        pool: the shared pool with a given digest, on the device; raises `LostState` where it is not (any more).
        keep_pool: keeps a pool that the server sent.
        memory: named tensors that the method wants kept from one round to the next (see `ClientHalf.remembers`).
    """

    name: str
    config: Config
    request: Request
    data: ClientData
    model: nn.Module
    representation: Representation
    tensors: dict[str, Tensor]
    architecture: str
    task: Task
    device: torch.device
    transform: Callable[[Tensor], Tensor]
    augment: Callable[[Tensor, torch.Generator], Tensor] | None
    pool: Callable[[str], Tensor]
    keep_pool: Callable[[Tensor], None]
    memory: dict[str, Tensor] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """Name of the module whose input is the representation."""
        return self.representation.head

    def work_on(self, model: nn.Module) -> None:
        """Go on with another network of the same structure, whose widths differ from the configured ones."""
        self.model, self.representation, self.tensors = model, Representation(model, self.head), model.state_dict()

    def seed(self, *purpose: object) -> int:
        """A seed for one purpose of this client in this round."""
        return derive_seed(self.config.seed, *purpose, self.name, self.request.round)

    def generator(self, *purpose: object) -> torch.Generator:
        """A random stream for one purpose of this client in this round."""
        return torch_generator(self.config.seed, *purpose, self.name, self.request.round)

    def optimisation(self) -> Optimisation:
        """How parameters are stepped in this round, as configured; the closing round has the last round's rate."""
        config = self.config
        round = min(self.request.round, config.rounds)
        rate = scheduled(config.lr_schedule, config.learning_rate, round, config.rounds)
        return Optimisation(config.optimizer, rate, config.momentum, config.weight_decay, config.batch_size)

    def prepare(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """A model's training batch of raw inputs, augmented if that is configured."""
        return self.transform(self.augment(inputs, generator) if self.augment else inputs)


class ClientHalf:
    """What a method does at a client. Subclasses override what they need; the defaults are FedAvg."""

    personal: ClassVar[bool] = False
    """Whether a client has a model of its own after training; its whole state is then kept from round to round."""

    remembers: ClassVar[bool] = False
    """Whether `client.memory` is kept from round to round."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        """A freshly built model as this method needs it."""
        return model

    @property
    def parameters(self) -> Any:
        """The method's own parameters."""
        return self.client.config.parameters

    def exchange(self) -> Exchange:
        """What of the model travels, both ways."""
        return Exchange("all", self.client.config.batch_norm == "aggregate")

    @property
    def starts_together(self) -> bool:
        """Whether clients start from one initialisation (with `shared-init`), what does not travel included."""
        return self.exchange().part != "nothing"

    def travelling(self) -> dict[str, Tensor]:
        """The model's tensors that travel."""
        return self.exchange().select(self.client.tensors, self.client.head)

    def greet(self, payload: Payload) -> Payload:
        """Answer the server's greeting with whatever the method wants to know first."""
        return Payload()

    def answer(self, question: str, payload: Payload) -> Payload:
        """Answer a method's question of its own, within a round."""
        raise FedhetError(f"{self.client.config.method} asks its clients nothing, but was asked {question!r}")

    def receive(self, payload: Payload) -> None:
        """Take in what the server sent, before anything is evaluated or trained."""
        load_into(self.client.tensors, payload.arrays.get("model", {}))

    def terms(self, payload: Payload) -> tuple[LossTerm, ...]:
        """What is added to the task's loss."""
        return ()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """What is trained, in order."""
        return [Phase(self.client.request.epochs, self.client.optimisation(), terms=self.terms(payload))]

    def reply(self, payload: Payload) -> Payload:
        """What is sent back after training."""
        travels = self.travelling()
        return Payload({"model": to_arrays(travels, self.client.config.wire_dtype)} if travels else {})

    def evaluates(self, when: str) -> bool:
        """Whether the client has a model to evaluate: as `received`, or as `trained`."""
        return True

    def scores(self) -> Callable[[Tensor], Tensor] | None:
        """From a prepared batch to outputs, where the method predicts otherwise than by the model's own outputs."""
        return None

    def finish(self, payload: Payload) -> Payload:
        """What is sent back at the evaluation at the end."""
        return Payload()
