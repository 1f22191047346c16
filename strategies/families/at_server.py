"""Training at the server: of any network (`train_at_server`), or on the clients' mean representations (`Learner`)."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.data import Examples, PublicDataset
from fedhet.errors import FedhetError, ModelError
from fedhet.messages import Arrays, Reply, check_room, load_into, to_arrays
from fedhet.models.representation import precision
from fedhet.server import Common, FederatedStrategy, Options, State, option
from fedhet.setup import client_setup
from fedhet.tasks import Task
from fedhet.training import Loss, Optimisation, Phase, Training
from fedhet.utils.machine import device_of
from fedhet.utils.process import standard_settings
from fedhet.utils.randomness import derive_seed, seeded, torch_generator
from fedhet.utils.text import log

from .by_class import ByClass, ClassState, WidthKeys, outputs_of

N = TypeVar("N", bound=nn.Module)
P = TypeVar("P", bound=Options)
S = TypeVar("S", bound=State)


def build_at_server(build: Callable[[], N], seed: int) -> N:
    """Return the network that `build` returns, whose initial weights are drawn from a stream of `seed`."""
    with seeded(seed, "initial weights", "server"):
        return build()


def train_at_server(
    network: nn.Module,
    weights: Arrays,
    phase: Phase,
    examples: Examples,
    seed: int,
    round: int,
    transform: Callable[[Tensor], Tensor] = lambda batch: batch,
) -> tuple[Arrays, dict[str, float]]:
    """Train a network at the server, starting from `weights` unless empty; return the new weights and a metric.

    `phase` sets epochs, optimizer, augmentation and loss terms; `transform` prepares a batch of raw inputs; `seed` and
    `round` seed random numbers. The metric `server_loss` is the mean loss. If training diverges, returns `weights` and
    no metric.
    """
    load_into(network.state_dict(), weights)
    task = Task("classification")
    generator = torch_generator(seed, "server", round)
    purpose = "dropout", "server", round

    def prepare(batch: Tensor, generator: torch.Generator | None) -> Tensor:
        return transform(phase.augment(batch, generator) if phase.augment and generator else batch)

    try:
        with standard_settings(), seeded(seed, *purpose):
            dropout = derive_seed(seed, *purpose)
            training = Training(network, phase, examples, task, prepare, generator, dropout)
            trained = training.result()
    except ModelError as error:
        log.warning("round %d: training failed, so the server's network is unchanged: %s", round, error)
        return weights, {}
    metrics = {} if trained.mean_loss is None else {"server_loss": trained.mean_loss}
    return to_arrays(network.state_dict()), metrics


class PublicAtServer(FederatedStrategy[P, S]):
    """Base class of strategies whose server trains a network on the public dataset."""

    @property
    def public(self) -> PublicDataset:
        """The public dataset; raises a FedhetError if only the clients have it."""
        if self.run.public is None:
            raise FedhetError(
                f"{self.method.family}'s server needs public data: pass it as public=... to the strategy or to "
                "make_server_app or, with an included data set, set public-samples"
            )
        return self.run.public

    @property
    def device(self) -> torch.device:
        """The device on which the server trains: a GPU if there is one, unless the key `device` is cpu."""
        return device_of("cpu" if self.config.device == "cpu" else "auto")

    def transform(self, network: nn.Module | None = None, *, own_data: bool = False) -> Callable[[Tensor], Tensor]:
        """Return the function from raw inputs to a network's inputs; `own_data`: of a client that is not admitted."""
        dataset = None if self.run.own_data or own_data else client_setup.dataset_of(self.config)
        return client_setup.transform_of(dataset, None if network is None else precision(network))

    def train_on_public(
        self, network: nn.Module, weights: Arrays, phase: Phase, examples: Examples, round: int
    ) -> tuple[Arrays, dict[str, float]]:
        """Train a network on `device` by `train_at_server`, and leave it there."""
        network.to(self.device)
        examples = Examples(examples.inputs.to(self.device), examples.labels.to(self.device))
        return train_at_server(network, weights, phase, examples, self.config.seed, round, self.transform(network))


COPIES = 8
"""Copies of its network for which the server needs memory: weights, gradients, optimizer, states."""


@dataclass(frozen=True)
class LearnerKeys(WidthKeys):
    """Keys of methods whose server trains a network on clients' mean representations of classes."""

    server_epochs: ClassVar[int] = 1
    """Number of epochs that the server trains per round, fixed by the method (not a key)."""

    server_learning_rate: float = option(0.01, "learning rate of the server's SGD", above=0)


@dataclass
class LearnerState(ClassState):
    """The state of a `Learner`: `learner` has the float64 weights of the server's network."""

    learner: Arrays = field(default_factory=dict)


L = TypeVar("L", bound=LearnerKeys)


class Learner(ByClass[L, LearnerState]):
    """Base class of strategies that train a network on the clients' mean representations; each mean is an example."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Return a new network for the server, with weights drawn from torch's global random generator."""

    def terms(self, means: Tensor, classes: Tensor) -> tuple[Loss, ...]:
        """Return losses to train on mean representations `means` (n, width) of `classes` (n,); () for cross entropy."""
        return ()

    def common(self, reply: Reply) -> Mapping[str, Common]:
        outputs = Common(outputs_of(reply), "all clients need an output for each of the same classes")
        return {**super().common(reply), "number of network outputs": outputs}

    def admit(self, reply: Reply) -> None:
        super().admit(reply)
        self.state.outputs = outputs_of(reply)
        width = self.state.width
        size = COPIES * 8 * width * max(width, self.state.outputs)
        check_room(size, "the server needs memory for the client's classes and width:")
        if not self.state.learner:
            self.state.learner = to_arrays(self.learner().state_dict())

    def learner(self) -> nn.Module:
        network = build_at_server(self.network, self.config.seed).double()
        load_into(network.state_dict(), self.state.learner)
        return network

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        sent = self.bounded(replies)
        inputs = torch.from_numpy(np.concatenate([arrays["means"] for arrays in sent])).double()
        labels = torch.from_numpy(np.concatenate([arrays["classes"] for arrays in sent]))
        terms = self.terms(inputs, labels)
        steps = Optimisation(learning_rate=self.options.server_learning_rate, batch_size=self.config.batch_size)
        phase = Phase(self.options.server_epochs, steps, terms=terms, task_weight=0.0 if terms else 1.0)
        self.state.learner, metrics = train_at_server(
            self.learner(), self.state.learner, phase, Examples(inputs, labels), self.config.seed, round
        )
        return metrics
