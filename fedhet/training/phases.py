"""The phases of a client's local training, with their optimisers and loss terms.

A method's local training is a list of phases. FedAvg has one phase; FedRep has two, which train the head and then the
rest of the network. A loss term is a function of the current `Step` that returns a scalar to add to the task's loss,
such as a regulariser.
"""

import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import compress
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from fedhet.data import Augment, Examples
from fedhet.errors import ModelError
from fedhet.models.copies import in_evaluation_mode
from fedhet.models.representation import Capturing, RandomStream, Representation
from fedhet.tasks import Task
from fedhet.training.evaluation import forward
from fedhet.utils.statistics import Work

Kind = TypeVar("Kind", bound=Optimizer)

STEPS = "step"
"""Name of the number of steps in an optimiser's state."""


@dataclass(frozen=True)
class Optimisation:
    """The optimiser, batch size and learning rate of a training phase.

    Attributes:
        optimizer: sgd, adam, amsgrad (Reddi et al., 2018) or adamw.
        learning_rate: the learning rate, constant over the phase unless there is a schedule.
        momentum: momentum of SGD.
        weight_decay: weight decay, except of biases and normalisation layers (see `decayed`).
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

    def build(self, model: nn.Module, trained: Sequence[Tensor], stacked: Sequence[Tensor] = ()) -> Optimizer:
        """Return a new optimiser of the parameters `trained` of a model, or of tensors in which they are `stacked`."""
        parameters = stacked or trained
        groups: list[dict[str, object]] = [{"params": parameters}]
        if self.weight_decay:
            chosen = decayed(model, trained)
            groups = [
                {"params": [*compress(parameters, chosen)], "weight_decay": self.weight_decay},
                {"params": [*compress(parameters, map(operator.not_, chosen))]},
            ]
        if self.optimizer == "sgd":
            return eager(torch.optim.SGD)(groups, lr=self.learning_rate, momentum=self.momentum, fused=True)
        kind = eager(torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam)
        return kind(groups, lr=self.learning_rate, weight_decay=0.0, amsgrad=self.optimizer == "amsgrad", fused=True)

    def set_rate(self, optimizer: Optimizer, number: int, total: int) -> None:
        """Set the learning rate of the step `number` of `total` if there is a schedule."""
        if self.schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.schedule(number / total)


_NORMALISATION = re.compile(  # not NormalNet, NormedLinear or enormous
    r"(Norm|(^|_|layer|batch|group|rms)norm)(?!al(?!i[sz]))(?!\w*([Ll]inear|[Cc]onv|[Dd]ense|[Ee]mbed))|GRN"
)


def decayed(model: nn.Module, parameters: Sequence[Tensor]) -> list[bool]:
    """Return for each of a model's `parameters` whether it has weight decay: biases and normalisation layers have none.

    A bias has `bias` in its name, or is named `b`. A normalisation layer has running statistics, parameters `gamma` and
    `beta`, or `norm` in the name of its class, of itself or of a parameter; it is no linear layer, convolution or
    embedding.
    """
    exempt = set[int]()
    for path, module in model.named_modules():
        layer = path.rpartition(".")[2]
        kinds = [kind.__name__ for kind in type(module).__mro__]
        matrix = isinstance(module, nn.Linear | nn.Embedding | _ConvNd)
        scaled = hasattr(module, "running_mean") or {"gamma", "beta"} <= module._parameters.keys()
        for name, parameter in module._parameters.items():
            name = layer if isinstance(module, ParametrizationList) else name  # of the tensor that has parameters
            normalises = scaled or any(map(_NORMALISATION.search, (*kinds, layer, name)))
            if "bias" in name.lower() or name == "b" or (normalises and not matrix):
                exempt.add(id(parameter))
    return [id(parameter) not in exempt for parameter in parameters]


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
    """Return a subclass of the torch optimiser class `kind` whose steps skip torch's slow compiler and profiler."""
    step = torch.no_grad()(_bare(kind.step))
    vars(step)["hooked"] = True  # torch reads this attribute
    return type(kind.__name__, (kind,), {"add_param_group": _bare(kind.add_param_group), "step": step})


def set_moments(optimizer: Optimizer, array: Tensor, moments: Mapping[str, Tensor]) -> None:
    """Set the state of a parameter `array` to copies of `moments` in its layout of memory, as fused optimisers need."""
    optimizer.state[array] = {
        name: value.clone() if name == STEPS else torch.empty_like(array).copy_(value)
        for name, value in moments.items()
    }


def _bare(method: Callable[..., Any]) -> Callable[..., Any]:
    def others(function: Callable[..., Any]) -> bool:
        module = getattr(function, "__globals__", {}).get("__name__", "")  # a wrapper's `__module__` is what it wraps
        return not module.startswith("torch.")

    return inspect.unwrap(method, stop=others)


def soft_divergence(
    outputs: Tensor,
    wanted: Tensor,
    temperature: float,
    *,
    many_labels: bool = False,
    mean: Callable[[Tensor], Tensor] = torch.mean,
) -> Tensor:
    """Return the mean KL(softmax(wanted / T) || softmax(outputs / T)) of logits (n, ..., classes) at `temperature` T.

    `wanted` are target logits, which are detached. With `many_labels` (multi-label tasks), the divergences are those of
    sigmoids, averaged over labels. Gradients scale with 1 / T^2, for which the caller must compensate. `mean` computes
    means over the examples of a batch of networks, such as `Step.mean`.
    """
    outputs = outputs / temperature
    wanted = wanted.detach() / temperature
    if not many_labels:
        return mean(_divergences(outputs.log_softmax(-1), wanted.log_softmax(-1)).sum(-1))
    held, lacked = (mean(_divergences(F.logsigmoid(sign * outputs), F.logsigmoid(sign * wanted))) for sign in (1, -1))
    return held + lacked


def _divergences(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return what `F.kl_div` computes, for which `torch.func.vmap` has no rule."""
    return wanted.exp() * (wanted - outputs)


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
        again: number of times that loss terms have passed the mini-batch itself through the network.
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
    again: int = 0
    weights: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` (n, ...), weighted by the `weights` of the mini-batch's examples.

        Of a batch of networks, the mini-batch can have more examples than `values`: the others are padding.
        """
        if self.weights is None:
            return values.mean()
        values = values.flatten(1).mean(1) if values.ndim > 1 else values
        return (values * self.weights[: len(values)]).sum()

    def loss(self, outputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the task's loss of `outputs` (n, ...), converted to `self.outputs.dtype`, for n labels.

        By default, these are the step's.
        """
        outputs = outputs.to(self.outputs.dtype)
        labels = self.labels if labels is None else labels
        if self.weights is None:
            return self.task.loss(outputs, labels)
        return self.mean(self.task.outputs.losses(outputs, labels))

    def divergence(self, outputs: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the mean KL divergence of `outputs` (n, ...) from target outputs `wanted`, both at `temperature`."""
        kind = self.task.outputs
        scores, wanted = kind.scores(outputs), kind.scores(wanted)
        many_labels = kind.meaning == "labels"
        if kind.places != "one" and self.weights is None:
            counted = ~self.task.left_out(self.labels)
            if bool(counted.any()):  # padding does not count
                scores, wanted = scores[counted], wanted[counted]
        return soft_divergence(scores, wanted, temperature, many_labels=many_labels, mean=self.mean)

    def represent(self, inputs: Tensor, representation: Representation, stream: RandomStream) -> Tensor:
        """Return representations (m, d) of m transformed examples `inputs` (m, ...), as part of the autograd graph.

        `representation` computes them: the input of the network's head, or another layer's output. Dropout draws from
        `stream`. The forward pass changes neither buffers nor torch's global random state.
        """
        self.further += len(inputs)
        return forward(self.model, inputs, until=representation, stream=stream, bf16=self.bf16)[0]

    def beside(self, name: str, representation: Representation, values: Tensor) -> Tensor:
        """Return what the module `name` beside the head returns for `values` (see `fedhet.models.registry.Beside`)."""
        result: Tensor = self.model.get_submodule(f"{representation.head.removesuffix('head')}{name}")(values)
        return result

    def by(self, arrays: Mapping[str, Tensor], representation: Representation | None = None) -> Tensor:
        """Return outputs, or `representation` (n, d), for the step's inputs by its network with other `arrays`.

        `arrays` are from a state dict of the network, and the network's own replace those that are left out. It
        computes in evaluation mode and without gradients.
        """
        self.again += 1
        network = _Computing(self.model, representation)
        names = [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]
        state = {f"model.{name}": arrays[name] for name in names if name in arrays}
        autocast = torch.autocast(self.inputs.device.type, torch.bfloat16, enabled=self.bf16)
        with in_evaluation_mode(self.model), torch.no_grad(), autocast:
            values: Tensor = functional_call(network, state, (self.inputs,))
        return values.float() if self.bf16 else values


class _Computing(nn.Module):
    """A module that computes a network's outputs or representation, in which `functional_call` replaces arrays."""

    def __init__(self, model: nn.Module, representation: Representation | None) -> None:
        super().__init__()
        self.model = model
        self.representation = representation

    def forward(self, inputs: Tensor) -> Tensor:
        values: Tensor = (self.representation or self.model)(inputs)
        return values


Value = Tensor | tuple[Tensor, Mapping[str, Tensor]] | None
"""The result of a loss term: a scalar loss, or (loss, {name: scalar to record}), or None for no loss in this step."""

Loss = Callable[[Step], Value]
"""A loss term: a function of a training step that returns a loss to add to the task's loss."""


class Term:
    """A loss term as a pure function `function(step, **constants)`, which can be computed for several clients at once.

    Args:
        function: a module-level function that reads nothing but the step and `constants`. One that changes constants,
            such as a second network that follows the first, is not `weighted`, so that it is computed alone.
        draw: function of a step's number and number of examples that returns more keyword arguments of `function`,
            such as randomly drawn examples, or None to leave the term out of the step. As steps can be drawn again,
            its only state are random generators: outer variables, bound arguments or attributes of its object. Clients
            are trained together if the first step has the term, and each drawn tensor has a row for each example of
            the mini-batch or, for a `public` term, equally many rows at all clients.
        captures: values to capture inside the network in each step, by their names in `Step.captured`.
        weighted: whether the function averages over examples only by `Step.mean`, so that padding is ignored.
        public: whether the function reads neither the step's examples nor what the network computes from them, so that
            `Step.mean` gives the plain mean of the examples that `draw` returns: the same number for all clients.
        constants: keyword arguments of `function`; tensors and floats (also in containers) can differ between clients.
            They must not depend on the client's examples, since under `dp-noise` they get no noise.
    """

    def __init__(
        self,
        function: Callable[..., Value],
        *,
        draw: Callable[[int, int], Mapping[str, Any] | None] | None = None,
        captures: Mapping[str, Capturing] | None = None,
        weighted: bool = False,
        public: bool = False,
        **constants: Any,
    ) -> None:
        self.function = function
        self.draw = draw
        self.captures = captures or {}
        self.constants = constants
        self.weighted, self.public = weighted, public

    def drawn(self, number: int, examples: int) -> Mapping[str, Any] | None:
        """Return what `draw` returns for a step; an empty dict without `draw`."""
        return {} if self.draw is None else self.draw(number, examples)

    def __call__(self, step: Step) -> Value:
        """Return the term's loss (or loss and scalars to record) in a step; None if the step does not have the term."""
        drawn = self.drawn(step.number, len(step.labels))
        if drawn is None:
            return None
        weights = step.weights
        step.weights = None if self.public else weights
        value = self.function(step, **self.constants, **drawn)
        step.weights = weights
        return value


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
        public: whether `examples` are public, so that private training (`dp-noise`) adds no noise in this phase.
        augmented: whether batches of `examples` are augmented; must be False if terms have a target for each example.
        augment: function that augments a raw batch (n, ...) of this phase, instead of the client's. It can return
            several views of each example, (k * n, ...), if `task_weight` is 0; labels and rows remain (n, ...).
        continues: whether the optimiser starts from the state of the previous phase's, which must be of the same kind.
    """

    epochs: int
    optimisation: Optimisation
    steps: int = 0
    module: nn.Module | None = None
    trains: Callable[[str], bool] | None = None
    terms: tuple[Loss, ...] = ()
    task_weight: float = 1.0
    examples: Examples | None = None
    public: bool = False
    augmented: bool = False
    augment: Augment | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.terms, Sequence):
            raise ModelError(f"loss terms must be a tuple, such as (Term(...),), not a {type(self.terms).__name__}")

    @cached_property
    def captures(self) -> dict[str, Capturing]:
        """Values inside the network that the loss terms capture in each step, by name."""
        return {name: value for term in self.terms if isinstance(term, Term) for name, value in term.captures.items()}


@dataclass
class Trained:
    """The result of one or several phases.

    Attributes:
        loss: mean loss of the steps, weighted by batch size, times the number of epochs; summed over phases.
        epochs: number of passes over the examples, a fraction for phases with a number of `steps`.
        recorded: by name, the sum (a scalar tensor) and number of steps of each scalar that loss terms record.
        moments: for each parameter, the state of the last phase's optimiser by PyTorch's names, such as `exp_avg`.
        work: numbers of gradient steps and of forward passes.
    """

    loss: float = 0.0
    epochs: float = 0
    recorded: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    moments: Mapping[Tensor, Mapping[str, Tensor]] = field(default_factory=dict)
    work: Work = field(default_factory=Work)

    @property
    def mean_loss(self) -> float | None:
        """Mean loss over all epochs; None without a training step."""
        return self.loss / self.epochs if self.epochs else None

    @property
    def means(self) -> dict[str, float]:
        """Mean over steps of each scalar that loss terms record, by name."""
        return {name: float(total) / count for name, (total, count) in self.recorded.items()}
