"""Forward and backward passes of a client's work: run at once, or with those of the clients that it is batched with."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from fedhet.representations import Capturing, RandomStream, Representation, isolated

T = TypeVar("T")

Passed = tuple[Tensor, Mapping[str, Tensor]]
"""Outputs of a forward pass, and captured values by name."""


@dataclass(slots=True, eq=False)  # frozen ones take four times as long to make, and there is one for every step
class Forward:
    """A forward pass of a batch through a network, in the mode in which the network is.

    Attributes:
        model: the network.
        inputs: (n, ...) prepared.
        captures: inner values that are wanted as well, by name.
        until: the pass ends at the head, and its outputs are Phi (n, d).
        learns: whether a graph is wanted.
        stream: where the pass must leave no trace in the network: what dropout draws from.
        bf16: whether it is computed in bfloat16 where torch holds that to be safe; its results are float32.
    """

    model: nn.Module
    inputs: Tensor
    captures: Mapping[str, Capturing] = field(default_factory=dict)
    until: Representation | None = None
    learns: bool = True
    stream: RandomStream | None = None
    bf16: bool = False

    def run(self) -> Passed:
        """Return the outputs and captured values."""
        passed: Passed | None = _by_the_loop(self)
        if passed is not None:
            return passed
        with isolated(self.model, self.stream) if self.stream else nullcontext():
            if self.learns:
                return self.compute(self.inputs)
            with torch.no_grad():
                return self.compute(self.inputs)

    def compute(self, inputs: Tensor) -> Passed:
        """Compute the pass of any inputs, here and with a graph where torch is set so."""
        if not (self.captures or self.bf16):
            return (self.until or self.model)(inputs), {}
        with ExitStack() as stack:
            if self.bf16:
                stack.enter_context(torch.autocast(inputs.device.type, torch.bfloat16))
            captures = {name: stack.enter_context(site.capture()) for name, site in self.captures.items()}
            outputs = self.until(inputs) if self.until else self.model(inputs)
        captured = {name: capture.features for name, capture in captures.items()}
        if not self.bf16:
            return outputs, captured
        return outputs.float(), {name: value.float() for name, value in captured.items()}


@dataclass(slots=True, eq=False)
class Backward:
    """Gradients of a loss, a scalar, for the parameters that require them."""

    loss: Tensor

    def run(self) -> None:
        """Compute the gradients."""
        if _by_the_loop(self) is None:
            self.loss.backward()


class BatchedClient(greenlet):
    """One client's work, which waits at each pass for the loop that batches clients.

    While it works, the random generators of the CPU and of `gpus` are its own.

    Attributes:
        waits_for: the pass at which it waits; None once the work is done.
        stream: its state of torch's global generators.
        outcome: what the function returned or raised, once the work is done.
        graph: the clients that share a graph with its next loss, itself among them.
    """

    waits_for: Forward | Backward | None
    outcome: Any

    def __init__(self, function: Callable[[], object], gpus: set[torch.device]) -> None:
        super().__init__()
        self.gr_context = copy_context()
        self.stream, self._function, self._gpus = RandomStream(0), function, gpus
        self.graph = [self]

    def run(self) -> None:
        """Do the work; called by the first `resume`."""
        self.outcome = outcome(self._function)

    def resume(self, *answer: object) -> None:
        """Work until the next pass; `answer` is that of the last one, or None to have the client run it by itself."""
        with self.stream.active(self._gpus):
            self.waits_for = self.switch(*answer)

    def fail(self, error: Exception) -> None:
        """Raise an error at the pass at which it waits, and work on."""
        with self.stream.active(self._gpus):
            self.waits_for = self.throw(error)


def outcome(function: Callable[[], T]) -> T | Exception:
    """Return the result of one client's work, or its exception, which ends only this work."""
    try:
        return function()
    except Exception as error:
        return error
    except SystemExit as error:  # of a user's code
        return RuntimeError(f"SystemExit: {error}")


def _by_the_loop(asked: Forward | Backward) -> Any:
    """Wait for the loop that batches clients; None if the pass is to be run here.

    So it is without a loop, and inside a mode that torch holds for all clients of a thread (`no_grad`, `autocast`).
    """
    client = getcurrent()
    if not isinstance(client, BatchedClient) or not torch.is_grad_enabled() or _autocast():
        return None
    assert client.parent is not None
    return client.parent.switch(asked)


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
