"""The representation of a network, which is the input of its head, and other values inside networks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError

ROWS_AT_ONCE = 512
"""Number of examples in a forward pass without training."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def head_name(model: nn.Module, head: str = "") -> str:
    """Return the name of a model's head: `head` if given, else its last `nn.Linear`, else its last convolution.

    Raises a ModelError if the model has no such module.
    """
    if head:
        _submodule(model, head, " that could be its head")
        return head
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for kinds in (nn.Linear, _CONVOLUTIONS):
        names = [name for name, module in modules.items() if isinstance(module, kinds)]
        if names:
            return names[-1]
    present = sorted({type(module).__name__ for name, module in modules.items() if name})
    raise ModelError(
        f"{model._get_name()} has no nn.Linear or convolution that could be its head, only "
        f"{', '.join(present) or 'itself'}: set head to the name of a module"
    )


def _submodule(model: nn.Module, name: str, purpose: str = "") -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name not in modules:
        present = ", ".join(name for name in modules if name) or "no submodules"
        raise ModelError(f"{model._get_name()} has no module {name!r}{purpose}; it has: {present}")
    return modules[name]


class Captured:
    """A value that a `capture` context records in the forward passes of a network."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    @property
    def features(self) -> Tensor:
        """The value (n, ...) of the last forward pass, differentiable; raises a ModelError if it was not computed."""
        return self._read()


class Output:
    """The output of a module inside a network; raises a ModelError if the network has no module with this name.

    `site` identifies the captured value, and is equal for networks of one architecture.
    """

    def __init__(self, model: nn.Module, module: str) -> None:
        self.site = ("output", module)
        self._module = _submodule(model, module)
        self._title = f"{module!r} of {model._get_name()}"

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Return a context that captures the module's output in forward passes of the whole network."""
        values: list[object] = []

        def read() -> Tensor:
            if values and isinstance(value := values[-1], Tensor):
                return value
            raise ModelError(
                f"module {self._title} did not run, or did not return a tensor: name a module that returns a tensor"
            )

        with self._module.register_forward_hook(lambda _module, _args, value: values.append(value)):
            yield Captured(read)


class _HeadReached(Exception):
    """Raised with the head's input to end a forward pass at the head."""


class Representation:
    """The representation of a network: the first input of its head, `(n, d)` for n examples.

    If `places` is `tokens`, the representation is `(n, tokens, d)`; if it is `pixels`, it is averaged over pixels. By
    default the head is found by `head_name` when it is needed.
    """

    def __init__(self, model: nn.Module, head: str = "") -> None:
        self.model = model
        self.places: Literal["one", "tokens", "pixels"] = "one"
        self._named = head and head_name(model, head)

    @cached_property
    def head(self) -> str:
        """Name of the head; raises a ModelError if no head is named and none is found."""
        return head_name(self.model, self._named)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the network's arrays, in the order of its state dict."""
        return tuple(self.model.state_dict())

    @cached_property
    def precision(self) -> torch.dtype | None:
        """Floating dtype of the network's parameters, or None without parameters."""
        return precision(self.model)

    @property
    def site(self) -> tuple[str, ...]:
        """Identifier of the captured value, which is equal for networks of one architecture."""
        return "input", self.head, self.places

    @property
    def _module(self) -> nn.Module:
        return self.model.get_submodule(self.head)

    @contextmanager
    def head_output(self) -> Iterator["Captured | None"]:
        """Return a context that captures the head's output in forward passes; it yields None if there is no head."""
        try:
            output = Output(self.model, self.head)
        except ModelError:
            yield None
            return
        with output.capture() as captured:
            yield captured

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the representation `(n, d)` of n inputs, differentiably; the forward pass ends before the head.

        Raises a ModelError if the head is not reached, or its input is not a floating `(n, d)` tensor.
        """
        values: tuple[object, ...] = ()
        with self._module.register_forward_pre_hook(_stop, with_kwargs=True):
            try:
                self.model(inputs)
            except _HeadReached as reached:
                values = reached.args
        return self._check(values, inputs)

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Return a context that captures the head's input in forward passes of the whole network."""
        seen: list[object] = []  # the model's input, then the head's

        def start(_module: nn.Module, *args: Any) -> None:
            seen[:] = [_first(*args)]

        def add(_module: nn.Module, *args: Any) -> None:
            seen.append(_first(*args))

        with (
            self.model.register_forward_pre_hook(start, with_kwargs=True),
            self._module.register_forward_pre_hook(add, with_kwargs=True),
        ):
            yield Captured(lambda: self._check(seen[1:], *seen[:1]))

    def _check(self, values: Sequence[object], inputs: object = None) -> Tensor:
        """Return the head's first input in a forward pass of `inputs`, after a check of its shape."""
        title = f"head {self.head or type(self._module).__name__!r} of {self.model._get_name()}"
        if not values:
            raise ModelError(f"the forward pass did not call {title}; set head to a module that it calls")
        value, rows = values[0], len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else None
        if isinstance(value, Tensor):
            if self.places == "pixels" and value.ndim > 2:
                value = value.flatten(2).mean(2)
            fits = value.ndim == 2 or (value.ndim == 3 and self.places == "tokens")
            if value.is_floating_point() and fits and rows in (None, len(value)):
                return value
            got = f"{value.dtype} of shape {tuple(value.shape)}"
        else:
            got = f"a {type(value).__name__}"
        raise ModelError(
            f"the input of {title} must be a floating tensor of shape ({'n' if rows is None else rows}, d), one row an "
            f"example, got {got}; set head to a module with such an input"
        )


Capturing = Output | Representation
"""A value inside a network that can be captured while the network runs."""


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return args[0] if args else next(iter(kwargs.values()), None)


def _stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _HeadReached(_first(args, kwargs))


class RandomStream:
    """A random stream that can replace torch's global generators; each activation continues the stream."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[torch.device, Tensor] = {}

    @contextmanager
    def active(self, devices: set[torch.device]) -> Iterator[None]:
        """Return a context in which the global generators of CPU and CUDA `devices` draw from this stream."""
        generators = {device: torch.cuda.default_generators[device.index] for device in devices}
        generators[torch.device("cpu")] = torch.default_generator
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


@contextmanager
def isolated(model: nn.Module, stream: RandomStream) -> Iterator[None]:
    """Return a context in which forward passes change neither buffers nor the global random generators.

    Dropout draws from `stream`. Buffers are replaced by copies, so that autograd graphs remain valid.
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


def scores_of(logits: Tensor, count: int, kind: Literal["logits", "probabilities"]) -> Tensor:
    """Return logits or probabilities `(n, C)` in float32 from a model's logits.

    Raises a ModelError unless there is one vector for each of `count` examples.
    """
    if logits.ndim != 2 or len(logits) != count:
        raise ModelError(
            f"{kind} need a model with outputs of shape ({count}, classes), got outputs of shape {tuple(logits.shape)}"
        )
    logits = logits.float()
    return logits.softmax(1) if kind == "probabilities" else logits


def precision(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of a network's first floating parameter, or None if there is none."""
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), None)


def in_precision(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating tensor converted to `dtype`; return other tensors unchanged, or all if `dtype` is None."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def fitted(transform: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Return a transform whose floating results are converted to `dtype`, such as a network's precision."""
    if dtype is None or dtype == torch.float32:
        return transform
    return lambda inputs: in_precision(transform(inputs), dtype)
