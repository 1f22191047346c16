"""The task of a run: its loss, its metric and the meaning of its outputs, in one object.

Nothing is copied from the device before `Score.metric` is asked for, apart from how many predictions count. That is
what a client sends: numbers with their weights, so that `Metric.total` of several clients cannot be wrong, and no
outputs or labels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.errors import ConfigError, nearest
from fedhet.metric import Metric as Metric
from fedhet.outputs import IGNORED, OUTPUTS, Columns, Outputs, infer

LARGEST = 1e9
"""Numbers beyond this are none that training which has not diverged makes: sums of their squares must be finite."""


@dataclass(frozen=True)
class Score:
    """A metric and a mean loss over `count` predictions; `a + b` is the score of both's examples together.

    Attributes:
        task: gives the metric.
        loss_sum: sum of the loss over the examples, a scalar tensor.
        count: number of predictions (examples, or characters, tokens or pixels where an example has several).
        batches: what the task needs of each batch for its metric.
    """

    task: "Task"
    loss_sum: Tensor
    count: int
    batches: tuple[Columns, ...]

    @property
    def loss(self) -> float:
        """Mean loss; nan without examples."""
        return self.loss_sum.item() / self.count if self.count else math.nan

    @property
    def metric(self) -> Metric:
        """The task's metric over all examples, and its weight among clients."""
        return self.task.outputs.measure(self.count, *zip(*self.batches, strict=True))

    @property
    def value(self) -> float:
        """The metric as one number; nan if it is undefined."""
        return self.metric.value

    @property
    def examples_behind(self) -> list[int] | None:
        """How many examples have a class, for each number of a segmentation's metric; None for other metrics."""
        if self.task.metric != "iou":
            return None
        behind: list[int] = torch.stack([batch[2] for batch in self.batches]).sum(0).tolist()
        return behind

    def __add__(self, other: "Score") -> "Score":
        """The score of both's examples together."""
        batches = self.batches + other.batches
        return Score(self.task, self.loss_sum + other.loss_sum, self.count + other.count, batches)


class Task:
    """The outputs of the networks and the loss by which they are trained, alike for all clients.

        fedhet.run(settings, model=model, data=data, task=fedhet.Task(class_weights=[1, 5]))

    Args:
        name: `classification`, `binary`, `multi-label`, `next-character`, `token-classification`, `segmentation` or
            `regression`; empty: what labels and outputs look like.
        class_weights: of the loss: one weight for each class, as in `torch.nn.CrossEntropyLoss`; of several labels,
            that of the examples that have each (`pos_weight` of `torch.nn.BCEWithLogitsLoss`).
        loss: the loss to train with, in place of the task's own: a function of outputs and labels, or a module without
            parameters, that gives the mean of a batch, a scalar. It is called with outputs and labels as PyTorch's loss
            of the task is: `torch.nn.CrossEntropyLoss` (tokens one after the other), `BCEWithLogitsLoss` of a single
            logit or several labels (floats of the outputs' shape), `MSELoss`. Labels that it leaves out, by an
            `ignore_index` or a `weight` of 0 (attributes, or keywords of a `functools.partial`), do not count in the
            metric.

    Evaluations report the loss that clients train with; a module computes it in evaluation mode there.

    Raises:
        ConfigError: there is no such task, or the weights cannot be.
    """

    def __init__(
        self,
        name: str = "",
        *,
        class_weights: Sequence[float] = (),
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        if name and name not in OUTPUTS:
            raise ConfigError(nearest("task", name, OUTPUTS))
        self.name, self.own_loss, self.ignored = name, loss, _ignored(loss)
        self.class_weights = tuple(float(weight) for weight in class_weights)
        if not all(0 < weight < math.inf for weight in self.class_weights):
            raise ConfigError(f"class_weights must be positive numbers, not {list(self.class_weights)}")
        if loss is not None and not callable(loss):
            raise ConfigError(f"loss must be a function of outputs and labels, not a {type(loss).__name__}")
        if self.class_weights and (loss is not None or name == "regression"):
            why = "a loss of your own has its own weights" if loss is not None else "a regression has no classes"
            raise ConfigError(f"class_weights weigh the classes in the task's own loss, and {why}")

    def __str__(self) -> str:
        weights = [f"class weights {', '.join(f'{weight:g}' for weight in self.class_weights)}"] * bool(
            self.class_weights
        )
        loss = [f"loss {_name(self.own_loss)}"] if self.own_loss is not None else []
        return ", ".join([self.name or "inferred", *weights, *loss])

    @property
    def outputs(self) -> Outputs:
        """The kind of outputs."""
        return OUTPUTS[self.name]

    @property
    def metric(self) -> str:
        """Name of the metric: `accuracy`, `auc`, `iou` or `r2`."""
        return self.outputs.metric

    @property
    def plain(self) -> bool:
        """Whether the loss is the task's own without weights."""
        return self.own_loss is None and not self.class_weights

    def of(self, outputs: Tensor, labels: Tensor) -> "Task":
        """Return the task with its name, inferred from outputs of a few examples and all labels if it has none."""
        if self.name:
            return self
        return Task(infer(outputs, labels), class_weights=self.class_weights, loss=self.own_loss)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch, a scalar that can be differentiated."""
        if self.own_loss is not None:
            if isinstance(self.own_loss, nn.Module):
                self.own_loss.to(outputs.device)
            if bool(self._left_out(labels).all()):
                return 0 * outputs.sum()
            # Copies, which a loss may change in place: labels are the client's, and terms and metrics need outputs.
            return self.own_loss(*self.outputs.pair(outputs.clone(), labels.clone()))
        weights = None
        if self.class_weights:
            weights = torch.tensor(self.class_weights, device=outputs.device, dtype=outputs.dtype)
        return self.outputs.loss(outputs, labels, weights)

    def evaluate(self, outputs: Tensor, labels: Tensor) -> Score:
        """Return the score of a batch; scores add up. With class weights or a user's loss, the loss is their mean."""
        if self.own_loss is None:
            loss, count, columns = self.outputs.evaluate(outputs, labels)
            return Score(self, loss if self.plain else self.loss(outputs, labels) * count, count, (columns,))
        left_out = self._left_out(labels)
        counted = labels.long().masked_fill(left_out, IGNORED) if self.outputs.meaning == "classes" else labels
        _, count, columns = self.outputs.evaluate(outputs, counted)
        if self.outputs.meaning == "classes":
            count = int((~left_out).sum())
        with _evaluating(self.own_loss):
            return Score(self, self.loss(outputs, labels) * count, count, (columns,))

    def _left_out(self, labels: Tensor) -> Tensor:
        """Return which labels the user's loss leaves out; of numbers and of several labels an example none."""
        ignored = self.ignored if self.outputs.meaning == "classes" else ()
        return torch.isin(labels.long(), torch.tensor(ignored, dtype=torch.int64, device=labels.device))

    def problem(self, outputs: Tensor, labels: Tensor) -> str:
        """Why outputs of a few examples and labels of all cannot be of the task, in words; empty if they can."""
        known = labels
        if self.own_loss is not None and (left_out := self._left_out(labels)).any():
            if left_out.all():
                return "its loss leaves out all of its labels"
            if labels.ndim > 1:  # a token or a pixel may have a label that is no class
                known = labels.masked_fill(left_out, 0)
        problem = self.outputs.problem(outputs, known)
        classes = self.outputs.scores(outputs).shape[-1] if not problem else 0
        if self.class_weights and not problem and len(self.class_weights) != classes:
            return f"class_weights are {len(self.class_weights)}, and its network has {classes} classes"
        return problem

    def check_loss(self, outputs: Tensor, labels: Tensor) -> None:
        """Check a user's loss on a few examples; raises a `ConfigError`."""
        if self.own_loss is None:
            return
        name = _name(self.own_loss)
        buffers = dict(self.own_loss.named_buffers()) if isinstance(self.own_loss, nn.Module) else {}
        before = {key: buffer.clone() for key, buffer in buffers.items()}
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            try:
                value: object = self.loss(leaf, labels)
            except Exception as error:  # whatever a user's loss raises, it cannot take these
                shapes = [f"{str(t.dtype)[6:]} of shape {tuple(t.shape)}" for t in self.outputs.pair(outputs, labels)]
                raise ConfigError(
                    f"the task's loss {name} cannot take outputs, {shapes[0]}, and labels, {shapes[1]}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            got = f"a {type(value).__name__}"
            if isinstance(value, Tensor):
                got = f"a tensor of shape {tuple(value.shape)}" if value.ndim else "a number without a gradient"
            raise ConfigError(f"the task's loss {name} returned {got}: it must return a batch's mean, differentiable")
        if any(each is not leaf for each in _trained_by(value)):
            raise ConfigError(
                f"the task's loss {name} has parameters, which no client trains: make them part of the network, or fix "
                "them (requires_grad_(False))"
            )
        if any(not torch.equal(before[key], buffer) for key, buffer in buffers.items()):
            raise ConfigError(
                f"the task's loss {name} changes its buffers when it is called, and clients of one process share it: "
                "compute them from the batch alone"
            )


def _trained_by(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients the backward pass of a loss adds to."""
    nodes, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in nodes:
            nodes.add(node)
            waiting += [each for each, _ in node.next_functions]
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _ignored(loss: object) -> tuple[int, ...]:
    """Return the labels that a user's loss leaves out: those of PyTorch's, its `ignore_index`, classes of weight 0."""
    given, owner = getattr(loss, "keywords", {}), getattr(loss, "__self__", loss)  # of a partial, of a bound method
    index, weight = (given.get(name, getattr(owner, name, None)) for name in ("ignore_index", "weight"))
    unweighted = (weight == 0).nonzero().flatten().tolist() if isinstance(weight, Tensor) and weight.ndim == 1 else []
    return (IGNORED, *([index] if isinstance(index, int) else []), *unweighted)


@contextmanager
def _evaluating(loss: object) -> Iterator[None]:
    """Context in which a loss that is a module is in evaluation mode."""
    modes = [(module, module.training) for module in loss.modules()] if isinstance(loss, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _name(loss: object) -> str:
    return getattr(loss, "__qualname__", type(loss).__name__)


TASKS: dict[str, Task] = {name: Task(name) for name in OUTPUTS}


def get_task(name: str) -> Task:
    """Return the task of a name; raises a `ConfigError` with the known names if there is none."""
    return TASKS[name] if name in TASKS else Task(name)


def as_task(task: str | Task | None) -> Task:
    """A task as a user gives it: by its name, or None to infer it."""
    return task if isinstance(task, Task) else Task(task or "")
