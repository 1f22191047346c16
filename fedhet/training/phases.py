"""The phases of a client's local training, with their optimisers, and example-level differential privacy (DP-SGD).

A method's local training is a list of phases. FedAvg has one phase; FedRep has two, which train the head and then the
rest of the network. A loss term is a function of the current `Step` that returns a scalar to add to the task's loss,
such as a regulariser.

DP-SGD (Abadi et al., CCS 2016, algorithm 1, with Poisson sampling): each example's gradient is clipped, and noise is
added to the sum of the gradients.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.models.representation import Capturing, RandomStream, Representation
from fedhet.tasks import Task
from fedhet.training.evaluation import forward
from fedhet.utils.statistics import Work

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
AT_ONCE = 64  # number of examples whose separate gradients are computed at once in differentially private training


@dataclass(frozen=True)
class Optimisation:
    """The optimiser, batch size and learning rate of a training phase.

    Attributes:
        optimizer: sgd, adam, amsgrad (Reddi et al., 2018) or adamw.
        learning_rate: the learning rate, constant over the phase unless there is a schedule.
        momentum: momentum of SGD.
        weight_decay: weight decay of matrices and filters; biases and normalisation have none.
        batch_size: number of examples in a mini-batch.
        schedule: function from the completed fraction of the phase to the learning rate of a step.
        bf16: whether forward passes are computed in bfloat16; weights and losses are float32.
        least: minimum number of examples in a mini-batch; a smaller last batch is merged into the batch before it.
        clip_gradients: maximum norm of the gradients of all parameters together; 0 for no limit.
    """

    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 32
    schedule: Callable[[float], float] | None = None
    bf16: bool = False
    least: int = 1
    clip_gradients: float = 0.0

    def at(self, rate: float) -> "Optimisation":
        """Return a copy with the constant learning rate `rate`, or this object unchanged if `rate` is 0."""
        return replace(self, learning_rate=rate, schedule=None) if rate else self

    def build(self, parameters: Sequence[Tensor], *, stacked: bool = False) -> torch.optim.Optimizer:
        """Return a new optimiser; if `stacked`, `parameters` are of several networks, stacked along the first axis."""
        groups: list[dict[str, object]] = [{"params": parameters}]
        if self.weight_decay:
            groups = [
                {"params": [p for p in parameters if p.ndim > 1 + stacked], "weight_decay": self.weight_decay},
                {"params": [p for p in parameters if p.ndim <= 1 + stacked]},
            ]
        if self.optimizer == "sgd":
            return eager(torch.optim.SGD)(groups, lr=self.learning_rate, momentum=self.momentum, fused=True)
        kind = eager(torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam)
        return kind(groups, lr=self.learning_rate, weight_decay=0.0, amsgrad=self.optimizer == "amsgrad", fused=True)


def learning_rate(schedule: str, largest: float, done: float) -> float:
    """Return the learning rate of a schedule after the fraction `done` of the run; `largest` is its maximum.

    `constant` stays at `largest`; `linear` and `cosine` decrease to zero; `one-cycle` (Smith and Topin, 2018) increases
    along a cosine from `largest` / 25 to `largest` at 0.3 of the run, then decreases along a cosine to `largest` / 100.
    """
    done = min(max(done, 0.0), 1.0)
    falling = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    if schedule in falling:
        return largest * falling[schedule]
    peak = 0.3
    start, end = (largest / 25, largest) if done < peak else (largest, largest / 100)
    place = done / peak if done < peak else (done - peak) / (1 - peak)
    return end + (start - end) * (1 + math.cos(math.pi * place)) / 2


@cache
def eager(kind: type[Kind]) -> type[Kind]:
    """Return a subclass of the torch optimiser class `kind` whose steps skip torch's compiler and profiler.

    Importing the compiler takes seconds, and the profiler takes a third of the time of a small network's step.
    """
    step = torch.no_grad()(_bare(kind.step))
    vars(step)["hooked"] = True  # torch takes its hooks to be there
    return type(kind.__name__, (kind,), {"add_param_group": _bare(kind.add_param_group), "step": step})


def _bare(method: Callable[..., Any]) -> Callable[..., Any]:
    def others(function: Callable[..., Any]) -> bool:
        module = getattr(function, "__globals__", {}).get("__name__", "")  # a wrapper's `__module__` is what it wraps
        return not module.startswith("torch.")

    return inspect.unwrap(method, stop=others)


def soft_divergence(outputs: Tensor, wanted: Tensor, temperature: float, *, many_labels: bool = False) -> Tensor:
    """Return the mean KL(softmax(wanted / T) || softmax(outputs / T)) of logits (n, ..., classes) at `temperature` T.

    `wanted` are target logits, which are detached. With `many_labels`, each output is the logit of a separate label,
    and divergences are averaged over labels. Gradients scale with 1 / T^2, for which the caller must compensate.
    """
    outputs, wanted = outputs / temperature, wanted.detach() / temperature
    divergences = partial(F.kl_div, log_target=True, reduction="none")
    if not many_labels:
        return divergences(outputs.log_softmax(-1), wanted.log_softmax(-1)).sum(-1).mean()
    held, lacked = (divergences(F.logsigmoid(sign * outputs), F.logsigmoid(sign * wanted)).mean() for sign in (1, -1))
    return held + lacked


@dataclass
class Privacy:
    """The settings of a client's differentially private training.

    Attributes:
        noise: standard deviation of the noise that is added to the sum of gradients, as a multiple of `clip`.
        clip: largest Euclidean norm of the gradient of one example.
        spend: function that is called before a phase with its sampling rate and number of steps; returns `epsilon`
            after the phase, or raises an error if this exceeds the client's budget.
        generator: random generator (on the CPU) that draws examples and noise.
        epsilon: the privacy budget spent so far.
    """

    noise: float
    clip: float
    spend: Callable[[float, int], float]
    generator: torch.Generator
    epsilon: float = 0.0

    def rows(self, count: int, size: int, steps: int) -> Iterator[Tensor]:
        """Return an iterator over the batches of `steps` steps: indices below `count`, drawn by Poisson sampling.

        Each index is in a batch with probability `size` / `count`. The call spends the privacy budget of all steps.
        """
        rate = min(size / count, 1.0)
        self.epsilon = self.spend(rate, steps)
        draws = (torch.rand(count, generator=self.generator) < rate for _ in range(steps))
        return (drawn.nonzero().flatten() for drawn in draws)

    def backward(
        self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, labels: Tensor, size: int
    ) -> Tensor:
        """Set the private gradients of all parameters that require gradients; return the mean loss, without noise.

        A gradient is the sum of the examples' clipped gradients and the noise, divided by `size`.

        Args:
            model: the network, without layers that normalise over examples.
            loss: function from outputs (1, ...) and labels (1, ...) of one example to its scalar loss.
            inputs: (n, ...) transformed examples; n may be 0.
            labels: (n, ...) labels of the examples.
            size: expected number of examples in a batch.

        Raises:
            ModelError: the gradients of single examples cannot be computed.
        """
        live = {name: each for name, each in model.named_parameters() if each.requires_grad}
        total, mean = {name: torch.zeros_like(each) for name, each in live.items()}, torch.zeros(())

        def of_one(parameters: Mapping[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
            outputs = functional_call(model, {**parameters}, (example[None],))
            return loss(outputs, label[None])

        gradients_of = vmap(grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different")
        values = {name: each.detach() for name, each in live.items()}
        for some, some_labels in zip(inputs.split(AT_ONCE), labels.split(AT_ONCE), strict=True) if len(inputs) else ():
            try:
                gradients, losses = gradients_of(values, some, some_labels)
            except RuntimeError as error:
                raise ModelError(
                    f"dp-noise needs the gradient of each example, and torch.func cannot compute it for this "
                    f"{model._get_name()} ({error}): use another network or leave dp-noise out"
                ) from error
            norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
            scale = (self.clip / norms.clamp_min(self.clip)).nan_to_num()
            for name, each in gradients.items():
                total[name] += torch.tensordot(scale, each.nan_to_num(), 1)
            mean = mean + losses.sum() / len(inputs)
        for name, parameter in live.items():
            noise = torch.randn(parameter.shape, generator=self.generator, dtype=parameter.dtype)
            parameter.grad = (total[name] + self.noise * self.clip * noise.to(parameter.device)) / size
        return mean.detach()


@dataclass(slots=True)
class Step:
    """One mini-batch of training, the argument of each loss term.

    Attributes:
        number: number of the step in its phase, from 0.
        model: the network in training mode, before this step's update.
        parameters: the network's parameters by name, including frozen ones.
        inputs: (n, ...) transformed examples on the device.
        labels: (n, ...) labels of the examples.
        rows: (n,) int64, indices of the examples among the phase's examples.
        outputs: the network's outputs for `inputs`.
        captured: by name, the values (n, ...) inside the network that loss terms capture, with gradients.
        bf16: whether forward passes are computed in bfloat16.
        task: the task, which defines the loss.
        further: number of examples besides the mini-batch that loss terms have passed through the network.
        weights: (n,) weights of the examples in means, 0 for padding; None for equal weights.
    """

    number: int
    model: nn.Module
    parameters: Mapping[str, Tensor]
    inputs: Tensor
    labels: Tensor
    rows: Tensor
    outputs: Tensor
    captured: Mapping[str, Tensor] = field(default_factory=dict)
    bf16: bool = False
    task: Task = Task("classification")  # noqa: RUF009 - it is not changed
    further: int = 0
    weights: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` (n,) over the examples of the mini-batch, weighted by `weights`."""
        return values.mean() if self.weights is None else (values * self.weights).sum()

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the task's loss of `outputs` (n, ...) for the step's labels, in the dtype of the step's outputs."""
        outputs = outputs.to(self.outputs.dtype)
        if self.weights is None:
            return self.task.loss(outputs, self.labels)
        return self.mean(self.task.outputs.losses(outputs, self.labels))

    def divergence(self, outputs: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the mean KL divergence of `outputs` (n, ...) from target outputs `wanted`, both at `temperature`."""
        kind = self.task.outputs
        scores, wanted = kind.scores(outputs), kind.scores(wanted)
        return soft_divergence(scores, wanted, temperature, many_labels=kind.meaning == "labels")

    def represent(self, inputs: Tensor, representation: Representation, stream: RandomStream) -> Tensor:
        """Return representations (m, d) of m transformed examples `inputs` (m, ...), as part of the autograd graph.

        `representation` computes them: the input of the network's head, or another layer's output. Dropout draws from
        `stream`. The forward pass changes neither buffers nor torch's global random state.
        """
        self.further += len(inputs)
        return forward(self.model, inputs, until=representation, stream=stream, bf16=self.bf16)[0]


Value = Tensor | tuple[Tensor, Mapping[str, Tensor]] | None
"""The result of a loss term: a scalar loss, or (loss, {name: scalar to record}), or None for no loss in this step."""

Loss = Callable[[Step], Value]
"""A loss term: a function of a training step that returns a loss to add to the task's loss."""


@dataclass(frozen=True)
class Phase:
    """One phase of a client's local training.

    Attributes:
        epochs: number of passes over the examples.
        optimisation: optimiser, batch size and learning rate.
        steps: number of mini-batches, instead of whole epochs, if above 0.
        module: the network to train, if not the client's network.
        trains: function that returns whether to train the array (parameter or buffer) of a given name; by default, all
            are. Parameters without `requires_grad` stay frozen; buffers of layers without trained arrays do not change.
        terms: loss terms to add to the task's loss.
        task_weight: weight of the task's own loss; with 0, labels can be any targets that the terms need.
        examples: the examples to train on, if not the client's training examples.
        augmented: whether batches of `examples` are augmented; must be False if terms have a target for each example.
        continues: whether to continue with the optimiser of the previous phase, which must train the same parameters.
    """

    epochs: int
    optimisation: Optimisation
    steps: int = 0
    module: nn.Module | None = None
    trains: Callable[[str], bool] | None = None
    terms: tuple[Loss, ...] = ()
    task_weight: float = 1.0
    examples: Examples | None = None
    augmented: bool = False
    continues: bool = False

    @cached_property
    def captures(self) -> dict[str, Capturing]:
        """Values inside the network that the loss terms capture in each step, by name."""
        return {name: value for term in self.terms for name, value in getattr(term, "captures", {}).items()}


@dataclass
class Trained:
    """The result of one or several phases.

    Attributes:
        loss: mean loss of the steps, weighted by batch size, times the number of epochs; summed over phases.
        epochs: number of passes over the examples, a fraction for phases with a number of `steps`.
        recorded: by name, the sum (a scalar tensor) and number of steps of each scalar that loss terms record.
        optimizer: the last phase's optimiser with its state; None if several networks were trained together.
        work: numbers of gradient steps and of forward passes.
    """

    loss: float = 0.0
    epochs: float = 0
    recorded: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    work: Work = field(default_factory=Work)

    @property
    def mean_loss(self) -> float | None:
        """Mean loss over all epochs; None without a training step."""
        return self.loss / self.epochs if self.epochs else None

    @property
    def means(self) -> dict[str, float]:
        """Mean over steps of each scalar that loss terms record, by name."""
        return {name: float(total) / count for name, (total, count) in self.recorded.items()}
