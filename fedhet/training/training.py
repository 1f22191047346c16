"""The training loop of all methods."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.tasks import LARGEST, Task
from fedhet.training.evaluation import forward, uses_batch_statistics
from fedhet.training.phases import Phase, Step, Trained
from fedhet.training.privacy import Hidden, Privacy
from fedhet.utils.machine import brought
from fedhet.utils.statistics import Work


def train(
    model: nn.Module,
    phase: Phase,
    examples: Examples,
    task: Task,
    prepare: Callable[[Tensor, torch.Generator | None], Tensor],
    *,
    generator: torch.Generator,
    before: Trained | None = None,
    privacy: Privacy | None = None,
) -> Trained:
    """Train a model in place for one phase; return the combined result of this phase and the phases before it.

    Args:
        model: the model to train, unless the phase has a `module`.
        phase: the phase of training.
        examples: the client's training examples, on the model's device; not used if the phase has its own.
        task: the task, which defines the loss.
        prepare: function that transforms raw inputs, and augments them if it is given a generator.
        generator: draws the order of examples and the augmentation. Dropout draws from torch's global generator.
        before: the combined result of the phases before this one.
        privacy: settings of example-level differential privacy, under which loss terms may not read the batch.

    Raises:
        ModelError: the phase trains none of the model's parameters, or continues a phase that trained other parameters;
            training diverged, or the first loss is not finite.
    """
    private, before = phase.examples is None, before or Trained()
    model, examples = phase.module or model, phase.examples or examples
    rows, total = mini_batches(model.train(), phase, examples, generator, privacy)
    named, schedule = dict(model.named_parameters()), phase.optimisation.schedule
    augmenting = generator if private or phase.augmented else None
    losses: list[Tensor] = []
    sizes: list[int] = []
    recorded, further = dict(before.recorded), 0
    with only_trained(model, named, phase.trains) as parameters:
        optimizer = _optimizer(phase, parameters, before)
        steps = _passes(model, named, phase, examples, task, lambda inputs: prepare(inputs, augmenting), rows, privacy)
        for step in steps:
            loss = loss_of(step, phase, recorded)
            if privacy is None or loss.requires_grad:  # or its gradients are set already
                _backward(loss)
            if phase.optimisation.clip_gradients:
                nn.utils.clip_grad_norm_(parameters, phase.optimisation.clip_gradients)
            if schedule is not None:
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step.number / total)
            optimizer.step()
            _forget_gradients(parameters)
            losses.append(loss.detach())  # read at the end: reading makes a GPU wait
            sizes.append(phase.optimisation.batch_size if privacy else step.rows.numel())
            further += step.further
    if not losses:
        return before
    values = torch.stack(losses).tolist()
    with torch.inference_mode():
        norm = torch.stack(torch._foreach_norm(tuple(parameters))).max().item()
    return outcome(phase, before, len(examples), values, sizes, norm, further, recorded, optimizer)


def outcome(
    phase: Phase,
    before: Trained,
    examples: int,
    losses: list[float],
    sizes: list[int],
    norm: float,
    further: int,
    recorded: dict[str, tuple[Tensor, int]],
    optimizer: torch.optim.Optimizer | None = None,
) -> Trained:
    """Return the combined result of a phase and the phases before it; raise a ModelError if training diverged.

    `examples` is the number of examples, `losses` and `sizes` have the loss and batch size of each step, `norm` is the
    largest norm of a parameter at the end; see `Step.further` and `Trained.recorded`.
    """
    _check_losses(losses, sizes, examples, norm, phase, first=not before.work.steps)
    mean = math.fsum(map(operator.mul, losses, sizes)) / sum(sizes)
    epochs = phase.epochs if not phase.steps else sum(sizes) / examples
    steps = len(losses)
    work = before.work + Work(steps if phase.examples is None else 0, steps, sum(sizes) + further)
    return Trained(before.loss + mean * epochs, before.epochs + epochs, recorded, optimizer, work)


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ModelError("the network's outputs have no gradients: leave torch.no_grad and detach out of its forward")
    try:
        loss.backward()
    except CheckpointError as error:
        raise ModelError(
            "the method reads values inside the network, which torch.utils.checkpoint computes again with other "
            "tensors: leave the checkpoint out of forward, or choose another method"
        ) from error


def _passes(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    phase: Phase,
    examples: Examples,
    task: Task,
    prepare: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    privacy: Privacy | None,
) -> Iterator[Step]:
    """Yield a `Step` after the forward pass of each mini-batch; `batches` are index tensors.

    With `privacy`, private gradients of the task's loss are also set, and loss terms cannot read the mini-batch.
    """

    def of_task(outputs: Tensor, labels: Tensor) -> Tensor:
        return phase.task_weight * task.loss(outputs, labels)

    for number, index in enumerate(batches):
        inputs, labels = examples.at(index)
        inputs = prepare(inputs) if len(index) else inputs
        if privacy is not None:
            mean = privacy.backward(model, of_task, inputs, labels, phase.optimisation.batch_size)
            hidden: Any = Hidden(mean)
            yield Step(number, model, parameters, hidden, hidden, hidden, hidden, hidden, phase.optimisation.bf16, task)
            continue
        outputs, captured = forward(model, inputs, phase.captures, bf16=phase.optimisation.bf16)
        yield Step(number, model, parameters, inputs, labels, index, outputs, captured, phase.optimisation.bf16, task)


def loss_of(step: Step, phase: Phase, recorded: dict[str, tuple[Tensor, int]]) -> Tensor:
    """Return the sum of the task's loss and the loss terms; add the other values of loss terms to `recorded`."""
    if isinstance(step.outputs, Hidden):
        loss = step.outputs.loss
    else:
        loss = step.loss(step.outputs) if phase.task_weight else 0 * step.outputs.sum()
        if phase.task_weight != 1:
            loss = phase.task_weight * loss
    for term in phase.terms:
        value = term(step)
        if isinstance(value, tuple):
            value, values = value
            record(recorded, values)
        if value is not None:
            loss = loss + value
    return loss


def record(recorded: dict[str, tuple[Tensor, int]], values: Mapping[str, Tensor]) -> None:
    """Add a step's values to `recorded`, which has the sum and the number of steps of each value by name."""
    for name, each in values.items():
        total, steps = recorded.get(name) or (torch.zeros((), device=each.device), 0)
        recorded[name] = (total + each.detach(), steps + 1)


def _check_losses(
    losses: list[float], sizes: list[int], examples: int, norm: float, phase: Phase, *, first: bool
) -> None:
    """Raise `ModelError` if losses or the largest norm of a parameter show that training diverged.

    If this is the client's `first` phase in the round, a first loss that is not finite has its own message.
    """
    if first and not math.isfinite(losses[0]):
        raise ModelError(
            f"the loss of the first step is {losses[0]:.3g}, before training has changed a weight: check "
            "whether the network or the augmentation returns values that are not finite"
        )
    step = next((number for number, loss in enumerate(losses, 1) if not abs(loss) <= LARGEST), None)
    if step is None and norm <= LARGEST:
        return
    epoch = math.ceil(sum(sizes[: step or len(sizes)]) / examples)
    sign = f"the loss is {losses[step - 1]:.3g}" if step else f"weights have a norm of {norm:.3g}"
    rate = phase.optimisation.learning_rate
    raise ModelError(f"training diverged in epoch {epoch}, {sign}: a lower learning-rate than {rate:g} may help")


def _optimizer(phase: Phase, parameters: Sequence[nn.Parameter], before: Trained) -> torch.optim.Optimizer:
    if not phase.continues or before.optimizer is None:
        return phase.optimisation.build(parameters)
    stepped = {id(parameter) for group in before.optimizer.param_groups for parameter in group["params"]}
    if stepped != {id(parameter) for parameter in parameters}:
        raise ModelError(
            "a training phase that continues the previous phase must train the same parameters: set continues=False"
        )
    return before.optimizer


@contextmanager
def only_trained(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], trains: Callable[[str], bool] | None
) -> Iterator[list[nn.Parameter]]:
    """Context manager that yields the parameters to train, without gradients, and freezes all other parameters."""
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    live = [parameter for name, parameter in trainable.items() if trains is None or trains(name)]
    if not live:
        raise ModelError(
            f"a training phase has no parameters to train: it selects none of the {len(trainable)} trainable "
            f"parameters of {model._get_name()}; set requires_grad, or select others in `trains`"
        )
    _forget_gradients(live)
    if trains is None:
        yield live
        return
    for name, parameter in trainable.items():
        parameter.requires_grad_(trains(name))
    for prefix, module in model.named_modules():  # without an array that is trained, a module keeps its buffers
        arrays = (module._parameters, module._buffers)
        own = next((names for each in arrays if (names := [name for name in each if each[name] is not None])), [])
        if own and not any(trains(f"{prefix}.{name}".removeprefix(".")) for name in own):
            module.training = False
    try:
        yield live
    finally:
        for parameter in trainable.values():
            parameter.requires_grad_(True)
        model.train()


def _forget_gradients(parameters: Sequence[nn.Parameter]) -> None:
    # Optimizer.zero_grad without its profiling, which is a tenth of a small network's step.
    for parameter in parameters:
        parameter.grad = None


def mini_batches(
    model: nn.Module, phase: Phase, examples: Examples, generator: torch.Generator, privacy: Privacy | None
) -> tuple[Iterator[Tensor], int]:
    """Return an iterator over the index tensors of a phase's mini-batches, and the number of mini-batches."""
    if examples.groups == ():
        return iter(()), 0
    size = phase.optimisation.batch_size
    least = phase.optimisation.least
    if examples.groups is not None or len(examples) % size == 1:  # BatchNorm cannot train on one example
        least = max(least, 1 + uses_batch_statistics(model))
    total = phase.steps or phase.epochs * len(_ends(len(examples), size, least))
    if privacy is not None:
        return privacy.rows(len(examples), size, total), total
    device = examples.labels.device
    if examples.groups is None:
        orders = (batches(len(examples), size, generator, device, least=least) for _ in count())
    else:
        orders = (grouped_batches(examples.groups, size, generator, least=least) for _ in count())
    return islice(chain.from_iterable(orders), total), total


def batches(
    count: int, size: int, generator: torch.Generator, device: torch.device | None = None, *, least: int = 1
) -> Iterator[Tensor]:
    """Yield the mini-batches of a shuffled epoch of `count` examples, as index tensors of at least `least` examples."""
    order = torch.randperm(count, generator=generator)
    order = order if device is None else brought(order, device)
    start = 0
    for end in _ends(count, size, least):
        yield order[start:end]
        start = end


def grouped_batches(
    groups: Sequence[Tensor], size: int, generator: torch.Generator, *, least: int = 1
) -> Iterator[Tensor]:
    """Yield index tensors for one shuffled epoch, each with whole `groups` of rows and at least `least` examples."""
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
