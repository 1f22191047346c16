"""Backends compute the trainings and evaluations of several clients: here one by one, in `vectorised.py` as a batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar

import torch

from fedhet.training.evaluation import Evaluation
from fedhet.training.phases import Trained
from fedhet.training.training import Training
from fedhet.utils.statistics import Metric

P = ParamSpec("P")
R = TypeVar("R")


class Scored(Protocol):
    """The result of an evaluation, such as a `fedhet.tasks.Score`."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The metrics by name, first the one that counts, each with one or more values."""

    @property
    def loss(self) -> float:
        """The mean loss."""


class Backend(Protocol):
    """A way to compute trainings and evaluations of several clients.

    Results are in the order of the arguments. The result of a computation that fails is its exception, and the others
    are not disturbed.
    """

    def train(self, trainings: Sequence[Training]) -> Sequence[Trained | BaseException]:
        """Train networks in place, and return the combined result of each training and the phases before it."""

    def evaluate(self, evaluations: Sequence[Evaluation]) -> Sequence[Scored | BaseException | None]:
        """Evaluate networks, and return a score for each evaluation; None if there is nothing to score."""


class OneByOne:
    """The backend that computes each training and each evaluation by itself."""

    def train(self, trainings: Sequence[Training]) -> list[Trained | BaseException]:
        """Train networks one by one (see `Backend.train`)."""
        return [attempt(training.result) for training in trainings]

    def evaluate(self, evaluations: Sequence[Evaluation]) -> list[Scored | BaseException | None]:
        """Evaluate networks one by one (see `Backend.evaluate`)."""
        return [attempt(evaluation.result) for evaluation in evaluations]


def attempt(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | BaseException:
    """Return a function's result, or the exception that it raises; PyTorch computes gradients again from its start."""
    torch.set_grad_enabled(True)
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:  # a user's code may raise anything, and call sys.exit
        return error
