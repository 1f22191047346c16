"""Client sides of FML, FedKD and FLHA-distillation: a client's own network and a shared one learn from each other.

FML (Shen et al., 2020), for labels y:

    L_own    = alpha CE(own, y)  + (1 - alpha) KL(shared || own)
    L_shared = beta CE(shared, y) + (1 - beta)  KL(own || shared)

FedKD (Wu et al., 2022), with the networks' representations H and a learned linear projector W that stays on the client;
s and the first argument of each KL are constants:

    L_own    = CE(own, y)    + [KL(shared || own) + MSE(H_own, W H_shared)] / s
    L_shared = CE(shared, y) + [KL(own || shared) + MSE(H_own, W H_shared)] / s,    s = CE(own, y) + CE(shared, y)

FLHA-distillation trains a shared teacher, and then the client's own network (the student) with the loss (1 - alpha) CE
+ alpha 2 T^2 KL(teacher || student) on its own examples (appendix E of the FLHA-GHN paper; the usual factor is T^2).
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet import models
from fedhet.client import Client, ClientSide
from fedhet.client.client import P
from fedhet.errors import ModelError
from fedhet.messages import Payload, spec_of, to_arrays, to_tensor
from fedhet.messages.payload import from_factors, to_factors
from fedhet.methods.included.distillation import AuxiliaryOptions, FLHADistillationOptions, FMLOptions, energy
from fedhet.methods.keys import kebab
from fedhet.models.copies import kinds_of
from fedhet.models.representation import Capturing, Output, Representation, head_name, in_precision, precision
from fedhet.training import Loss, Optimisation, Phase, Step, Term, reestimate
from fedhet.utils.randomness import seeded

B = TypeVar("B", bound=AuxiliaryOptions)

SMALL = "small"
"""Name of the auxiliary network's outputs in `Step.captured`."""


class AuxiliaryModel(ClientSide[P]):
    """Base class of client sides that send only an auxiliary network, which has the same architecture on all clients.

    The option named `key` sets this architecture. `reason` says, in error messages, why the method needs class scores.
    """

    key: ClassVar[str]
    reason: ClassVar[str]

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        client.check_scores(self.reason)
        self.auxiliary = _build(client, getattr(self.options, self.key), self.key)

    @property
    def network(self) -> nn.Module:
        return self.auxiliary

    def shared(self) -> dict[str, Tensor]:
        aggregated, kinds = self.client.config.batch_norm == "aggregate", kinds_of(self.auxiliary)
        tensors = self.auxiliary.state_dict().items()
        return {name: tensor for name, tensor in tensors if aggregated or kinds[name] != "statistic"}

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        if "model" in payload.arrays and self.client.config.batch_norm != "aggregate":
            reestimate(self.auxiliary, self.client.data.train.inputs, self.client.transform)


def _build(client: Client, name: str, key: str) -> nn.Module:
    config = client.config
    client.model.eval()
    purpose = key.replace("_", " "), "all" if config.shared_init else client.name
    with seeded(config.seed, *purpose), torch.no_grad():
        batch = client.transform(client.data.train.inputs[:2])
        outputs = client.read(client.data.train.inputs[:2]).shape[-1]
        try:
            network = models.build_auxiliary(name, config.architectures, batch, outputs).to(client.device)
        except ModelError as error:
            why = re.sub("^model '[^']*': ", "", str(error))  # the user may not know the name, if a preset chose it
            raise ModelError(f"key {config.family}.{kebab(key)}: {why}; set a model for the client's inputs") from error
    if (dtype := precision(network)) and client.representation.precision not in (None, dtype):
        network.register_forward_pre_hook(lambda _module, inputs: tuple(in_precision(each, dtype) for each in inputs))
    return network


class Pair(nn.Module):
    """The client's network `own` and the shared network `small`; runs both and returns the outputs of `own`.

    `projector` is a linear layer between the two networks' representations, if the method has one.
    """

    def __init__(self, network: nn.Module, small: nn.Module, projector: nn.Linear | None = None) -> None:
        super().__init__()
        self.own, self.small, self.projector = network, small, projector or nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        self.small(inputs)
        return self.own(inputs)


class Mutual(AuxiliaryModel[B]):
    """Base class of client sides that train the client's and a shared network together, and evaluate the client's."""

    key, reason = "shared_model", "which the two networks exchange"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.pair = Pair(client.model, self.auxiliary)

    @property
    def captures(self) -> dict[str, Capturing]:
        return {SMALL: Output(self.pair, SMALL)}

    def phases(self, payload: Payload) -> Sequence[Phase]:
        return [replace(phase, module=self.pair) for phase in super().phases(payload)]


class Projected(Mutual[B]):
    """Base class of client sides that train the client's network, a shared one, and a projector of representations.

    The projector is a linear layer that reads the shared network's representation or, in FedMRL, both representations.
    """

    remembers = True

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        config, self.small_head = client.config, head_name(self.auxiliary)
        client.model.eval()
        self.auxiliary.eval()
        with seeded(config.seed, "projector", "all" if config.shared_init else client.name), torch.no_grad():
            phi = client.read(client.data.train.inputs[:2], until=client.representation)
            shared = Representation(self.auxiliary, self.small_head)(client.transform(client.data.train.inputs[:2]))
            self.pair = self.join(phi.shape[1], shared.shape[1], phi.dtype).to(client.device)

    @abstractmethod
    def join(self, width: int, small_width: int, dtype: torch.dtype) -> Pair:
        """Return the client's and the shared network as a `Pair`, with a new projector of type `dtype`.

        `width` and `small_width` are the lengths of the client's and the shared network's representations.
        """

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        if memory := self.client.memory:
            self.pair.projector.load_state_dict({name: memory[name] for name in self.pair.projector.state_dict()})

    def end(self, payload: Payload) -> Payload:
        self.client.memory |= self.pair.projector.state_dict()
        return super().end(payload)


class FML(Mutual[FMLOptions]):
    """Client side of FML: trains the client's network and the shared network by mutual distillation."""

    def phases(self, payload: Payload) -> Sequence[Phase]:
        return [replace(phase, task_weight=self.options.alpha) for phase in super().phases(payload)]

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        return (Term(mutual, captures=self.captures, alpha=self.options.alpha, beta=self.options.beta),)


def mutual(step: Step, alpha: float, beta: float) -> Tensor:
    """Return (1 - alpha) KL(shared || own) + (1 - beta) KL(own || shared) + beta L(shared), for task loss L.

    `own` and `shared` are outputs of the client's and the shared network. FML's loss also has the term alpha L(own).
    """
    shared = step.captured[SMALL].to(step.outputs.dtype)
    learnt = (1 - alpha) * step.divergence(step.outputs, shared)
    taught = (1 - beta) * step.divergence(shared, step.outputs)
    return learnt + taught + beta * step.loss(shared)


LEAST = 1e-3  # smallest value by which FedKD divides distillation losses, if the sum of the two task losses is less
RECEIVED = "received/"  # prefix of the received shared network's tensors in the client's memory


class FedKD(Projected[AuxiliaryOptions]):
    """Client side of FedKD: mutual distillation of two networks; sends low-rank factors of the shared one's change."""

    lost = False

    def join(self, width: int, small_width: int, dtype: torch.dtype) -> Pair:
        return Pair(self.client.model, self.auxiliary, nn.Linear(small_width, width, bias=False, dtype=dtype))

    def begin(self, payload: Payload) -> None:
        self.received = payload.arrays.get("model", {})
        if payload.values.get("change"):
            self.lost = not self.client.memory
            memory = self.client.memory.items()
            kept = {key.removeprefix(RECEIVED): each for key, each in memory if key.startswith(RECEIVED)}
            change, spec, before = self.received, spec_of(self.shared()), to_arrays(kept)
            self.received = {} if self.lost else from_factors(change, before, spec, "the shared network's change")
        super().begin(Payload({"model": self.received}))

    def phases(self, payload: Payload) -> Sequence[Phase]:
        return [] if self.lost else super().phases(payload)

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        small = Representation(self.pair, f"small.{self.small_head}".rstrip("."))
        captures = self.captures | {"own": self.client.representation, "shared": small}
        return (Term(mutual_with_hidden, captures=captures),)

    def end(self, payload: Payload) -> Payload:
        reply, client = super().end(payload), self.client
        if self.lost:
            return Payload()
        client.memory |= {f"{RECEIVED}{name}": to_tensor(array) for name, array in self.received.items()}
        part = energy(client.request.round, client.config.rounds)
        update = to_factors(to_arrays(self.shared()), self.received, part)
        return Payload({"update": update}, reply.values)


def mutual_with_hidden(step: Step) -> Tensor:
    """Return FedKD's loss of both networks, except for the task loss of the client's own network."""
    shared, hidden = step.captured[SMALL].to(step.outputs.dtype), step.captured["own"]
    shared_loss = step.loss(shared)
    both = (step.loss(step.outputs) + shared_loss).detach().clamp(min=LEAST)
    learnt, taught = step.divergence(step.outputs, shared), step.divergence(shared, step.outputs)
    projected = F.linear(step.captured["shared"].to(hidden.dtype), step.parameters["projector.weight"])
    return shared_loss + (learnt + taught + F.mse_loss(projected, hidden)) / both


ALPHA, TEMPERATURE = 0.7, 20.0  # FLHA-distillation's weight of the distillation loss, and divisor T of logits


class FLHADistillation(AuxiliaryModel[FLHADistillationOptions]):
    """Client side of FLHA-distillation: trains and sends a teacher; later trains its own network, and sends nothing."""

    remembers = True
    key, reason = "teacher", "which students learn from a teacher"

    @property
    def teaching(self) -> bool:
        return self.client.request.round <= self.options.teaching(self.client.config.rounds)

    def begin(self, payload: Payload) -> None:
        super().begin(payload)
        if not self.teaching:
            if "model" in payload.arrays:
                self.client.memory |= self.auxiliary.state_dict()
            elif self.client.memory:
                self.auxiliary.load_state_dict(self.client.memory)

    def phases(self, payload: Payload) -> Sequence[Phase]:
        module = self.auxiliary if self.teaching else None
        phase = Phase(self.client.request.epochs, self._optimisation(), module=module)
        if self.teaching or not self.client.memory:
            return [phase]
        return [replace(phase, terms=(Term(distance, teacher=self.auxiliary.eval()),), task_weight=1 - ALPHA)]

    def end(self, payload: Payload) -> Payload:
        return super().end(payload) if self.teaching else Payload()

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        return self.auxiliary.eval() if self.teaching else self.client.model

    def _optimisation(self) -> Optimisation:
        client, config = self.client, self.client.config
        teaching = self.options.teaching(config.rounds)
        first, rounds = (0, teaching) if self.teaching else (teaching, config.rounds - teaching)
        request = replace(client.request, round=client.request.round - first)
        rate = config.learning_rate
        if not self.teaching:
            rate = self.options.student_learning_rate or 0.1 * rate
        return replace(client, config=config.replace(rounds=rounds, learning_rate=rate), request=request).optimisation()


def distance(step: Step, teacher: nn.Module) -> Tensor:
    """Return alpha 2 T^2 KL(teacher || network) at temperature T = 20, for a step's inputs, where alpha is `ALPHA`."""
    with torch.no_grad():
        wanted = teacher(step.inputs)
    return ALPHA * 2 * TEMPERATURE**2 * step.divergence(step.outputs, wanted, TEMPERATURE)
