"""The task of a run: its loss, its metric and the meaning of its outputs."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.errors import ConfigError, DataError, check_kinds, nearest, shown
from fedhet.models.copies import in_evaluation_mode
from fedhet.tasks.metrics import IGNORED, Columns
from fedhet.tasks.outputs import MEASURES, OUTPUTS, Outputs, zeros_and_ones
from fedhet.utils.randomness import seeded
from fedhet.utils.statistics import Metric


def infer(outputs: Tensor, labels: Tensor) -> str:
    """Infer the name of the task from outputs of a few examples and all labels.

    One output per example and labels of 0 and 1 mean `binary`; several labels of 0 and 1 with as many outputs mean
    `multi-label`. Tasks with a class for each token or pixel are recognised by the axes. Otherwise, float labels mean
    `regression` and integers `classification`. Raises a DataError if float labels may be classes or probabilities.
    """
    binary = zeros_and_ones(labels)
    one_each = labels.numel() == len(labels)
    if binary and one_each and len(outputs) and outputs[0].numel() == 1:
        return "binary"
    if binary and labels.ndim == 2 and not one_each and outputs.shape[1:] == labels.shape[1:]:
        return "multi-label"
    whole = binary or not labels.is_floating_point()
    if whole and labels.ndim > 1 and outputs.ndim == labels.ndim + 1:
        if outputs.ndim == 3 and outputs.shape[1] == labels.shape[1]:
            return "token-classification"
        if outputs.shape[2:] == labels.shape[1:]:
            return "segmentation"
    if not labels.is_floating_point():
        return "classification"
    if labels.ndim > 1 and outputs.shape[1:] == labels.shape[1:] and bool((labels >= 0).all()):
        sums = [labels.sum(axis) for axis in (1, -1) if labels.shape[axis] > 1]  # over classes of pixels, or of others
        if any(bool(((total - 1).abs() < 1e-3).all()) for total in sums):
            raise DataError(
                "its labels can be soft labels (probabilities of classes), as their entries sum to 1 and each has an "
                "output: give class numbers, such as labels.argmax(1), or set task = regression to predict numbers"
            )
    values = labels[labels != IGNORED].unique()
    if len(values) == 2 and labels.numel() > 2:
        low, high = values.tolist()
        raise DataError(
            f"its labels have only the values {low:g} and {high:g}: give the integers 0 and 1 if they are classes "
            "(smoothing is for the loss, fedhet.Task(loss=...)), or set task = regression to predict numbers"
        )
    return "regression"


@dataclass(frozen=True)
class Score:
    """Loss and metrics of `count` predictions; the sum of two scores is the score of all their predictions.

    An example has a prediction for each of its characters, tokens or pixels; `weight` is their weight in the mean loss.
    `batches` has the values of each batch that each metric needs, by its name. They stay on the device until `loss` or
    `metrics` are read.
    """

    task: "Task"
    loss_sum: Tensor
    weight: float
    count: int
    batches: tuple[Mapping[str, Columns], ...]

    @property
    def loss(self) -> float:
        """Mean loss, or nan if there are no predictions."""
        if self.task.outputs.joint and self.task.own_loss is None:
            # The metric's tensors are the outputs and labels of all batches.
            outputs, labels = map(torch.cat, zip(*(batch[self.task.metric] for batch in self.batches), strict=True))
            return self.task.outputs.loss(outputs, labels).item()
        return self.loss_sum.item() / self.weight if self.weight else math.nan

    @property
    def metrics(self) -> dict[str, Metric]:
        """The task's metrics by name, each with one or more values, such as the IoU of each class (see `Metric`)."""
        measures = self.task.outputs.metrics
        columns = {name: zip(*(batch[name] for batch in self.batches), strict=True) for name in self.task.metrics}
        return {name: measures[name].combine(self.count, *columns[name]) for name in self.task.metrics}

    @property
    def value(self) -> float:
        """The task's first metric as one number; nan if it is undefined."""
        return self.metrics[self.task.metric].value

    def __add__(self, other: "Score") -> "Score":
        batches = self.batches + other.batches
        loss_sum, weight = self.loss_sum + other.loss_sum, self.weight + other.weight
        return Score(self.task, loss_sum, weight, self.count + other.count, batches)


class Task:
    """The task of all clients: what their networks' outputs mean, and the training loss.

        fedhet.run(settings, model=model, data=data, task=fedhet.Task(class_weights=[1, 5]))

    Evaluations report this loss; if it is a module, in evaluation mode. Raises a ConfigError for unusable arguments.

    Args:
        name: `classification`, `binary`, `multi-label`, `next-character`, `token-classification`, `segmentation`,
            `regression` or `survival`; by default it is inferred from labels and outputs, except for `survival`.
        class_weights: weight of each class in the loss, as in `torch.nn.CrossEntropyLoss`; for `multi-label` the weight
            of positive labels, as `pos_weight` of `torch.nn.BCEWithLogitsLoss`.
        loss: replaces the task's loss: a function of outputs and labels, or a module without parameters, that returns
            the mean over a batch. It receives outputs and labels in the form of PyTorch's loss for the task:
            `CrossEntropyLoss` (tokens flattened), `BCEWithLogitsLoss` (labels as floats of the outputs' shape) or
            `MSELoss`. Labels that it ignores by an `ignore_index` or a `weight` of 0 (attributes, or keywords of a
            `functools.partial`) are ignored in the metric, too. Losses of batches are joined by the class weights of
            `CrossEntropyLoss` and `NLLLoss`, and otherwise by numbers of predictions.
    """

    def __init__(
        self,
        name: str = "",
        *,
        class_weights: Sequence[float] = (),
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        check_kinds(task=(name, (str,)))
        if name and name not in OUTPUTS:
            raise ConfigError(nearest("task", name, OUTPUTS))
        self.name, self.own_loss = name, loss
        self._metrics: tuple[str, ...] = ()
        self.ignored, self.weights = _ignored(loss)
        try:
            self.class_weights: tuple[float, ...] = tuple(np.asarray(class_weights, float).tolist())
            usable = all(0 < weight < math.inf for weight in self.class_weights)
        except (TypeError, ValueError, RuntimeError):
            usable = False
        if not usable:
            raise ConfigError(f"class_weights must be a list of positive numbers, not {shown(class_weights)}")
        if self.class_weights:
            self.weights = torch.tensor(self.class_weights, dtype=torch.float64)
        if loss is not None and not callable(loss):
            raise ConfigError(f"loss must be a function of outputs and labels, not a {type(loss).__name__}")
        if self.class_weights and (loss is not None or name in ("regression", "survival")):
            reason = "a loss of your own has its own weights" if loss is not None else f"a {name} has no classes"
            raise ConfigError(f"class_weights cannot be used, since {reason}: leave them out")

    def __str__(self) -> str:
        parts = [self.name or "inferred"]
        if self.class_weights:
            parts.append(f"class weights {', '.join(f'{weight:g}' for weight in self.class_weights)}")
        if self.own_loss is not None:
            parts.append(f"loss {_name(self.own_loss)}")
        return ", ".join(parts)

    @property
    def outputs(self) -> Outputs:
        """The kind of outputs, which the task's name determines."""
        return OUTPUTS[self.name]

    @property
    def metric(self) -> str:
        """Name of the metric that counts: the chosen one, or the task's default, such as `accuracy`."""
        return self.metrics[0]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics to compute, first the one that counts."""
        return self._metrics or (next(iter(self.outputs.metrics)),)

    @property
    def by_number(self) -> bool:
        """Whether the loss or a metric may depend on the numbers of classes, or of columns of labels."""
        measures = [self.outputs.metrics[name] for name in self.metrics]
        return not self.plain or any(measure.by_class or measure.table for measure in measures)

    def counts_classes(self, metric: str) -> bool:
        """Return whether the weights of a metric are numbers of examples, tokens or pixels by class."""
        kind = self.outputs
        return kind.metrics[metric].table and kind.meaning == "classes"

    def measuring(self, metric: str, further: Sequence[str]) -> "Task":
        """Return the task with the key `metric` ("" for the default) and the metrics in the key `metrics` (`further`).

        Raises a ConfigError if a metric is unknown or, unless the task is yet to be inferred, is not one of the task.
        """
        for name in filter(None, (metric, *further)):
            if name not in MEASURES:
                raise ConfigError(nearest("metric", name, MEASURES))
            if self.name and name not in self.outputs.metrics:
                possible = ", ".join(self.outputs.metrics)
                if self.name == "classification" and name in OUTPUTS["binary"].metrics:
                    possible += ', or, for two classes, set task="binary" (networks have one output)'
                raise ConfigError(f"{name} is no metric of the task {self.name}: choose among {possible}")
        if not self.name or not (metric or further):
            return self
        task = copy(self)
        task._metrics = tuple(dict.fromkeys((metric or self.metric, *further)))
        return task

    @property
    def plain(self) -> bool:
        """Whether the user has given neither a loss nor class weights."""
        return self.own_loss is None and not self.class_weights

    def targets(self, labels: Tensor) -> Tensor | None:
        """Return labels if they may be numbers with a unit; None for times of a survival task, whose order counts."""
        return None if self.name and self.outputs.joint else labels

    def of(self, outputs: Tensor, labels: Tensor) -> "Task":
        """Return the task; if it has no name, infer it from outputs of a few examples and all labels."""
        if self.name:
            return self
        return Task(infer(outputs, labels), class_weights=self.class_weights, loss=self.own_loss)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch, a differentiable scalar."""
        if self.own_loss is not None:
            _module(self.own_loss).to(outputs.device)
            if bool(self.left_out(labels).all()):
                return 0 * outputs.sum()
            # Copies, because a user's loss can change its arguments in place.
            return self.own_loss(*self.outputs.pair(outputs.clone(), labels.clone()))
        weights = None if self.weights is None else self.weights.to(outputs)
        return self.outputs.loss(outputs, labels, weights)

    def weight(self, labels: Tensor) -> float | None:
        """Return the weight of a batch in the mean loss of several; None if it is their number of predictions."""
        if self.outputs.meaning != "classes" or (self.plain and type(self.outputs).loss is Outputs.loss):
            return None
        counted = labels[~self.left_out(labels)].long()
        return len(counted) if self.weights is None else float(self.weights.to(labels.device)[counted].sum())

    def evaluate(self, outputs: Tensor, labels: Tensor) -> Score:
        """Return the score of a batch of outputs and labels."""
        if outputs.dtype in (torch.float16, torch.bfloat16):  # too few digits for sums
            outputs = outputs.float()
        counted = labels
        if self.own_loss is not None and self.outputs.meaning == "classes":
            counted = labels.long().masked_fill(self.left_out(labels), IGNORED)
        loss, count = self.outputs.evaluate(outputs, counted)
        if counted is not labels:
            count = int((counted != IGNORED).sum())
        columns = self.outputs.collect(self.metrics, outputs, counted)
        weight = self.weight(labels) or count
        if not self.plain:
            with in_evaluation_mode(_module(self.own_loss)):
                loss = self.loss(outputs, labels) * weight
        return Score(self, loss, weight, count, (columns,))

    def counted(self, labels: Tensor) -> Tensor:
        """Return the indices (m,) of the examples of which a label counts in loss and metrics, on the CPU."""
        return torch.nonzero(~self.left_out(labels)[:, None].flatten(1).all(1))[:, 0].cpu()

    def behind(self, labels: Tensor) -> int:
        """Return how many examples have a term of the loss; of a survival task, those with an event."""
        counted = self.counted(labels)
        return int(self.outputs.counting(labels[counted]).sum()) if self.outputs.joint else len(counted)

    def left_out(self, labels: Tensor) -> Tensor:
        """Return where labels do not count in loss and metrics, as booleans of the labels' shape."""
        ignored = self.ignored if self.outputs.meaning == "classes" else ()
        return torch.isin(labels.long(), torch.tensor(ignored, dtype=torch.int64, device=labels.device))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """Return a message if outputs (of a few examples) or labels do not fit the task, else an empty string."""
        labelled = labels
        if self.own_loss is not None and (left_out := self.left_out(labels)).any():
            if left_out.all():
                return "its loss ignores all of its labels"
            if labels.ndim > 1:  # an ignored label of a token or pixel need not be a class
                labelled = labels.masked_fill(left_out, 0)
        problem = self.outputs.problem(outputs, labelled)
        classes = self.outputs.scores(outputs).shape[-1] if not problem else 0
        if self.class_weights and not problem and len(self.class_weights) != classes:
            return f"class_weights has {len(self.class_weights)} weights, but its network has {classes} classes"
        return problem

    def check_loss(self, outputs: Tensor, labels: Tensor) -> str:
        """Check that a user's loss returns a finite, differentiable mean; raise a ConfigError otherwise.

        `outputs` are of the first few examples. Return a warning if losses of batches cannot be joined, or "".
        """
        if self.own_loss is None:
            return ""
        # Sorted labels, so that batches have different classes.
        spread = (labels.sort().values if labels.ndim == 1 else labels)[:: -(-len(labels) // len(outputs))]
        labels = labels[: len(outputs)]
        name, module = _name(self.own_loss), _module(self.own_loss)
        before = [buffer.clone() for buffer in module.buffers()]
        leaf = outputs.detach().requires_grad_()
        try:
            with torch.enable_grad(), seeded(0, "loss"):
                value: object = self.loss(leaf, labels)
        except Exception as error:  # whatever a user's loss raises
            shapes = [f"{str(t.dtype)[6:]} of shape {tuple(t.shape)}" for t in self.outputs.pair(outputs, labels)]
            raise ConfigError(
                f"the task's loss {name} fails for outputs ({shapes[0]}) and labels ({shapes[1]}) with "
                f"{type(error).__name__}: {error}; use a loss that accepts them, or another task"
            ) from error
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            got = f"a {type(value).__name__}"
            if isinstance(value, Tensor):
                got = f"a tensor of shape {tuple(value.shape)}" if value.ndim else "a number without a gradient"
            raise ConfigError(f"the task's loss {name} returned {got}: return a differentiable mean over a batch")
        if not value.isfinite():
            raise ConfigError(f"the task's loss {name} returned {value.item()} before any training: make it finite")
        with torch.no_grad():
            with seeded(0, "loss"):
                again = self.loss(leaf, labels)
            twice = self.loss(torch.cat([leaf, leaf]), torch.cat([labels, labels])).item()
        if math.isclose(twice, 2 * value.item(), rel_tol=1e-4) and abs(value.item()) > 1e-6:
            raise ConfigError(f"the task's loss {name} returned a sum over a batch: return the mean (reduction='mean')")
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(f"the task's loss {name} has untrained parameters: freeze them (requires_grad_(False))")
        if not (torch.equal(value, again) and all(map(torch.equal, before, module.buffers()))):
            raise ConfigError(f"the task's loss {name} keeps state, which clients would share: use its arguments only")
        with torch.no_grad(), seeded(0, "loss"):
            outputs = outputs[: len(spread)]
            parts = [self.evaluate(*part) for part in zip(outputs.chunk(2), spread.chunk(2), strict=True)]
            whole = self.evaluate(outputs, spread)
        if np.isclose(whole.loss, reduce(operator.add, parts).loss, rtol=1e-4, equal_nan=True):
            return ""
        return (
            f"the task's loss {name} of a batch is not the mean of its examples' losses, so reported losses depend on "
            "the division into batches: compare runs by the metric, or use a loss that averages over examples"
        )


def _ignored(loss: object) -> tuple[tuple[int, ...], Tensor | None]:
    """Return labels that a user's loss ignores (-100, `ignore_index`, weight 0), and class weights of its mean."""
    given, owner = getattr(loss, "keywords", {}), getattr(loss, "__self__", loss)  # a partial, a bound method
    index, weight = (given.get(name, getattr(owner, name, None)) for name in ("ignore_index", "weight"))
    unweighted = (weight == 0).nonzero().flatten().tolist() if isinstance(weight, Tensor) and weight.ndim == 1 else []
    weighs = isinstance(owner, nn.CrossEntropyLoss | nn.NLLLoss)
    weighs = weighs or getattr(loss, "func", None) in (F.cross_entropy, F.nll_loss)
    return (IGNORED, *([index] if isinstance(index, int) else []), *unweighted), weight if weighs else None


def _module(loss: object) -> nn.Module:
    return loss if isinstance(loss, nn.Module) else nn.Module()


def _name(loss: object) -> str:
    return getattr(loss, "__qualname__", type(loss).__name__)


def as_task(task: str | Task | None) -> Task:
    """Convert a Task, the name of a task, or None (to infer it from the data) to a Task."""
    return task if isinstance(task, Task) else Task("" if task is None else task)
