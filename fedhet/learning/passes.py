"""What a client's work asks for: forward and backward passes, which are run alone or with those of other clients.

Training and evaluation are generators that yield each pass and go on with what it gave. `alone` runs them for one
client, pass by pass; `fedhet.learning.cohort` runs those of several clients side by side. So there is one training
loop, and it does not know which.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fedhet.representations import Capturing, RandomStream, Representation, isolated

P = ParamSpec("P")
T = TypeVar("T")
Passed = tuple[Tensor, Mapping[str, Tensor]]
"""What a forward pass gave: outputs, and captured values by name."""


@dataclass(slots=True, eq=False)  # frozen ones take four times as long to make, and there is one for every step
class Forward:
    """A forward pass of a batch through a network, in the mode in which the network is.

    Attributes:
        model: the network.
        inputs: (n, ...) prepared.
        captures: inner values that are wanted as well, by name.
        until: the pass ends at the head, and its outputs are Phi (n, d).
        learns: whether a graph is wanted.
        updates: whether buffers change in a pass without a graph, which are used in others afterwards.
        stream: where the pass must leave no trace in the network: what dropout draws from.
        bf16: whether it is computed in bfloat16 where torch holds that to be safe; what it gives is float32.
    """

    model: nn.Module
    inputs: Tensor
    captures: Mapping[str, Capturing] = field(default_factory=dict)
    until: Representation | None = None
    learns: bool = True
    updates: bool = False
    stream: RandomStream | None = None
    bf16: bool = False

    def run(self) -> Passed:
        """Run it by itself."""
        traceless = isolated(self.model, self.stream) if self.stream else nullcontext()
        graphless = torch.no_grad() if self.updates else torch.inference_mode()
        with traceless, nullcontext() if self.learns else graphless:
            return self.compute(self.inputs)

    def compute(self, inputs: Tensor) -> Passed:
        """What the pass computes, of any inputs."""
        if not self.bf16:
            return self._compute(inputs)
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs, captured = self._compute(inputs)
        return outputs.float(), {name: value.float() for name, value in captured.items()}

    def _compute(self, inputs: Tensor) -> Passed:
        if self.until:
            return self.until(inputs), {}
        if not self.captures:
            return self.model(inputs), {}
        with ExitStack() as stack:
            captures = {name: stack.enter_context(site.capture()) for name, site in self.captures.items()}
            outputs = self.model(inputs)
        return outputs, {name: capture.features for name, capture in captures.items()}


@dataclass(slots=True, eq=False)
class Backward:
    """Gradients of a loss, a scalar, for the parameters that require them."""

    loss: Tensor

    def run(self) -> None:
        """Run it by itself."""
        self.loss.backward()


Pausing = Generator[Forward | Backward, Any, T]
"""Work that pauses at every pass, goes on with what it gave, and returns a T."""


def alone(work: Pausing[T]) -> T:
    """Do one client's work, each pass as it comes."""
    answer: object = None
    failed: Exception | None = None
    while True:
        try:
            asked = work.throw(failed) if failed else work.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        answer, failed = None, None
        try:
            answer = asked.run()
        except Exception as error:  # it is raised where the work paused
            failed = error


def at_once(work: Callable[P, Pausing[T]]) -> Callable[P, T]:
    """The same work as a function that returns its result: one client's, each pass as it comes."""

    @wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        return alone(work(*args, **kwargs))

    return done
