"""The input of a network's head, called its representation, and other values inside networks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError
from fedhet.utils.inputs import Inputs, for_each

ROWS_AT_ONCE = 512
"""Number of examples in a forward pass without training."""

POOLED = ("last", "mean")  # ways to represent a text by the values of its tokens: the last token's, or the mean
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
    present = ", ".join(sorted({type(module).__name__ for name, module in modules.items() if name})) or "itself"
    lacking = f"{model._get_name()} has no nn.Linear or convolution as head, only {present}"
    raise ModelError(f"{lacking}: set the key head to the name of another module")


def _submodule(model: nn.Module, name: str, purpose: str = "") -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name not in modules:
        present = ", ".join(name for name in modules if name) or "no submodules"
        raise ModelError(f"{model._get_name()} has no module {name!r}{purpose}: name one of {present}")
    return modules[name]


Captured = Callable[[], Tensor]
"""Function that returns a tensor from inside a network's last forward pass, or raises a ModelError if there is none."""


class Output:
    """A named module of a network whose output can be captured; raises a ModelError if it does not exist."""

    def __init__(self, model: nn.Module, module: str) -> None:
        self.module = module
        self._module, self._title = _submodule(model, module), f"{module!r} of {model._get_name()}"

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Context manager that yields a function to get the module's output in the network's last forward pass."""
        values: list[Callable[[], object]] = []

        def read() -> Tensor:
            if values and isinstance(value := values[-1](), Tensor):
                return value
            raise ModelError(f"module {self._title} returned no tensor: name a module that runs and returns a tensor")

        title = f"the output of {self._title}"
        with self._module.register_forward_hook(lambda _module, _args, value: values.append(_held(value, title))):
            yield read


def _held(value: Any, title: str) -> Callable[[], object]:
    # Values are kept without a copy, so changes in place are an error.
    counted = isinstance(value, Tensor) and not value.is_inference()
    version = value._version if counted else 0

    def held() -> object:
        if counted and value._version != version:
            raise ModelError(f"the network changes {title} in place: set inplace=False in the next modules")
        return value

    return held


class _HeadReached(Exception):
    """Raised when a forward pass has computed the representation, to skip the rest of the pass."""


class Representation:
    """The representation of a network, `(n, d)` for n examples: by default the first input of its head.

    If the attribute `places` is `tokens` or `pixels`, the representation is averaged over tokens or pixels.

    Args:
        model: the network.
        head: name of its head; empty to find it by `head_name` when it is needed.
        what: name of a module whose output is the representation; or `last` or `mean` for heads that are applied to
            every token, to represent a text by its last token or the mean over its tokens. If empty, it is `last` for
            networks with a class named `...ForSequenceClassification`.
    """

    def __init__(self, model: nn.Module, head: str = "", what: str = "") -> None:
        self.model = model
        self.places: Literal["one", "tokens", "pixels"] = "one"
        self.what = what
        self._named = head and head_name(model, head)
        self._by_output = what not in ("", *POOLED)
        if self._by_output:
            _submodule(model, what, " whose output could be the representation")

    @cached_property
    def head(self) -> str:
        """Name of the head; raises a ModelError if no head is named and none is found."""
        return head_name(self.model, self._named)

    @cached_property
    def precision(self) -> torch.dtype | None:
        """The dtype of the network's first floating parameter, or None if there is none."""
        return precision(self.model)

    @property
    def site(self) -> tuple[str, ...]:
        """Cache key, equal for networks of one architecture that compute the representation at the same place."""
        return "input", self.head, self.places, self.what

    @property
    def _module(self) -> nn.Module:
        return self.model.get_submodule(self.what if self._by_output else self.head)

    @property
    def _title(self) -> str:
        kind, name = ("the output of module", self.what) if self._by_output else ("the input of head", self.head)
        return f"{kind} {name or type(self._module).__name__!r} of {self.model._get_name()}"

    @cached_property
    def _pooled(self) -> str:
        named = any(type(module).__name__.endswith("ForSequenceClassification") for module in self.model.modules())
        return self.what if self.what in POOLED else "last" if named else ""

    def head_output(self) -> AbstractContextManager["Captured | None"]:
        """Return a context manager like `capture`, but for the head's output; it yields None if there is no head."""
        try:
            return Output(self.model, self.head).capture()
        except ModelError:
            return nullcontext()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the representation `(n, d)` of n inputs, differentiably; the forward pass ends before the head.

        Raises a ModelError if the head is not reached, or its input is not a floating `(n, d)` tensor.
        """
        with self._watched(stop=True) as seen, suppress(_HeadReached):
            self.model(inputs)
        return self._check(*seen[:2])

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Context manager that yields a function to get the representation in the network's last forward pass."""
        with self._watched() as seen:
            yield lambda: self._check(*seen[:2])

    @contextmanager
    def _watched(self, *, stop: bool = False) -> Iterator[list[Any]]:
        # Yields a list for a forward pass's inputs by name and the function that gives the representation.
        seen: list[Any] = []

        def start(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[:] = [by_name(args, kwargs)]

        def add(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *outputs: Any) -> None:
            value = outputs[0] if outputs else next(iter((*args, *kwargs.values())), None)
            seen.append(_held(value[0] if outputs and isinstance(value, tuple) and value else value, self._title))
            if stop:
                raise _HeadReached

        register = self._module.register_forward_hook if self._by_output else self._module.register_forward_pre_hook
        with self.model.register_forward_pre_hook(start, with_kwargs=True), register(add, with_kwargs=True):
            yield seen

    def pool(self, values: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return texts' `values` (n, tokens, d) as (n, d): the last token's, or the mean over tokens.

        Values of other shapes are unchanged. So are all values if no pooling is set and no token has a prediction.
        `inputs` has the network's inputs by name. Tokens with an `attention_mask` of 0 or, without a mask, equal to the
        config's `pad_token_id` are left out.
        """
        how = "mean" if self.places == "tokens" else self._pooled
        if values.ndim != 3 or self.places == "pixels" or not how:
            return values
        mask = mask_of(self.model, inputs)
        if mask is None or mask.shape != values.shape[:2]:
            mask = values.new_ones(values.shape[:2])
        if how == "mean":
            weights = mask.to(values.dtype)[:, :, None]
            return (values * weights).sum(1) / weights.sum(1).clamp_min(1)
        last = (mask.long() * torch.arange(values.shape[1], device=values.device)).argmax(1)
        return values[torch.arange(len(values), device=values.device), last]

    def _check(self, inputs: Mapping[str, Any] = MappingProxyType({}), *values: Callable[[], Any]) -> Tensor:
        title = self._title
        key = "representation" if self._by_output else "head"
        if not values:
            raise ModelError(f"the forward pass did not compute {title}; set {key} to a module that it calls")
        value = values[0]()
        first = next(iter(inputs.values()), None)
        rows = first.shape[0] if isinstance(first, Tensor) and first.ndim else None  # len() is constant in an export
        if isinstance(value, Tensor):
            if value.ndim > 2 and (self.places == "pixels" or isinstance(self._module, _CONVOLUTIONS)):
                value = value.flatten(2).mean(2)
            value = self.pool(value, inputs)
            if value.is_floating_point() and value.ndim == 2 and (rows is None or rows == value.shape[0]):
                return value
            key = "representation = last or mean for tokens, or head" if value.ndim == 3 and key == "head" else key
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(
            f"the representation must be a floating tensor of shape ({'n' if rows is None else rows}, d), one "
            f"row per example, but {title} is {got}: set {key} to a module with such an "
            f"{'output' if self._by_output else 'input'}"
        )


Capturing = Output | Representation
"""A value inside a network that can be captured while the network runs."""


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a network's arguments by name or position ("0", ...). A single `Inputs` is replaced by its tensors."""
    if len(args) == 1 and isinstance(args[0], Inputs):
        return args[0].parts
    return {**{str(place): value for place, value in enumerate(args)}, **kwargs}


def mask_of(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens of a network's inputs, by name, are no padding; None if it is unknown.

    These are tokens with an `attention_mask` of 1 or, without a mask, unequal to the config's `pad_token_id`.
    """
    mask: Tensor | None = inputs.get("attention_mask")
    first = next(iter(inputs.values()), None)
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if mask is None and padding is not None and isinstance(first, Tensor) and not first.is_floating_point():
        return first != padding
    return mask


class RandomStream:
    """A random stream that can temporarily replace torch's global generators, and continues at its next use."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[torch.device, Tensor] = {}

    @contextmanager
    def active(self, devices: set[torch.device]) -> Iterator[None]:
        """Context manager in which the global generators of CPU and CUDA `devices` draw from this stream."""
        generators = {device: torch.cuda.default_generators[device.index] for device in devices}
        generators[torch.device("cpu")] = torch.default_generator
        with torch.random.fork_rng([device.index for device in devices]):
            for device, generator in generators.items():
                if device in self._states:
                    generator.set_state(self._states[device])
                else:
                    generator.manual_seed(self._seed)
            yield
            self._states |= {device: generator.get_state() for device, generator in generators.items()}


@contextmanager
def isolated(model: nn.Module, stream: RandomStream | None = None) -> Iterator[None]:
    """Context manager in which forward passes leave buffers and, with `stream`, torch's global generators unchanged.

    Dropout draws from `stream`. Buffers are replaced by copies, so that autograd graphs remain valid.
    """
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    devices = {parameter.device for parameter in model.parameters()} if stream else set()
    for current, originals in buffers:
        current.update({name: buffer.clone() for name, buffer in originals.items() if buffer is not None})
    try:
        with stream.active({device for device in devices if device.type == "cuda"}) if stream else nullcontext():
            yield
    finally:
        for current, originals in buffers:
            current.update(originals)


def precision(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of a network's first floating parameter, or None if there is none."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


def in_precision(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating tensor converted to `dtype`; return other tensors unchanged, or all if `dtype` is None."""
    return for_each(tensor, lambda part: part.to(dtype) if dtype is not None and part.is_floating_point() else part)
