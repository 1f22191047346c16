"""A client, and `ClientSide`, the base class of a method's client side, whose methods subclasses override."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from fedhet.algorithms.graphs import Submodel
from fedhet.client.state import ClientStore
from fedhet.data import Augment, ClientData, Examples, PublicDataset, resident
from fedhet.data.examples import relabelled
from fedhet.data.reading import LazyInputs, single
from fedhet.errors import DataError, Refused
from fedhet.messages import LostState, Payload, Request, load_into, to_arrays
from fedhet.methods import registry
from fedhet.methods.method import Traits
from fedhet.methods.options import Config, Options
from fedhet.methods.sharing import NetworkDescription
from fedhet.models.copies import Kind, Start, kinds_of, storage_place
from fedhet.models.estimators import Estimator
from fedhet.models.representation import ROWS_AT_ONCE, Representation, in_precision
from fedhet.tasks import Task
from fedhet.training import BATCH, Loss, Optimisation, Phase, Privacy, Trained, learning_rate, read, reestimate
from fedhet.utils.inputs import parts_of
from fedhet.utils.randomness import SecretStream, derive_seed, torch_generator

P = TypeVar("P", bound=Options)

LARGEST_RATIO = 100
"""Largest accepted magnitude of received values, as a multiple of the order of magnitude of the client's own values."""


@dataclass
class Client:
    """A client while it handles one message.

    Attributes:
        name: the client's name, such as its number.
        config: the run's configuration, with this node's own settings.
        request: the server's request, such as the round and the number of epochs.
        data: the client's examples, on `device`.
        representation: the network on `device`, with the layer that gives its representation.
        architecture: name of the network's architecture.
        described: a text about a user's model that changes with its modules and functions.
        task: the task, which defines loss and metric.
        device: the device of the network.
        transform: function from raw inputs to the network's inputs.
        augment: function that augments a raw training batch; None without augmentation.
        store: the client's files, such as its saved state.
        least: minimum number of examples behind every number that leaves the node (`min-examples`).
        secret: random seed unknown to the server, for nodes that limit what is sent (`allow`) or add noise; else None.
        privacy: differential privacy of the client's training; None for ordinary training.
        outputs: number of values in a prediction, such as class scores.
        part: the client's part of the configured network, for methods whose clients train parts of different sizes.
        starts: by name, mean and standard deviation of each array of a newly built network, if the method needs them.
        memory: named tensors that the method keeps between rounds (see `ClientSide.remembers`).
        trained: the combined result of the training phases so far.
    """

    name: str
    config: Config
    request: Request
    data: ClientData
    representation: Representation
    architecture: str = ""
    described: str = ""
    task: Task = field(default_factory=lambda: Task("classification"))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    transform: Callable[[Tensor], Tensor] = lambda inputs: inputs
    augment: Augment | None = None
    store: ClientStore = field(default_factory=lambda: ClientStore(".", "", ""))
    least: int = 1
    secret: int | None = None
    privacy: Privacy | None = None
    outputs: int = 0
    part: Submodel | None = None
    starts: Mapping[str, Start] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    trained: Trained = field(default_factory=Trained)

    @property
    def own_data(self) -> bool:
        """Whether the data come from a user's function instead of the configured data set."""
        return self.data.dataset is None

    @property
    def model(self) -> nn.Module:
        """The client's network."""
        return self.representation.model

    @property
    def estimator(self) -> Estimator | None:
        """The client's model, if it is an estimator in place of a network; else None."""
        return self.model if isinstance(self.model, Estimator) else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The network's state dict, whose tensors share memory with the network."""
        return self.model.state_dict()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the network's arrays, in the order of its state dict."""
        return tuple(self.tensors)

    @property
    def head(self) -> str:
        """Name of the module whose input is the representation."""
        return self.representation.head

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the network's device, with floating-point values in the network's dtype."""
        return in_precision(tensor.to(self.device), self.representation.precision)

    @cached_property
    def public(self) -> PublicDataset:
        """The public dataset that the request names, on the client's device; raises `LostState` if it is missing."""
        brought = [] if self.data.public is None else [self.data.public, self.data.public.unlabelled]
        public = next((dataset for dataset in brought if dataset.digest == self.request.public), None)
        if public is None:
            public = self.store.public_dataset(self.request.public)
        return self.prepared(public)

    def prepared(self, public: PublicDataset) -> PublicDataset:
        """Return a public dataset on the client's device, with labels as the client's task needs them."""
        return relabelled(resident(public, self.device), self.task.outputs.labels)

    def work_on(self, model: nn.Module) -> None:
        """Replace the client's network by `model`, whose modules have the same names."""
        before = self.representation
        self.representation = Representation(model, self.head, self.representation.what)
        self.representation.places = before.places

    @property
    def remembered(self) -> dict[str, Tensor]:
        """`memory`, on which a message depends; raises `LostState` if it is lost, and the server sends all anew."""
        if not self.memory:
            raise LostState(f"client {self.name}: its state of round {self.request.expected} is lost")
        return self.memory

    @property
    def root(self) -> int:
        """The seed of the client's random streams: the run's, mixed with the node's secret seed if it has one."""
        return self.config.seed if self.secret is None else derive_seed(self.secret, self.config.seed)

    def seed(self, *purpose: object) -> int:
        """Return an integer seed that depends on `purpose` (strings or numbers), the client and the round."""
        return derive_seed(self.root, *purpose, self.name, self.request.round)

    def generator(self, *purpose: object, lasting: bool = False) -> torch.Generator:
        """Return a random generator whose seed depends on `purpose`, the client and, unless `lasting`, the round."""
        round = () if lasting else (self.request.round,)
        return torch_generator(self.root, *purpose, self.name, *round)

    def order(self, *purpose: object) -> SecretStream | None:
        """Return the secret stream for a `purpose` that depends on the client and the round; None without a secret."""
        if self.secret is None:
            return None
        return SecretStream.of(self.secret, self.config.seed, *purpose, self.name, self.request.round)

    def optimisation(self, part: int = 0, parts: int = 1) -> Optimisation:
        """Return the round's optimiser settings; a closing round, after the last round, has the last round's settings.

        If the learning rate changes with each step (`one-cycle`), it depends on `part`, the index of the training phase
        among the round's `parts` phases of equal length; -1 is the last phase of the previous round.
        """
        config = self.config
        round = min(self.request.round, config.rounds)
        rounds = max(config.rounds, 1)
        stepwise = config.lr_schedule == "one-cycle"
        before = max(round - 1 + (part / parts if stepwise else 0), 0)
        share = 1 / parts

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

    def prepare(self, inputs: Tensor, generator: torch.Generator | None, augment: Augment | None = None) -> Tensor:
        """Transform raw inputs (n, ...); with a `generator`, first `augment` them (default: as is configured)."""
        augment = augment or self.augment
        if augment is None or generator is None:
            return self.transform(inputs)
        wide = self.representation.precision == torch.float64
        inputs = in_precision(inputs, torch.float64) if wide else single(inputs)
        return self.transform(augment(inputs, generator))

    def read(self, inputs: Tensor | LazyInputs, *, until: Representation | None = None, rows: int = BATCH) -> Tensor:
        """Return outputs (or the representation `until`, if given) for raw inputs, evaluated in batches of `rows`."""
        return read(self.model, inputs, self.transform, until=until, rows=rows)

    def represent(self, inputs: Tensor | LazyInputs) -> Tensor:
        """Return representations (n, d) of n raw inputs in evaluation mode."""
        return self.read(inputs, until=self.representation, rows=ROWS_AT_ONCE)

    def scores(self, inputs: Tensor, kind: Literal["logits", "probabilities"]) -> Tensor:
        """Return class scores (n, C) for n raw inputs in evaluation mode, as logits or as probabilities."""
        scores = self.task.outputs.scores(self.read(inputs, rows=ROWS_AT_ONCE)).float()
        return scores.softmax(1) if kind == "probabilities" else scores

    def check_classes(self, *, outputs: bool = False) -> None:
        """Raise a DataError unless each example has one class and, if `outputs`, the network one output per class."""
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

    def check_scores(self, reason: str, *, numbers: bool = False) -> None:
        """Check that the network returns one vector of class scores for each example; raise a DataError otherwise.

        `reason` is a clause of the message that says why. With `numbers`, outputs of a regression are accepted, too.
        """
        outputs = self.task.outputs
        several = outputs.places != "one" and self.data.train.labels.ndim > 1
        if several or (outputs.meaning == "numbers" and not numbers):
            got = "numbers" if not several else f"vectors for each {outputs.places.removesuffix('s')}"
            raise DataError(
                f"client {self.name}: {self.config.method_name} needs one vector of class scores for each example, "
                f"{reason}, but the outputs of a {self.task.name} are {got}: choose another method"
            )

    def check_size(self, name: str, received: Tensor, own: Callable[[], Tensor], *, least: float = 10.0) -> None:
        """Raise `Refused` if `received` values are far beyond the client's `own`, at a node with `allow`.

        `name` is for the message. The limit is `LARGEST_RATIO` times the next power of ten of the root mean square of
        `own`, or of `least`: a server that tries it out learns an order of magnitude of many examples, and nothing of
        one. Under `dp-noise`, nothing is compared, because even a refusal would depend on examples without noise.
        """
        if self.secret is None or self.privacy is not None:
            return
        ours = parts_of(own())
        for part, values in parts_of(received).items():
            tokens = part in ours and values.dtype == ours[part].dtype and not values.is_floating_point()
            if part not in ours or not values.numel() or tokens:
                continue
            size = max(float(_numbers(ours[part]).square().mean().sqrt()), least)
            limit = LARGEST_RATIO * 10 ** math.ceil(math.log10(size))
            if not (largest := float(_numbers(values).abs().max())) <= limit:  # a NaN is no number up to the limit
                raise Refused(
                    f"the server sent {name} up to {largest:.3g}, but this node accepts at most {limit:g}, by the size "
                    f"of its own: scale all clients' {name} alike, or, if training diverged, reduce learning-rate"
                )

    def reestimate(self, chosen: Callable[[str], bool] = lambda name: True) -> None:
        """Re-estimate running statistics on training examples in layers whose running mean's name is `chosen`."""
        reestimate(self.model, self.data.train.inputs, self.transform, chosen)


def _numbers(values: Tensor) -> Tensor:
    """Return values in float64; bytes are scaled, as for networks."""
    return values.double() / (255 if values.dtype == torch.uint8 else 1)


class ClientSide(Generic[P]):
    """The client side of a method, created for every message. Subclasses override its methods.

    By default, the network is trained on the client's examples, and its shared arrays are sent to the server. The
    message determines which methods are called, in this order:

    - when a network is built: `adapt`, `head_of`, `starts_of`;
    - before the first round: `handshake`;
    - for training: `begin`, evaluation before training, `phases` (with `terms`), `end`, evaluation after training;
    - for evaluation: `begin`, evaluation of the received and the personal model;
    - in each evaluation: `evaluate`, then `refine`.

    Attributes:
        role: "client", which distinguishes client sides from strategies.
        remembers: whether `client.memory` is kept between rounds.
        takes_any_loop: whether a user's own train function may replace fedhet's (`fedhet.wrap`); not inherited.
        needs_labels: whether clients train on labels; otherwise, training examples may be `fedhet.data.UNLABELLED`.
        takes_estimators: whether clients may have estimators, such as scikit-learn's, in place of networks.
        trains_network: whether clients have a trained network to save; False if they fit another classifier.
        noisy_sums: whether means over training examples that clients send (prototypes) get noise under `dp-noise`, by
            `Privacy.class_sums`; otherwise nodes with this key refuse the method.
        parts: the class of submodels, if clients train parts of a common network; None if they train whole networks.
    """

    role: ClassVar[str] = "client"
    remembers: ClassVar[bool] = False
    takes_any_loop: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True
    takes_estimators: ClassVar[bool] = False
    trains_network: ClassVar[bool] = True
    noisy_sums: ClassVar[bool] = False
    parts: ClassVar[type[Submodel] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_any_loop = cls.__dict__.get("takes_any_loop", False)

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def adapt(cls, model: nn.Module, config: Config) -> nn.Module:
        """Return a newly built `model` in the form that the method needs; by default unchanged."""
        return model

    @classmethod
    def head_of(cls, config: Config) -> str:
        """Return the name of the head in a model that `adapt` returned; an empty string for the last `nn.Linear`."""
        return config.head

    @classmethod
    def starts_of(cls, build: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Mapping[str, Start]:
        """Return `client.starts`, if the method needs them; `build` returns a new network, `inputs` some of its inputs.

        By default, return no starts.
        """
        return {}

    @property
    def options(self) -> P:
        """The values of the method's own options."""
        return self.client.config.options

    @cached_property
    def traits(self) -> Traits:
        """The method's properties with its configured options: what its clients share, send and keep between rounds."""
        return registry.traits(self.client.config)

    def shared_names(self) -> dict[str, str]:
        """Return the key in messages of each shared array, by the array's name in the state dict."""
        return self._names

    @cached_property
    def _names(self) -> dict[str, str]:
        client = self.client
        named = self.traits.inside and callable(self.traits.shares.keys)  # a network may have no head
        head = client.head if named else ""
        network = NetworkDescription(client.model, head, client.architecture)
        aggregated = client.config.batch_norm == "aggregate"
        return self.traits.shares.names(network, client.names, statistics=aggregated)

    @property
    def network(self) -> nn.Module:
        """The network whose arrays are sent; by default the client's network."""
        return self.client.model

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each array of `network`, by its name in the state dict and, if shared, by its key in messages.

        Parameters are `trained` or `frozen`, running statistics `statistic`, and other buffers `buffer`.
        """
        kinds = kinds_of(self.network)
        keys = self.shared_names()
        return kinds | {keys[name]: kind for name, kind in kinds.items() if name in keys}

    def shared(self) -> dict[str, Tensor]:
        """Return the tensors to send, by key in messages, without copies; by default the network's shared arrays."""
        names = self.shared_names()
        tensors = self.client.tensors if names else {}
        return {key: tensors[name] for name, key in names.items()}

    def share(self) -> Payload:
        """Return a payload with the shared arrays."""
        shared = self.shared()
        return Payload({"model": to_arrays(shared)} if shared else {})

    def handshake(self, payload: Payload) -> Payload:
        """Return what the server needs to know before the first round; `payload` is what the server sent."""
        return Payload()

    def begin(self, payload: Payload) -> None:
        """Load the arrays in the server's `payload` into the network, before evaluation and training."""
        if model := payload.arrays.get("model"):
            load_into(self.shared(), model)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the loss terms to add to the task's loss in training, given the server's `payload`."""
        return ()

    def phases(self, payload: Payload) -> Sequence[Phase]:
        """Return the training phases, given the server's `payload`; by default one phase with the loss `terms`."""
        return [Phase(self.client.request.epochs, self.client.optimisation(), terms=self.terms(payload))]

    def end(self, payload: Payload) -> Payload:
        """Return the reply to `payload` after training: by default shared arrays, and means of loss terms' scalars."""
        reply = self.share()
        reply.values |= self.client.trained.means
        return reply

    def refine(self, when: str) -> Sequence[Phase]:
        """Return phases that fine-tune the network for one evaluation only; its weights are restored afterwards.

        `when` is `received` for the received model, `trained` for the model after training.
        """
        return ()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function from transformed inputs to outputs to evaluate, or None to skip this evaluation.

        If it is neither the network nor another module, override `beside` and `loaded`, for `fedhet.load_model`.

        `when` is `received` for the received model, `trained` for the model after training.
        """
        return self.client.model

    def personal(self) -> dict[str, Tensor]:
        """Return the network's tensors to save as the personal model; by default those of the client's network."""
        return self.client.tensors

    def beside(self) -> dict[str, Tensor]:
        """Return the tensors that predictions need besides the network's, to be saved and passed to `loaded`.

        By default, they are those of the module that `evaluate` returns, if it is not the client's network.
        """
        predictor = self.evaluate(self.traits.scored)
        if predictor is self.client.model or not isinstance(predictor, nn.Module):
            return {}
        network = {storage_place(tensor) for tensor in self.client.tensors.values()}
        return {key: each for key, each in predictor.state_dict().items() if storage_place(each) not in network}

    def loaded(self, beside: Mapping[str, Tensor]) -> nn.Module:
        """Return the module that predicts as `evaluate` does, for tensors `beside`, which are loaded into it later."""
        predictor = self.evaluate(self.traits.scored)
        assert isinstance(predictor, nn.Module)  # as `beside` returned its tensors
        return predictor

    @classmethod
    def of_saved(cls, name: str, config: Config, network: nn.Module, round: int, inputs: Tensor) -> Self:
        """Return the side of the client `name` with a saved `network`, for `loaded`; `inputs` have a batch's shape."""
        examples = Examples(inputs, torch.zeros(len(inputs), dtype=torch.long))
        phi = Representation(network, cls.head_of(config), config.representation)
        return cls(Client(name, config, Request(round=round), ClientData(examples, examples), phi))


AnySide = ClientSide[Any]
