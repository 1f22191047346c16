"""The one training loop."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.learning.batching import Backward, Forward
from fedhet.learning.phases import Phase, Step
from fedhet.machine import brought
from fedhet.rows import Work
from fedhet.task import LARGEST, Task


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
    prepare: Callable[[Tensor, torch.Generator], Tensor],
    *,
    generator: torch.Generator,
    device: torch.device,
    before: Trained | None = None,
) -> Trained:
    """Train a model in place.

    Args:
        model: on `device`; `phase.module` goes before it.
        phase: what to do.
        examples: the client's training part, on `device`; `phase.examples` goes before it.
        task: gives the loss.
        prepare: makes a float batch of raw inputs (normalisation, augmentation); draws from the generator given.
        generator: draws the order of examples and the augmentation. Dropout draws from torch's global generator.
        device: where the model and the examples are.
        before: what came of the phases before this one, which is added to.

    Returns:
        What came of this phase and those before.

    Raises:
        ModelError: the phase trains none of the model's parameters, or continues one that trained others; training
            diverged, or its first loss is not finite.
    """
    private = phase.examples is None
    model, examples = phase.module or model, phase.examples or examples
    before = before or Trained()
    with _frozen(model, phase.trains) as parameters:
        optimizer = _optimizer(phase, parameters, before)
        by_name, bf16 = dict(model.named_parameters()) if phase.terms else {}, phase.optimisation.bf16
        recorded = dict(before.recorded)
        count, whole = len(examples), _normalises(model)
        schedule, total = phase.optimisation.schedule, _steps(phase, count, whole=whole)
        losses: list[Tensor] = []
        sizes: list[int] = []
        further = 0
        for number, index in enumerate(_rows(phase, count, generator, device, whole=whole)):
            inputs, labels = prepare(examples.inputs[index], generator), examples.labels[index]
            if schedule is not None:
                for group in optimizer.param_groups:
                    group["lr"] = schedule(number / total)
            _forget_gradients(parameters)
            outputs, captured = Forward(model, inputs, phase.captures, bf16=bf16).run()
            loss = task.loss(outputs, labels) if phase.task_weight else 0 * outputs.sum()
            if phase.task_weight not in (0, 1):
                loss = phase.task_weight * loss
            if phase.terms:
                step = Step(number, model, by_name, inputs, labels, index, outputs, captured, bf16)
                for term in phase.terms:
                    if (value := term(step)) is not None:
                        loss = loss + _noted(value, recorded)
                further += step.further
            Backward(loss).run()
            optimizer.step()
            losses.append(loss.detach())  # read at the end: reading makes a GPU wait
            sizes.append(index.numel())
        _forget_gradients(parameters)
    if not losses:
        return before
    told = torch.stack(losses).tolist()
    if not before.work.steps and not math.isfinite(told[0]):
        raise ModelError(
            f"the loss of the first step is {told[0]:.3g}, before training has changed a weight: for some example of "
            "the batch the network returns no finite numbers, or the augmentation does"
        )
    _check_not_diverged(told, sizes, count, parameters, phase)
    mean = math.fsum(map(operator.mul, told, sizes)) / sum(sizes)
    epochs = phase.epochs if not phase.steps else sum(sizes) / count
    work = before.work + Work(len(losses) if private else 0, len(losses), sum(sizes) + further)
    return Trained(before.loss + mean * epochs, before.epochs + epochs, recorded, optimizer, work)


def _check_not_diverged(
    losses: Sequence[float], sizes: Sequence[int], examples: int, parameters: Sequence[nn.Parameter], phase: Phase
) -> None:
    """Losses, and weights after the last step, must be of a size from which training comes back.

    Raises:
        ModelError: they are not; with the epoch.
    """
    step = next((number for number, loss in enumerate(losses, 1) if not abs(loss) <= LARGEST), None)
    with torch.inference_mode():
        norm = torch.stack(torch._foreach_norm(tuple(parameters))).max().item()
    if step is None and norm <= LARGEST:
        return
    largest = torch.stack([parameter.detach().abs().max() for parameter in parameters]).max().item()
    if step is None and largest <= LARGEST:
        return
    epoch = math.ceil(sum(sizes[: step or len(sizes)]) / examples)
    what = f"the loss is {losses[step - 1]:.3g}" if step else f"weights are up to {largest:.3g}"
    raise ModelError(
        f"training diverged in epoch {epoch}, {what}: a lower learning-rate than {phase.optimisation.learning_rate:g} "
        "may help"
    )


def _optimizer(phase: Phase, parameters: Sequence[nn.Parameter], before: Trained) -> torch.optim.Optimizer:
    if not phase.continues or before.optimizer is None:
        return phase.optimisation.build(parameters)
    own = {id(parameter) for group in before.optimizer.param_groups for parameter in group["params"]}
    if own != {id(parameter) for parameter in parameters}:
        raise ModelError("a phase of training continues one that trains other parameters: they must be the same")
    return before.optimizer


def _noted(value: Tensor | tuple[Tensor, Mapping[str, Tensor]], recorded: dict[str, tuple[Tensor, int]]) -> Tensor:
    """A term's scalar; what it records is added to what is recorded already."""
    if isinstance(value, Tensor):
        return value
    scalar, values = value
    for name, each in values.items():
        total, count = recorded.get(name) or (torch.zeros((), device=each.device), 0)
        recorded[name] = (total + each.detach(), count + 1)
    return scalar


def _forget_gradients(parameters: Sequence[nn.Parameter]) -> None:
    # What Optimizer.zero_grad does, without its profiling, which is a tenth of a small network's step.
    for parameter in parameters:
        parameter.grad = None


def _rows(
    phase: Phase, count: int, generator: torch.Generator, device: torch.device, *, whole: bool
) -> Iterator[Tensor]:
    """The rows of each mini-batch of a phase."""
    size = phase.optimisation.batch_size
    if not phase.steps:
        for _ in range(phase.epochs):
            yield from batches(count, size, generator, device, whole=whole)
        return

    def endless() -> Iterator[Tensor]:
        while True:
            yield from batches(count, size, generator, device, whole=whole)

    yield from islice(endless(), phase.steps)


def _steps(phase: Phase, count: int, *, whole: bool) -> int:
    return phase.steps or phase.epochs * len(_ends(count, phase.optimisation.batch_size, whole=whole))


def batches(
    count: int, size: int, generator: torch.Generator, device: torch.device | None = None, *, whole: bool = False
) -> Iterator[Tensor]:
    """Mini-batches of one shuffled epoch, as index tensors.

    Args:
        count: number of examples.
        size: examples in a batch; the last one may be smaller.
        generator: draws the order, on the CPU.
        device: where it is wanted, to which it goes at once; None: on the CPU.
        whole: a last batch of one example joins the one before it, since BatchNorm cannot train on one.
    """
    order = torch.randperm(count, generator=generator)
    order = order if device is None else brought(order, device)
    start = 0
    for end in _ends(count, size, whole=whole):
        yield order[start:end]
        start = end


def _ends(count: int, size: int, *, whole: bool) -> list[int]:
    ends = list(range(size, count, size))
    if whole and ends and count - ends[-1] == 1:
        ends.pop()
    return [*ends, count] if count else []


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
