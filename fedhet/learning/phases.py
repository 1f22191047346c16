"""Phases of training, how parameters are stepped, and loss terms: the arguments of the training loop.

Every method's local training is a list of `Phase`s: FedAvg is one, FedRep trains the head, then the body. A method's
regulariser is a loss term: a function of the current `Step` that returns a scalar to add to the task's loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedhet.data import Examples
from fedhet.learning.batching import Forward
from fedhet.learning.optimizers import eager
from fedhet.representations import Capturing, RandomStream, Representation


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
        bf16: whether forward passes are computed in bfloat16.
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
    bf16: bool = False
    further: int = 0

    def represent(self, inputs: Tensor, representation: Representation, stream: RandomStream) -> Tensor:
        """Return Phi (m, d) of a further batch, part of the graph; no trace in buffers or the task's randomness.

        Args:
            inputs: (m, ...) prepared.
            representation: gives Phi of the model.
            stream: what dropout draws from.
        """
        self.further += len(inputs)
        return Forward(self.model, inputs, until=representation, stream=stream, bf16=self.bf16).run()[0]


Loss = Callable[[Step], Tensor | tuple[Tensor, Mapping[str, Tensor]] | None]
"""A scalar to add to the task's loss, and scalars to record if there are any; None in a step that it leaves out. An
example that does not count has weight 0."""


@dataclass(frozen=True)
class Optimisation:
    """How parameters are stepped.

    Attributes:
        optimizer: sgd, adam or adamw.
        learning_rate: constant over the phase, unless there is a schedule.
        momentum: of SGD.
        weight_decay: on matrices and filters, not on biases and normalisation.
        batch_size: examples in a mini-batch.
        schedule: from how much of the phase is done, 0 to 1, to the learning rate of a step.
        bf16: whether forward passes are computed in bfloat16 (and so their gradients); weights and losses are float32.
    """

    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 32
    schedule: Callable[[float], float] | None = None
    bf16: bool = False

    def at(self, rate: float) -> "Optimisation":
        """The same at a constant learning rate; 0: at its own."""
        return replace(self, learning_rate=rate, schedule=None) if rate else self

    def build(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser."""
        groups: list[dict[str, object]] = [{"params": parameters}]
        if self.weight_decay:
            groups = [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
                {"params": [p for p in parameters if p.ndim <= 1]},
            ]
        if self.optimizer == "sgd":
            return eager(torch.optim.SGD)(groups, lr=self.learning_rate, momentum=self.momentum, fused=True)
        kind = eager({"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[self.optimizer])
        return kind(groups, lr=self.learning_rate, weight_decay=0.0, fused=True)


@dataclass(frozen=True)
class Phase:
    """One stretch of local training.

    Attributes:
        epochs: passes over the examples.
        optimisation: how parameters are stepped.
        steps: mini-batches, instead of whole epochs.
        module: what is trained, if not the client's network: one that writes it, or that stands beside it.
        trains: which parameters are trained, by their names; the others, and the statistics of modules that have
            only frozen parameters, do not change. A parameter that does not require gradients is never trained.
        terms: added to the task's loss.
        task_weight: weight of the task's own loss; with 0 it is not taken, and labels may be whatever the terms need.
        captures: inner values of every batch that the terms see, by name.
        examples: what is trained on, if not the client's training part.
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
    continues: bool = False
    measured: str = ""


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


def one_cycle(learning_rate: float, done: float, *, peak: float = 0.3, first: float = 25, last: float = 100) -> float:
    """The learning rate when a part of the run is done: up by a cosine, then down (Smith and Topin, 2018).

    Args:
        learning_rate: at the peak.
        done: 0 to 1.
        peak: where the peak is.
        first: the rate starts at `learning_rate / first`,
        last: and ends at `learning_rate / last`.
    """
    done = min(max(done, 0.0), 1.0)
    start, end = (learning_rate / first, learning_rate) if done < peak else (learning_rate, learning_rate / last)
    place = done / peak if done < peak else (done - peak) / (1 - peak)
    return end + (start - end) * (1 + math.cos(math.pi * place)) / 2
