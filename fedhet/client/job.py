"""`Job`, a client with the message that it answers, and `do`, which does the work of several clients together."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedhet.client.client import AnySide, Client
from fedhet.client.policy import Policy
from fedhet.messages import Payload
from fedhet.messages.protocol import Measured
from fedhet.training import Computation, compute_in_batches

T = TypeVar("T")

ClientWork = Generator[Computation, None, T]
"""A client's work as a generator: it yields each training phase and evaluation to compute, and returns its result."""


def do(works: Sequence[ClientWork[T]]) -> list[T | BaseException]:
    """Return the result of each client's work, or the exception that it raised.

    The training phases and evaluations that several clients yield at the same time are computed in batches.
    """
    results: dict[int, T | BaseException] = {}
    while len(results) < len(works):
        computations = []
        for place, work in enumerate(works):
            if place in results:
                continue
            torch.set_grad_enabled(True)
            try:
                computations.append(next(work))
            except StopIteration as end:
                results[place] = end.value
            except (Exception, SystemExit) as error:  # a user's code may raise anything, and call sys.exit
                results[place] = error
        compute_in_batches(computations)
    return [results[place] for place in range(len(works))]


class Loop(Protocol):
    """A user's own training and evaluation of a client's network, which replace fedhet's training loop."""

    def train(self, job: "Job") -> None:
        """Train the network of the job's client."""

    def measure(self, job: "Job", when: str) -> None:
        """Evaluate the client's network; `when` is `received` before training, `trained` after training."""


@dataclass
class Job:
    """A client and the message that it answers.

    Attributes:
        side: the method's client side.
        payload: the arrays and values that the server sent.
        policy: the rules of the client's node.
        build: function that builds the whole network with the initial weights of the client that its argument names,
            or with the common initial weights for `all`.
        redraw: function that loads these initial weights, for the same argument, into the client's network.
        note: a warning about the network for the log; may be empty.
        loop: the user's own training and evaluation; None for fedhet's training loop.
        measured: the client's evaluations so far, by name.
        lost: whether the state that the server expects is missing.
        further: metrics that the user's own train function returned, by name.
        evaluated: metrics that the user's own evaluate function returned, by name.
        scored: the fine-tuned personal model's tensors at the run's last evaluation; empty without fine-tuning.
        examples: number of training examples that the user's own functions report; None to count the client's data.
        test_examples: number of test examples that the user's own functions report; None to count the client's data.
        weight: the client's weight from the user's own train function; 0 if it is the number of training examples.
        remarks: messages about the user's own functions, for the server's log.
        batches: the random generator for the order of examples.
    """

    side: AnySide
    payload: Payload
    policy: Policy
    build: Callable[[str], nn.Module]
    redraw: Callable[[str], None]
    note: str = ""
    loop: Loop | None = None
    measured: dict[str, Measured] = field(default_factory=dict)
    lost: bool = False
    further: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    scored: dict[str, Tensor] = field(default_factory=dict)
    examples: int | None = None
    test_examples: int | None = None
    weight: float = 0.0
    remarks: list[str] = field(default_factory=list)
    batches: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.batches = self.client.generator("batches")

    def say(self, remark: str) -> None:
        """Add a remark for the server's log, once."""
        if remark not in self.remarks:
            self.remarks.append(remark)

    @property
    def client(self) -> Client:
        """The client that answers the message."""
        return self.side.client
