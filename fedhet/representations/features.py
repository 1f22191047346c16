"""Phi, the input of a model's head, of any `nn.Module`; and forward passes that leave no trace in the model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError

ROWS_AT_ONCE = 512


def head_name(model: nn.Module, head: str = "") -> str:
    """The name of a model's head: `head` if given, else the last `nn.Linear` in order of registration.

    Raises:
        ModelError: if the model has no such module; the message says which ones it has.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if head:
        if head not in modules:
            present = ", ".join(name for name in modules if name) or "no submodules"
            raise ModelError(f"{type(model).__name__} has no module {head!r} to take for its head; it has: {present}")
        return head
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    if not linear:
        kinds = sorted({type(module).__name__ for name, module in modules.items() if name})
        raise ModelError(
            f"{type(model).__name__} has no nn.Linear to take for its head, only {', '.join(kinds) or 'itself'}; "
            "name the head in the configuration"
        )
    return linear[-1]


class _HeadReached(Exception):
    """Ends a forward pass at the head, whose input it carries."""

    def __init__(self, features: object) -> None:
        self.features = features


class Captured(Protocol):
    """The values that a forward pass inside a `Capturing.capture` gave."""

    @property
    def features(self) -> Tensor:
        """The value, (n, ...), part of the pass's graph."""


class Capturing(Protocol):
    """An inner value of a model that can be captured while the model runs: Phi, or what a module returns."""

    @property
    def site(self) -> tuple[str, str]:
        """Which value it is; equal for the same value of models that are built alike."""

    def capture(self) -> AbstractContextManager[Captured]:
        """Keeps what forward passes inside give."""


class Output:
    """The output of a module, such as a block's feature maps.

    Args:
        model: any `nn.Module`.
        module: the name of its module.

    Raises:
        ModelError: if the model has no such module; the message says which ones it has.
    """

    def __init__(self, model: nn.Module, module: str) -> None:
        self._module = model.get_submodule(_named(model, module))
        self.site = ("output", module)
        self._value: Tensor | None = None
        self._title = f"{module!r} of {type(model).__name__}"

    @property
    def features(self) -> Tensor:
        """Its last output, part of the graph.

        Raises:
            ModelError: if it has not run, or returned no tensor.
        """
        if not isinstance(self._value, Tensor):
            raise ModelError(f"module {self._title} did not run, or returned no tensor")
        return self._value

    @contextmanager
    def capture(self) -> Iterator["Output"]:
        """Keeps what the module returns inside."""
        handle = self._module.register_forward_hook(self._keep)
        try:
            yield self
        finally:
            handle.remove()

    def _keep(self, _module: nn.Module, _args: object, value: Any) -> None:
        self._value = value


def _named(model: nn.Module, name: str) -> str:
    modules = dict(model.named_modules())
    if name not in modules:
        present = ", ".join(name for name in modules if name) or "no submodules"
        raise ModelError(f"{type(model).__name__} has no module {name!r}; it has: {present}")
    return name


class Capture:
    """The input of the head in a forward pass inside `Representation.capture`."""

    def __init__(self, representation: "Representation") -> None:
        self._representation = representation
        self._input: object = None
        self._rows: int | None = None
        self._reached = False

    @property
    def features(self) -> Tensor:
        """Phi `(n, d)` of the last forward pass, part of its graph.

        Raises:
            ModelError: if no forward pass reached the head, or its input is no `(n, d)` floating tensor.
        """
        if not self._reached:
            raise self._representation.not_reached()
        return self._representation.check(self._input, self._rows)

    def _start(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._reached = False
        self._rows = _rows(_first(args, kwargs))

    def _reach(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._reached:
            self._input, self._reached = _first(args, kwargs), True


class Representation:
    """Phi of a model: what its head is given, `(n, d)` for n examples. Reusable; the model keeps no hook between calls.

    If the head runs more than once in a forward pass, Phi is the input of its first run.

    Args:
        model: any `nn.Module`.
        head: the name of its head; the last `nn.Linear` if empty.

    Raises:
        ModelError: if the model has no such module.
    """

    def __init__(self, model: nn.Module, head: str = "") -> None:
        self.model = model
        self.head = head_name(model, head)
        self.site = ("input", self.head)
        self._module = model.get_submodule(self.head)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Phi `(n, d)` of a batch of n inputs, with its graph; the forward pass ends where the head would start.

        Raises:
            ModelError: if the pass does not reach the head, or the head's input is no `(n, d)` floating tensor.
        """
        handle = self._module.register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            self.model(inputs)
        except _HeadReached as reached:
            return self.check(reached.features, len(inputs))
        finally:
            handle.remove()
        raise self.not_reached()

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Keeps what complete forward passes inside give to the head, so that one pass serves outputs and Phi.

        with representation.capture() as captured:
            outputs = model(inputs)
        captured.features
        """
        captured = Capture(self)
        handles = (
            self.model.register_forward_pre_hook(captured._start, with_kwargs=True),
            self._module.register_forward_pre_hook(captured._reach, with_kwargs=True),
        )
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def check(self, features: object, rows: int | None) -> Tensor:
        """Returns `features` if they are a floating `(n, d)` tensor with as many rows as there are examples.

        Raises:
            ModelError: if they are not.
        """
        if (
            isinstance(features, Tensor)
            and features.is_floating_point()
            and features.ndim == 2
            and (rows is None or len(features) == rows)
        ):
            return features
        got = (
            f"{features.dtype} of shape {tuple(features.shape)}"
            if isinstance(features, Tensor)
            else f"a {type(features).__name__}"
        )
        expected = "(n, d)" if rows is None else f"({rows}, d)"
        raise ModelError(
            f"the input of {self._title} must be a floating tensor of shape {expected}, one row an example, got {got}; "
            "name as head a module whose input is"
        )

    def not_reached(self) -> ModelError:
        """The error of a forward pass in which the head was not called."""
        return ModelError(f"the forward pass did not call {self._title}; name as head a module that it calls")

    @property
    def _title(self) -> str:
        return f"head {self.head or type(self._module).__name__!r} of {type(self.model).__name__}"


@dataclass(frozen=True)
class Reading:
    """Outputs that are a function of Phi.

    Attributes:
        representation: gives Phi.
        then: from Phi (n, d) to outputs (n, ...).
    """

    representation: Representation
    then: Callable[[Tensor], Tensor]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs of a batch of n inputs."""
        return self.then(self.representation(inputs))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return args[0] if args else next(iter(kwargs.values()), None)


def _rows(value: object) -> int | None:
    return len(value) if isinstance(value, Tensor) and value.ndim else None


def _stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _HeadReached(_first(args, kwargs))


class RandomStream:
    """A random stream that takes the place of torch's global generators where it is active, and goes on from there.

    Args:
        seed: where the stream starts, on every device.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[torch.device, Tensor] = {}

    @contextmanager
    def active(self, devices: set[torch.device]) -> Iterator[None]:
        """Inside, the global generators of the CPU and of CUDA `devices` draw from this stream."""
        generators = {device: _generator(device) for device in {torch.device("cpu"), *devices}}
        outside = {device: generator.get_state() for device, generator in generators.items()}
        for device, generator in generators.items():
            if device in self._states:
                generator.set_state(self._states[device])
            else:
                generator.manual_seed(self._seed)
        try:
            yield
        finally:
            for device, generator in generators.items():
                self._states[device] = generator.get_state()
                generator.set_state(outside[device])


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


@contextmanager
def isolated(model: nn.Module, stream: RandomStream) -> Iterator[None]:
    """Forward passes inside change nothing that the task could notice: no buffers, no global random generators.

    Buffers (BatchNorm's statistics and whatever else a module keeps) are replaced by copies and put back afterwards,
    so that graphs built before and inside stay valid; in train mode BatchNorm normalises by the batch as ever.
    Dropout draws from `stream`, which goes on from call to call.

    Args:
        model: the model whose forward passes are to leave no trace.
        stream: the random stream of these passes.
    """
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    devices = {parameter.device for parameter in model.parameters()}
    for current, originals in buffers:
        current.update({name: buffer.clone() for name, buffer in originals.items() if buffer is not None})
    try:
        with stream.active({device for device in devices if device.type == "cuda"}):
            yield
    finally:
        for current, originals in buffers:
            current.update(originals)
