"""The client side of a method: its hooks and their defaults."""

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
from fedhet.methods.options import Config, Parameters
from fedhet.methods.sharing import NetworkDescription
from fedhet.models.arrays import Kind, kinds_of
from fedhet.training import Loss, Phase

P = TypeVar("P", bound=Parameters)


class ClientSide(Generic[P]):
    """The client side of a method. An object is made for every message. Subclasses override hooks.

    By default the network is trained on the client's examples, and shared arrays are sent. The hooks are called in this
    order, depending on the message:

    - when a network is built: `adapt`, `head_of`;
    - for a question: `handshake` or `answer`;
    - for training: `begin`, evaluation before training, `phases` (with `terms`), `end`, evaluation after training;
    - for evaluation: `begin`, evaluation of the received model and of the client's own; `finish` at the end of a run.

    An evaluation calls `evaluate`, then `refine`.
    """

    role: ClassVar[str] = "client"
    remembers: ClassVar[bool] = False
    """Whether `client.memory` is kept between rounds."""
    takes_any_loop: ClassVar[bool] = True
    """Whether a user's own train function may replace fedhet's (`fedhet.wrap`); not inherited by subclasses."""
    parts: ClassVar[type[Submodel] | None] = None
    """How clients get parts of one network; None if each client has a whole one."""

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

    @property
    def parameters(self) -> P:
        """The method's own parameters."""
        parameters: P = self.client.config.parameters
        return parameters

    @cached_property
    def traits(self) -> Traits:
        """The method's traits for these parameters."""
        return registry.traits(self.client.config)

    def shared_names(self) -> dict[str, str]:
        """Return the shared key of each shared array of the network, by the array's name (see `Sharing`)."""
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
        """The network whose arrays are sent; by default the client's."""
        return self.client.model

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of the arrays of the network that is sent, by name and by shared key."""
        kinds, keys = kinds_of(self.network), self.shared_names()
        return kinds | {keys[name]: kind for name, kind in kinds.items() if name in keys}

    def shared(self) -> dict[str, Tensor]:
        """Return the shared tensors by shared key, not copied; by default those of the network."""
        tensors = self.client.tensors
        return {key: tensors[name] for name, key in self.shared_names().items()}

    def share(self) -> Payload:
        """Return the shared arrays in the precision in which they are sent."""
        shared = self.shared()
        return Payload({"model": to_arrays(shared, self.client.config.wire_dtype)} if shared else {})

    def handshake(self, payload: Payload) -> Payload:
        """Return what the method needs to know about the client before the first round."""
        return Payload()

    def answer(self, question: str, payload: Payload) -> Payload:
        """Answer a question that the method asks within a round."""
        raise FedhetError(f"{self.client.config.method_name} asks its clients nothing, but was asked {question!r}")

    def begin(self, payload: Payload) -> None:
        """Load what the server sent, before evaluation and training."""
        if model := payload.arrays.get("model"):
            load_into(self.shared(), model)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the terms to add to the task's loss."""
        return ()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return the phases of training in order; by default one on the client's examples."""
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
        """Return the function from batch to outputs to evaluate (`received` or `trained`), or None."""
        return self.client.model

    def finish(self, payload: Payload) -> Payload:
        """Return the reply to the evaluation at the end of the run."""
        return Payload()

    def personal(self) -> dict[str, Tensor]:
        """Return the tensors to save as the client's personal model at the end of a run; by default its network's."""
        return self.client.tensors


AnySide = ClientSide[Any]
