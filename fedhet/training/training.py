"""The training loop of all methods."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from fedhet.data import Examples
from fedhet.data.reading import LazyInputs
from fedhet.errors import ModelError
from fedhet.models.representation import isolated
from fedhet.tasks import LARGEST, Task
from fedhet.training.evaluation import forward, uses_batch_statistics
from fedhet.training.phases import Loss, Phase, Step, Term, Trained, set_moments
from fedhet.training.privacy import ExampleLoss, Privacy, one_by_one
from fedhet.utils.inputs import for_each
from fedhet.utils.machine import brought
from fedhet.utils.randomness import SecretStream, permutation, seed_everything
from fedhet.utils.statistics import Work

Recorded = dict[str, tuple[Tensor, int]]
"""Sum and number of steps of each scalar that loss terms record, by name."""

Gradients = Callable[[int, Tensor], tuple[Step, Tensor]]
"""A function of a step's number and its examples' indices that sets gradients, and returns the step and its loss."""


@dataclass(frozen=True, eq=False)
class Training:
    """A phase of a client's training, which a backend computes.

    Attributes:
        model: the model to train in place, unless the phase has a `module`.
        phase: the phase of training.
        examples: the client's training examples, on the model's device; not used if the phase has its own.
        task: the task, which defines the loss.
        prepare: function that transforms raw inputs, and augments them if its second argument is a generator.
        generator: random generator of the order of examples, unless the stream `order` is given, and the augmentation.
        seed: seed of torch's global generator, which dropout uses.
        before: the combined result of the phases before this one.
        order: secret stream of the order of examples.
        privacy: settings of example-level differential privacy.
        alone: whether the network must not be trained together with others.
        augments: whether `prepare` augments the examples of mini-batches.
        compiled: whether steps of a batch of networks are compiled.
    """

    model: nn.Module
    phase: Phase
    examples: Examples
    task: Task
    prepare: Callable[[Tensor, torch.Generator | None], Tensor]
    generator: torch.Generator
    seed: int = 0
    before: Trained = field(default_factory=Trained)
    order: SecretStream | None = None
    privacy: Privacy | None = None
    alone: bool = False
    augments: bool = False
    compiled: bool = False

    @property
    def network(self) -> nn.Module:
        """The network to train: the phase's module or, by default, the client's network."""
        return self.phase.module or self.model

    @property
    def rows(self) -> Examples:
        """The examples to train on: the phase's own or, by default, the client's."""
        return self.phase.examples or self.examples

    def result(self) -> Trained:
        """Train the model, and return the combined result of this phase and the phases before it.

        Raises a ModelError if the phase trains none of the model's parameters, training diverged, or the first loss is
        not finite.
        """
        seed_everything(self.seed)
        phase = self.phase
        optimisation = phase.optimisation
        model = self.network.train()
        losses: list[Tensor] = []
        sizes: list[int] = []
        weights: list[float] = []
        recorded = dict(self.before.recorded)
        further = 0
        # Before layers are frozen, so that a phase that trains only the head has the same mini-batches.
        rows, total = mini_batches(model, phase, self.rows, self.order or self.generator, self.privacy)
        with only_trained(model, phase.trains) as parameters:
            if self.privacy is None:
                gradients = self._gradients(model, recorded)
            else:
                gradients = self._private_gradients(self.privacy, model, recorded)
            optimizer = optimisation.build(model, parameters)
            if phase.continues:
                for parameter, moments in self.before.moments.items():
                    set_moments(optimizer, parameter, moments)
            for number, index in enumerate(rows):
                step, loss = gradients(number, index)
                if optimisation.clip_gradients:
                    nn.utils.clip_grad_norm_(parameters, optimisation.clip_gradients)
                optimisation.set_rate(optimizer, number, total)
                optimizer.step()
                forget_gradients(parameters)
                # Losses are read at the end, because reading makes a GPU wait.
                losses.append(loss.detach())
                sizes.append(len(step.labels))
                weight = self.task.weight(step.labels) if phase.task_weight and self.privacy is None else None
                weights.append(sizes[-1] if weight is None else weight / step.labels[0].numel())
                further += step.further + len(step.inputs) * (1 + step.again) - sizes[-1]
        if not losses:
            return self.before
        values = torch.stack(losses).tolist()
        with torch.inference_mode():
            norm = torch.stack(torch._foreach_norm(tuple(parameters))).max().item()
        return self.outcome(values, sizes, norm, further, recorded, optimizer.state, weights)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs, transformed and augmented as the phase says, and labels of the examples `rows` (n,)."""
        inputs, labels = self.rows.at(rows)
        return self._prepared(inputs), labels

    def _prepared(self, inputs: Tensor) -> Tensor:
        phase = self.phase
        augmented = phase.examples is None or phase.augmented or phase.augment is not None
        generator = self.generator if self.privacy is None else torch.default_generator  # see `Privacy._each`
        return self.prepare(inputs, generator if augmented else None)

    def _gradients(self, model: nn.Module, recorded: Recorded) -> Gradients:
        phase = self.phase
        bf16 = phase.optimisation.bf16
        named = dict(model.named_parameters())

        def gradients(number: int, index: Tensor) -> tuple[Step, Tensor]:
            inputs, labels = self.batch(index)
            outputs, captured = forward(model, inputs, phase.captures, bf16=bf16)
            step = Step(number, model, named, inputs, labels, index, outputs, captured, bf16, self.task)
            loss = loss_of(step, phase, recorded)
            _backward(loss)
            return step, loss

        return gradients

    def _private_gradients(self, privacy: Privacy, model: nn.Module, recorded: Recorded) -> Gradients:
        """Return a function for differentially private training, whose loss has only the terms of public data."""
        of_one, phase = private_loss(model, self.phase, self.task)
        inputs, labels = self.rows.at(slice(0, 1))
        with isolated(model):
            privacy.check(model, of_one, self._prepared(for_each(inputs, torch.zeros_like)), labels)
        bf16 = phase.optimisation.bf16
        named = dict(model.named_parameters())
        size = min(phase.optimisation.batch_size, len(self.rows))
        blank = torch.zeros(size, device=next(iter(named.values())).device)
        alone = self.augments or isinstance(self.rows.inputs, LazyInputs)
        batch = partial(one_by_one, self.batch) if alone else self.batch

        def gradients(number: int, index: Tensor) -> tuple[Step, Tensor]:
            # Buffers get no noise, and could count the forward passes, of which an example that fails needs more.
            with isolated(model):
                privacy.backward(model, of_one, batch, index, size)
            step = Step(number, model, named, blank, blank, index[:0], blank, bf16=bf16, task=self.task)
            loss = loss_of(step, phase, recorded, blank.sum())
            # Without such terms, the gradients are set already.
            if loss.requires_grad:
                _backward(loss)
            return step, loss

        return gradients

    def outcome(
        self,
        losses: list[float],
        sizes: list[int],
        norm: float,
        further: int,
        recorded: Recorded,
        moments: Mapping[Tensor, Mapping[str, Tensor]],
        weights: Sequence[float] = (),
    ) -> Trained:
        """Return the combined result of this phase and the phases before it; raise a ModelError if training diverged.

        `losses` and `sizes` have the loss and the batch size of each step, and `norm` is the largest norm of a
        parameter after the phase. `further` is the number of examples that loss terms passed through the network in
        addition to mini-batches. `recorded` has sum and number of steps of each scalar that loss terms record, by name,
        and `moments` are the optimiser's state after the last step (see `Trained`). `weights` are those of the steps in
        the mean loss, by default `sizes`.
        """
        if not self.before.work.steps and not math.isfinite(losses[0]):
            raise ModelError(
                f"the loss of the first step is {losses[0]:.3g}, before training has changed a weight: check "
                "whether the network, the augmentation or a loss term returns values that are not finite"
            )
        step = next((number for number, loss in enumerate(losses, 1) if not abs(loss) <= LARGEST), None)
        if step or not norm <= LARGEST:
            epoch = math.ceil(sum(sizes[: step or len(sizes)]) / len(self.rows))
            sign = f"the loss is {losses[step - 1]:.3g}" if step else f"weights have a norm of {norm:.3g}"
            rate = self.phase.optimisation.learning_rate
            raise ModelError(
                f"training diverged in epoch {epoch}, {sign}: a lower learning-rate than {rate:g} may help"
            )
        weights = weights if sum(weights) else sizes
        mean = math.fsum(map(operator.mul, losses, weights)) / sum(weights)
        epochs = self.phase.epochs if not self.phase.steps else sum(sizes) / len(self.rows)
        steps = len(losses)
        work = self.before.work + Work(steps if self.phase.examples is None else 0, steps, sum(sizes) + further)
        return Trained(self.before.loss + mean * epochs, self.before.epochs + epochs, recorded, moments, work)


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ModelError(
            "outputs have no gradients: leave torch.no_grad and detach out, and set head to the last layer"
        )
    try:
        loss.backward()
    except CheckpointError as error:
        raise ModelError(
            "the method reads values inside the network, which torch.utils.checkpoint computes again with other "
            "tensors: leave the checkpoint out of forward, or choose another method"
        ) from error


def loss_of(step: Step, phase: Phase, recorded: Recorded, loss: Tensor | None = None) -> Tensor:
    """Return `loss` (default: the task's loss in the step) plus the phase's loss terms.

    Scalars that terms report are added to `recorded`, which has their sum and number of steps by name.
    """
    if loss is None:
        loss = step.loss(step.outputs) if phase.task_weight else 0 * step.outputs.sum()
        loss = loss if phase.task_weight == 1 else phase.task_weight * loss
    for term in phase.terms:
        value = term(step)
        if isinstance(value, tuple):
            value, values = value
            for scalar in values.values():
                _check_scalar(scalar, term)
            record(recorded, values)
        if value is not None:
            _check_scalar(value, term)
            loss = loss + value
    return loss


def _check_scalar(value: object, term: Loss) -> None:
    if not isinstance(value, Tensor) or value.ndim:
        name = getattr(getattr(term, "function", term), "__name__", "of a phase")
        kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        advice = "return a scalar tensor, such as step.mean(values), or None"
        raise ModelError(f"the loss term {name} returned a value of {kind}: {advice}")


def record(recorded: Recorded, values: Mapping[str, Tensor]) -> None:
    """Add the scalars `values` of one step to `recorded`, which has the sum and the number of steps for each name."""
    for name, value in values.items():
        total, steps = recorded.get(name) or (torch.zeros((), device=value.device), 0)
        recorded[name] = (total + value.detach(), steps + 1)


def private_loss(model: nn.Module, phase: Phase, task: Task) -> tuple[ExampleLoss, Phase]:
    """Return the loss of one private example, and the phase with its other loss terms, which read public data only.

    Raises a ModelError if a loss term is not known to be a function of single examples and public data.
    """
    if not all(isinstance(term, Term) and (term.public or not term.draw) for term in phase.terms):
        raise ModelError(
            "dp-noise clips the loss of each example, and this method has a loss term that is no function of one "
            "example: choose another method, such as fedavg, fedprox, fedrep or fedhenn"
        )
    public = tuple(term for term in phase.terms if isinstance(term, Term) and term.public)
    private = replace(phase, terms=tuple(term for term in phase.terms if term not in public))
    captures = private.captures

    def of_one(inputs: Tensor, labels: Tensor) -> Tensor:
        outputs, captured = forward(model, inputs, captures)
        step = Step(0, model, dict(model.named_parameters()), inputs, labels, labels, outputs, captured, task=task)
        return loss_of(step, private, {})

    return of_one, replace(phase, terms=public)


@contextmanager
def only_trained(model: nn.Module, trains: Callable[[str], bool] | None) -> Iterator[list[nn.Parameter]]:
    """Context manager that yields the parameters whose names `trains` accepts (None: all), and freezes others."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    live = [parameter for name, parameter in trainable.items() if trains is None or trains(name)]
    if not live:
        raise ModelError(
            f"a training phase has no parameters to train: the layers of {model._get_name()} that it is for are frozen "
            f"or missing ({len(trainable)} others are trainable): set requires_grad, or choose another method"
        )
    forget_gradients(live)
    if trains is None:
        yield live
        return
    for name, parameter in trainable.items():
        parameter.requires_grad_(trains(name))
    for prefix, module in model.named_modules():  # without an array that is trained, a module keeps its buffers
        parameters = [name for name, parameter in module._parameters.items() if parameter is not None]
        buffers = [name for name, buffer in module._buffers.items() if buffer is not None]
        names = parameters or buffers
        if names and not any(trains(f"{prefix}.{name}".removeprefix(".")) for name in names):
            module.training = False
    try:
        yield live
    finally:
        for parameter in trainable.values():
            parameter.requires_grad_(True)
        model.train()


def forget_gradients(parameters: Sequence[Tensor]) -> None:
    """Set the gradients of `parameters` to None; for small networks, this is faster than `Optimizer.zero_grad`."""
    for parameter in parameters:
        parameter.grad = None


def mini_batches(
    model: nn.Module, phase: Phase, examples: Examples, order: torch.Generator | SecretStream, privacy: Privacy | None
) -> tuple[Iterator[Tensor], int]:
    """Return an iterator over the index tensors of a phase's mini-batches, and the number of mini-batches.

    `order` shuffles the `examples`; groups of examples (`examples.groups`) stay in one mini-batch. With `privacy`,
    mini-batches are drawn by Poisson sampling instead. If `model` has BatchNorm, they have at least two examples.
    """
    if examples.groups == ():
        return iter(()), 0
    size = phase.optimisation.batch_size
    least = phase.optimisation.least
    if examples.groups is not None or len(examples) % size == 1:  # BatchNorm cannot train on one example
        least = max(least, 1 + uses_batch_statistics(model))
    total = phase.steps or phase.epochs * len(ends(len(examples), size, least))
    if privacy is not None:
        return privacy.rows(len(examples), size, total), total
    device = examples.labels.device
    if examples.groups is None:
        orders = (batches(len(examples), size, order, device, least=least) for _ in count())
    else:
        orders = (grouped_batches(examples.groups, size, order, least=least) for _ in count())
    return islice(chain.from_iterable(orders), total), total


def batches(
    count: int, size: int, source: torch.Generator | SecretStream, device: torch.device | None = None, *, least: int = 1
) -> Iterator[Tensor]:
    """Yield 0 to `count` - 1, shuffled, in batches of `size`; a rest of fewer than `least` joins the last batch."""
    order = permutation(count, source)
    order = order if device is None else brought(order, device)
    start = 0
    for end in ends(count, size, least):
        yield order[start:end]
        start = end


def grouped_batches(
    groups: Sequence[Tensor], size: int, source: torch.Generator | SecretStream, *, least: int = 1
) -> Iterator[Tensor]:
    """Yield batches of about `size`, at least `least`, indices: whole `groups` (index tensors) in random order."""
    order = permutation(len(groups), source).tolist()
    together = max(1, round(size * len(groups) / sum(map(len, groups))))
    start = 0
    for end in ends(len(groups), together, math.ceil(least / min(map(len, groups)))):
        yield torch.cat([groups[place] for place in order[start:end]])
        start = end


def ends(count: int, size: int, least: int) -> list[int]:
    """Return the ends of batches of `size` of `count` examples; a rest of fewer than `least` joins the last batch."""
    full = list(range(size, count, size))
    if full and count - full[-1] < least:
        full.pop()
    return [*full, count] if count else []
