"""Optimisers and learning rate schedules."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


@dataclass(frozen=True)
class Optimisation:
    """The optimiser, batch size and learning rate of a training phase.

    Attributes:
        optimizer: sgd, adam, amsgrad (Adam with the largest second moment so far: Reddi et al., 2018) or adamw.
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
        """Return a copy with the constant learning rate `rate`, or this object if `rate` is 0."""
        return replace(self, learning_rate=rate, schedule=None) if rate else self

    def build(self, parameters: Sequence[Tensor], *, stacked: bool = False) -> torch.optim.Optimizer:
        """Return a new optimiser for parameters, which can be `stacked` over networks along their first axis."""
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
    """Return the learning rate of a schedule after the fraction `done` of the run.

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
    """Return a subclass of a torch optimiser with the same computation, but without torch's compiler and profiler.

    Importing the compiler takes seconds, and profiling takes a third of the time of a small network's step.
    """
    step = torch.no_grad()(_bare(kind.step))
    vars(step)["hooked"] = True  # torch takes its hooks to be there
    return type(kind.__name__, (kind,), {"add_param_group": _bare(kind.add_param_group), "step": step})


def _bare(method: Callable[..., Any]) -> Callable[..., Any]:

    def others(function: Callable[..., Any]) -> bool:
        module = getattr(function, "__globals__", {}).get("__name__", "")  # a wrapper's `__module__` is what it wraps
        return not module.startswith("torch.")

    return inspect.unwrap(method, stop=others)
