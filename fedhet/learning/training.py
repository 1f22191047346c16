"""The one training loop, and its arguments: phases of training, and loss terms.

Every method's local training is a list of `Phase`s: FedAvg is one, FedRep trains the head, then the body. A method's
regulariser is a loss term: a function of the current `Step` that returns a scalar to add to the task's loss.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice

import torch
from torch import Tensor, nn

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.learning.frozen import forget_gradients, normalises, only_trained
from fedhet.learning.optimizers import Optimisation
from fedhet.learning.passes import forward
from fedhet.machine import brought
from fedhet.representations import Capturing, RandomStream, Representation
from fedhet.rows import Work
from fedhet.task import LARGEST, Task


@dataclass(slots=True)
class Step:
    """One mini-batch, as a loss term sees it.

    Attributes:
        number: of the step in its phase, from 0.
        model: what is trained, in training mode, with the gradients of this step still to come.
        parameters: its parameters by name, frozen ones included.
        inputs: (n, ...) the transformed batch on the device.
        labels: (n, ...) its labels.
        rows: (n,) int64, where these examples stand among the phase's.
        outputs: what the model returned.
        captured: what the phase captures, by its names; each (n, ...), part of the graph.
        further: examples that terms have passed beside the batch.
    """

    number: int
    model: nn.Module
    parameters: Mapping[str, Tensor]
    inputs: Tensor
    labels: Tensor
    rows: Tensor
    outputs: Tensor
    captured: Mapping[str, Tensor] = field(default_factory=dict)
    further: int = 0

    def represent(self, inputs: Tensor, representation: Representation, stream: RandomStream) -> Tensor:
        """Return Phi (m, d) of a further prepared batch (m, ...), part of the graph; dropout draws from `stream`.

        It leaves no trace in buffers or the task's randomness.
        """
        self.further += len(inputs)
        return forward(self.model, inputs, until=representation, stream=stream)[0]


Loss = Callable[[Step], Tensor | tuple[Tensor, Mapping[str, Tensor]] | None]
"""A scalar to add to the task's loss, and scalars to record if there are any; None in a step that it leaves out. An
example that does not count has weight 0."""


@dataclass(frozen=True)
class Phase:
    """One stretch of local training.

    Attributes:
        epochs: passes over the examples.
        optimisation: how parameters are stepped.
        steps: mini-batches, instead of whole epochs.
        module: what is trained, if not the client's network: one that writes it, or that stands beside it.
        trains: which arrays are trained, by their names; other parameters, and the buffers of modules none of whose
            parameters (or buffers, without parameters) is in this part, do not change. A parameter that does not
            require gradients is never trained.
        terms: added to the task's loss.
        task_weight: weight of the task's own loss; with 0 it is not taken, and labels may be whatever the terms need.
        captures: inner values of every batch that the terms see, by name.
        examples: what is trained on, if not the client's training part.
        augmented: whether batches of these `examples` are augmented as the training part's are. By default they are
            not: a target that was computed for an example is for the example as it is.
        continues: go on with the optimiser of the phase before, state and all; both train the same parameters.
        measured: by what name the network is evaluated after it, in rounds that are evaluated; empty: it is not.
    """

    epochs: int
    optimisation: Optimisation
    steps: int = 0
    module: nn.Module | None = None
    trains: Callable[[str], bool] | None = None
    terms: tuple[Loss, ...] = ()
    task_weight: float = 1.0
    captures: Mapping[str, Capturing] = field(default_factory=dict)
    examples: Examples | None = None
    augmented: bool = False
    continues: bool = False
    measured: str = ""


@dataclass
class Trained:
    """The result of a phase, or of several.

    Attributes:
        loss: sum over epochs of the mean of the whole loss over an epoch's steps, weighted by batch size.
        epochs: passes over the examples, in part where a phase counts steps.
        recorded: for each value that a term records its sum, a scalar tensor, and in how many steps.
        optimizer: the optimiser with its state, for a phase that continues this one.
        work: gradient steps and forward passes.
    """

    loss: float = 0.0
    epochs: float = 0
    recorded: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    work: Work = field(default_factory=Work)

    @property
    def mean_loss(self) -> float | None:
        """The mean loss over all epochs; None without one."""
        return self.loss / self.epochs if self.epochs else None

    @property
    def means(self) -> dict[str, float]:
        """The mean of each recorded value over the steps that recorded it."""
        return {name: float(total) / count for name, (total, count) in self.recorded.items()}


def train(
    model: nn.Module,
    phase: Phase,
    examples: Examples,
    task: Task,
    prepare: Callable[[Tensor, torch.Generator | None], Tensor],
    *,
    generator: torch.Generator,
    before: Trained | None = None,
) -> Trained:
    """Train a model in place.

    Args:
        model: the model, unless the phase has a module.
        phase: the phase of training.
        examples: the client's training part, on the model's device, unless the phase has its own.
        task: gives the loss.
        prepare: turns raw inputs into a float batch, augmented with the given generator, or not if it is None.
        generator: draws the order of examples and the augmentation. Dropout draws from torch's global generator.
        before: the result of earlier phases.

    Returns:
        The result of this phase and the earlier ones.

    Raises:
        ModelError: the phase trains none of the model's parameters, or continues one that trained others; training
            diverged, or its first loss is not finite.
    """
    private, before = phase.examples is None, before or Trained()
    model, examples = phase.module or model, phase.examples or examples
    size, device = phase.optimisation.batch_size, examples.labels.device
    least = max(phase.optimisation.least, 1 + normalises(model.train()))  # BatchNorm cannot train on one example
    total = phase.steps or phase.epochs * len(_ends(len(examples), size, least))
    if examples.groups is None:
        orders = (batches(len(examples), size, generator, device, least=least) for _ in count())
    else:
        orders = (grouped_batches(examples.groups, size, generator, least=least) for _ in count())
    rows = islice(chain.from_iterable(orders), total if examples.groups != () else 0)
    named, schedule = dict(model.named_parameters()), phase.optimisation.schedule
    augmenting = generator if private or phase.augmented else None
    losses: list[Tensor] = []
    sizes: list[int] = []
    recorded, further = dict(before.recorded), 0
    with only_trained(model, named, phase.trains) as parameters:
        optimizer = _optimizer(phase, parameters, before)
        for step in _passes(model, named, phase, examples, lambda inputs: prepare(inputs, augmenting), rows):
            loss = _loss(step, phase, task, recorded)
            loss.backward()
            if phase.optimisation.clip_gradients:
                nn.utils.clip_grad_norm_(parameters, phase.optimisation.clip_gradients)
            if schedule is not None:
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step.number / total)
            optimizer.step()
            forget_gradients(parameters)
            losses.append(loss.detach())  # read at the end: reading makes a GPU wait
            sizes.append(step.rows.numel())
            further += step.further
    if not losses:
        return before
    values = torch.stack(losses).tolist()
    _check_losses(values, sizes, len(examples), parameters, phase, first=not before.work.steps)
    mean = math.fsum(map(operator.mul, values, sizes)) / sum(sizes)
    epochs = phase.epochs if not phase.steps else sum(sizes) / len(examples)
    work = before.work + Work(len(losses) if private else 0, len(losses), sum(sizes) + further)
    return Trained(before.loss + mean * epochs, before.epochs + epochs, recorded, optimizer, work)


def _passes(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    phase: Phase,
    examples: Examples,
    prepare: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
) -> Iterator[Step]:
    """Yield mini-batches, given by their rows, each after its forward pass."""
    for number, index in enumerate(batches):
        inputs, labels = examples.at(index)
        inputs = prepare(inputs)
        try:
            outputs, captured = forward(model, inputs, phase.captures)
        except ValueError as error:
            if len(index) > 1 or not normalises(model):
                raise
            few = "there is one training example" if len(examples) == 1 else "batch-size is 1"
            raise ModelError(
                f"BatchNorm cannot train on a batch of one example, and {few}: set batch-size to at least 2 and give "
                "every client at least 2 training examples, or use GroupNorm in its place"
            ) from error
        yield Step(number, model, parameters, inputs, labels, index, outputs, captured)


def _loss(step: Step, phase: Phase, task: Task, recorded: dict[str, tuple[Tensor, int]]) -> Tensor:
    """Return the sum of the task's loss and the terms; values that terms record are added to `recorded`."""
    loss = task.loss(step.outputs, step.labels) if phase.task_weight else 0 * step.outputs.sum()
    if phase.task_weight != 1:
        loss = phase.task_weight * loss
    for term in phase.terms:
        value = term(step)
        if isinstance(value, tuple):
            value, values = value
            for name, each in values.items():
                total, steps = recorded.get(name) or (torch.zeros((), device=each.device), 0)
                recorded[name] = (total + each.detach(), steps + 1)
        if value is not None:
            loss = loss + value
    return loss


def _check_losses(
    losses: Sequence[float],
    sizes: Sequence[int],
    examples: int,
    parameters: Sequence[nn.Parameter],
    phase: Phase,
    *,
    first: bool,
) -> None:
    """Losses, and weights after the last step, must be of a size from which training comes back; else `ModelError`."""
    if first and not math.isfinite(losses[0]):
        raise ModelError(
            f"the loss of the first step is {losses[0]:.3g}, before training has changed a weight: for some example of "
            "the batch the network returns no finite numbers, or the augmentation does"
        )
    step = next((number for number, loss in enumerate(losses, 1) if not abs(loss) <= LARGEST), None)
    with torch.inference_mode():
        norms = torch._foreach_norm(tuple(parameters))  # a quarter of the time that the largest value takes
        if step is None and torch.stack(norms).max().item() <= LARGEST:
            return
        largest = torch.stack(torch._foreach_norm(tuple(parameters), math.inf)).max().item()
    if step is None and largest <= LARGEST:
        return
    epoch = math.ceil(sum(sizes[: step or len(sizes)]) / examples)
    sign = f"the loss is {losses[step - 1]:.3g}" if step else f"weights are up to {largest:.3g}"
    raise ModelError(
        f"training diverged in epoch {epoch}, {sign}: a lower learning-rate than {phase.optimisation.learning_rate:g} "
        "may help"
    )


def _optimizer(phase: Phase, parameters: Sequence[nn.Parameter], before: Trained) -> torch.optim.Optimizer:
    if not phase.continues or before.optimizer is None:
        return phase.optimisation.build(parameters)
    stepped = {id(parameter) for group in before.optimizer.param_groups for parameter in group["params"]}
    if stepped != {id(parameter) for parameter in parameters}:
        raise ModelError("a phase of training continues one that trains other parameters: they must be the same")
    return before.optimizer


def batches(
    count: int, size: int, generator: torch.Generator, device: torch.device | None = None, *, least: int = 1
) -> Iterator[Tensor]:
    """Mini-batches of one shuffled epoch of `count` examples, as index tensors on a device; the last may be smaller.

    A last batch of fewer than `least` examples joins the one before it.
    """
    order = torch.randperm(count, generator=generator)
    order = order if device is None else brought(order, device)
    start = 0
    for end in _ends(count, size, least):
        yield order[start:end]
        start = end


def grouped_batches(
    groups: Sequence[Tensor], size: int, generator: torch.Generator, *, least: int = 1
) -> Iterator[Tensor]:
    """Mini-batches of one shuffled epoch, each of whole groups of rows (k,) int64, of about `size` examples.

    The last may be smaller, but not than `least` examples.
    """
    order = torch.randperm(len(groups), generator=generator).tolist()
    together = max(1, round(size * len(groups) / sum(map(len, groups))))
    start = 0
    for end in _ends(len(groups), together, math.ceil(least / min(map(len, groups)))):
        yield torch.cat([groups[place] for place in order[start:end]])
        start = end


def _ends(count: int, size: int, least: int) -> list[int]:
    ends = list(range(size, count, size))
    if ends and count - ends[-1] < least:
        ends.pop()
    return [*ends, count] if count else []
