"""The one training loop, and what it is told: phases and loss terms.

Every method's local training is a list of `Phase`s: FedAvg is one, FedRep trains the head, then the body. A method's
regulariser is a loss term: a function of the current `Step` that returns a scalar to add to the task's loss.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.representations import Representation
from fedhet.task import Task


@dataclass(slots=True)
class Step:
    """What a loss term sees of one mini-batch.

    Attributes:
        model: the model in training mode, with the gradients of this step still to come.
        inputs: (n, ...) the transformed batch on the device.
        labels: (n, ...) its labels.
        outputs: what the model returned.
        features: (n, d) Phi of the batch, if the phase asks for it.
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    outputs: Tensor
    features: Tensor | None = None


LossTerm = Callable[[Step], Tensor | None]
"""A scalar to add to the task's loss, or None for nothing in this step."""


@dataclass(frozen=True)
class Optimisation:
    """How parameters are stepped: optimiser (sgd, adam, adamw), learning rate, momentum, weight decay, batch size."""

    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 32

    def build(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser; weight decay acts on matrices and filters, not on biases and normalisation."""
        groups: list[dict[str, object]] = [{"params": parameters}]
        if self.weight_decay:
            groups = [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
                {"params": [p for p in parameters if p.ndim <= 1]},
            ]
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[self.optimizer]
        return kind(groups, lr=self.learning_rate, weight_decay=0.0)


@dataclass(frozen=True)
class Phase:
    """One stretch of local training.

    Attributes:
        epochs: passes over the examples.
        optimisation: how parameters are stepped.
        trains: which parameters are trained, by their names; the others, and the statistics of modules that have
            only frozen parameters, do not change. A parameter that does not require gradients is never trained.
        terms: added to the task's loss.
        features_of: hands Phi of every batch to the terms.
        examples: what is trained on, if not the client's training part.
    """

    epochs: int
    optimisation: Optimisation
    trains: Callable[[str], bool] | None = None
    terms: tuple[LossTerm, ...] = ()
    features_of: Representation | None = None
    examples: Examples | None = None


def scheduled(schedule: str, learning_rate: float, round: int, rounds: int) -> float:
    """The learning rate of a round (from 1): constant, or falling to zero after `rounds` by a line or a cosine."""
    done = min(max(round - 1, 0) / max(rounds, 1), 1.0)
    return (
        learning_rate
        * {
            "constant": 1.0,
            "linear": 1.0 - done,
            "cosine": (1.0 + math.cos(math.pi * done)) / 2,
        }[schedule]
    )


def train(
    model: nn.Module,
    phase: Phase,
    examples: Examples,
    task: Task,
    prepare: Callable[[Tensor, torch.Generator], Tensor],
    *,
    generator: torch.Generator,
    device: torch.device,
) -> float:
    """Train a model in place.

    Args:
        model: on `device`.
        phase: what to do.
        examples: the client's training part, on `device`; `phase.examples` goes before it.
        task: gives the loss.
        prepare: makes a float batch of raw inputs (normalisation, augmentation); draws from the generator given.
        generator: draws the order of examples and the augmentation. Dropout draws from torch's global generator.
        device: where the model and the examples are.

    Returns:
        The mean of the whole loss over all steps, weighted by batch size; NaN without a step.

    Raises:
        ModelError: the phase trains none of the model's parameters.
    """
    examples = phase.examples or examples
    with _frozen(model, phase.trains) as parameters:
        optimizer = phase.optimisation.build(parameters)
        losses: list[Tensor] = []
        sizes: list[int] = []
        whole, terms, features_of = _normalises(model), phase.terms, phase.features_of
        for _ in range(phase.epochs):
            for index in batches(len(examples), phase.optimisation.batch_size, generator, whole=whole):
                if device.type != "cpu":
                    index = index.to(device)
                inputs, labels = prepare(examples.inputs[index], generator), examples.labels[index]
                _forget_gradients(parameters)
                with features_of.capture() if features_of else nullcontext() as captured:
                    outputs = model(inputs)
                loss = task.loss(outputs, labels)
                if terms:
                    step = Step(model, inputs, labels, outputs, captured.features if captured else None)
                    for term in terms:
                        if (value := term(step)) is not None:
                            loss = loss + value
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())  # read at the end: reading makes a GPU wait
                sizes.append(len(index))
        _forget_gradients(parameters)
    if not losses:
        return math.nan
    return math.fsum(map(operator.mul, torch.stack(losses).tolist(), sizes)) / sum(sizes)


def _forget_gradients(parameters: Sequence[nn.Parameter]) -> None:
    # What Optimizer.zero_grad does, without its profiling, which is a tenth of a small network's step.
    for parameter in parameters:
        parameter.grad = None


def batches(count: int, size: int, generator: torch.Generator, *, whole: bool = False) -> Iterator[Tensor]:
    """Mini-batches of one shuffled epoch, as index tensors.

    Args:
        count: number of examples.
        size: examples in a batch; the last one may be smaller.
        generator: draws the order.
        whole: a last batch of one example joins the one before it, since BatchNorm cannot train on one.
    """
    order = torch.randperm(count, generator=generator)
    ends = list(range(size, count, size))
    if whole and ends and count - ends[-1] == 1:
        ends.pop()
    for start, end in zip([0, *ends], [*ends, count], strict=True):
        if end > start:
            yield order[start:end]


def _normalises(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


@contextmanager
def _frozen(model: nn.Module, trains: Callable[[str], bool] | None) -> Iterator[list[nn.Parameter]]:
    """Training mode with only the chosen parameters live; yields them."""
    model.train()
    if trains is None:
        yield [parameter for parameter in model.parameters() if parameter.requires_grad]
        return
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    live = [parameter for name, parameter in trainable if trains(name)]
    if not live:
        raise ModelError(
            f"a phase of training has no parameters to train: of {len(trainable)} trainable ones of "
            f"{type(model).__name__}, none is in the part that it trains"
        )
    model.requires_grad_(False)
    for parameter in live:
        parameter.requires_grad_(True)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()
    try:
        yield live
    finally:
        for _, parameter in trainable:
            parameter.requires_grad_(True)
        model.train()
