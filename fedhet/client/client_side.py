"""The base class of a method's client side: its hooks and their defaults."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from fedhet.client.client import Client
from fedhet.client.submodel import Submodel
from fedhet.errors import FedhetError
from fedhet.messages import Payload, load_into, to_arrays
from fedhet.methods import registry
from fedhet.methods.method import Traits
from fedhet.methods.options import Config, Options
from fedhet.methods.sharing import NetworkDescription
from fedhet.models.copies import Kind, kinds_of
from fedhet.training import Loss, Phase

P = TypeVar("P", bound=Options)


class ClientSide(Generic[P]):
    """The client side of a method, created for every message. Subclasses override hooks.

    By default, the network is trained on the client's examples, and the shared arrays are sent. The hooks are called in
    this order, depending on the message:

    - when a network is built: `adapt`, `head_of`;
    - for a question: `handshake` or `answer`;
    - for training: `begin`, evaluation before training, `phases` (with `terms`), `end`, evaluation after training;
    - for evaluation: `begin`, evaluation of the received and the personal model; `finish` at the end of a run.

    Each evaluation calls `evaluate`, then `refine`.
    """

    role: ClassVar[str] = "client"
    remembers: ClassVar[bool] = False
    """Whether `client.memory` is kept between rounds."""
    takes_any_loop: ClassVar[bool] = True
    """Whether a user's own train function may replace fedhet's (`fedhet.wrap`); not inherited by subclasses."""
    parts: ClassVar[type[Submodel] | None] = None
    """The kind of part that a client trains of a common network; None if each client has a whole network."""

    reads_starts: ClassVar[bool] = False
    """Whether the method needs `client.starts`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_any_loop = cls.__dict__.get("takes_any_loop", False)

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        """Return a newly built model in the form that the method needs; by default unchanged."""
        return model

    @classmethod
    def head_of(cls, config: Config) -> str:
        """Return the name of the head in a model that `adapt` returned; empty for the last `nn.Linear`."""
        return config.head

    @property
    def options(self) -> P:
        """The values of the method's own options."""
        options: P = self.client.config.options
        return options

    @cached_property
    def traits(self) -> Traits:
        """The method's traits for these options: what its clients share, send and keep."""
        return registry.traits(self.client.config)

    def shared_names(self) -> dict[str, str]:
        """Map the name of each shared array of the network to the key under which it is sent (see `Sharing`)."""
        return self._names

    @cached_property
    def _names(self) -> dict[str, str]:
        client = self.client
        head = client.head if callable(self.traits.shares.keys) else ""  # a network may have none
        network = NetworkDescription(client.model, head, client.architecture)
        aggregated = client.config.batch_norm == "aggregate"
        return self.traits.shares.names(network, client.names, statistics=aggregated)

    @property
    def network(self) -> nn.Module:
        """The network whose arrays are sent; by default the client's network."""
        return self.client.model

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kind (such as "trained" or "statistic") of each array of `network`, by name and by shared key."""
        kinds, keys = kinds_of(self.network), self.shared_names()
        return kinds | {keys[name]: kind for name, kind in kinds.items() if name in keys}

    def shared(self) -> dict[str, Tensor]:
        """Return the tensors to send, by shared key and without copies; by default shared arrays of the network."""
        tensors = self.client.tensors
        return {key: tensors[name] for name, key in self.shared_names().items()}

    def share(self) -> Payload:
        """Return a payload with the shared arrays, in the configured precision for sending."""
        shared = self.shared()
        return Payload({"model": to_arrays(shared, self.client.config.wire_dtype)} if shared else {})

    def handshake(self, payload: Payload) -> Payload:
        """Return what the method's server side needs to know about the client before the first round."""
        return Payload()

    def answer(self, question: str, payload: Payload) -> Payload:
        """Answer a question that the method's server side asks within a round."""
        raise FedhetError(
            f"the client side of {self.client.config.method_name} cannot answer {question!r}: override its `answer`"
        )

    def begin(self, payload: Payload) -> None:
        """Load the arrays that the server sent, before evaluation and training."""
        if model := payload.arrays.get("model"):
            load_into(self.shared(), model)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the loss terms to add to the task's loss in training."""
        return ()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return the training phases in order; by default one phase on the client's examples."""
        return [Phase(self.client.request.epochs, self.client.optimisation(), terms=self.terms(payload))]

    def end(self, payload: Payload) -> Payload:
        """Return the reply after training; by default shared arrays, and means of values that loss terms recorded."""
        reply = self.share()
        reply.values |= self.client.trained.means
        return reply

    def refine(self, when: str) -> Sequence[Phase]:
        """Return phases that fine-tune the network for one evaluation only; its weights are restored afterwards.

        `when` is `received` for the received model, `trained` for the model after training.
        """
        return ()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function from inputs to outputs to evaluate, or None for no evaluation (`when`: see `refine`)."""
        return self.client.model

    def finish(self, payload: Payload) -> Payload:
        """Return what to send with the evaluation at the end of the run; by default nothing."""
        return Payload()

    def personal(self) -> dict[str, Tensor]:
        """Return the tensors to save as the personal model at the end of a run; by default the client's network."""
        return self.client.tensors


AnySide = ClientSide[Any]
