"""Losses and gradients of a batch of networks, compiled by torch's inductor (key `compile`)."""

import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedhet.data.files import cache_folder
from fedhet.errors import ModelError
from fedhet.training.stacked import Losses
from fedhet.training.verification import check_equal
from fedhet.utils.text import log


@dataclass(frozen=True)
class CompiledStep:
    """The losses and gradients of a step, for arguments of certain shapes.

    Attributes:
        function: function of the arguments that returns losses (clients,), gradients and scalars to record.
        names: names of these scalars.
        further, again: numbers of forward passes of the step (see `Losses`).
    """

    function: Callable[..., Sequence[Tensor | None]]
    names: Sequence[str]
    further: int
    again: int

    def __call__(
        self, losses: Losses, arguments: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Set the gradients of `leaves`, and return losses and scalars to record (clients,) by name."""
        with torch.no_grad():
            results = self.function(*_plain(arguments))
        for leaf, gradient in zip(leaves, results[1:], strict=False):
            if gradient is not None and gradient.stride() != leaf.stride():
                gradient = torch.empty_like(leaf).copy_(gradient)  # fused optimisers read memory in its order
            leaf.grad = gradient
        losses.further = self.further
        losses.again = self.again
        # On a GPU, the next step writes its results to the same memory.
        loss, *scalars = (result.clone() for result in (results[0], *results[1 + len(leaves) :]) if result is not None)
        return loss, dict(zip(self.names, scalars, strict=True))


_STEPS: dict[Hashable, dict[Hashable, CompiledStep] | None] = {}
"""For each kind of networks in this process, what is compiled, by loss terms and shapes; None if compiling failed."""


def compiled_step(
    kind: Hashable, losses: Losses, arguments: Sequence[Tensor], leaves: Sequence[Tensor]
) -> CompiledStep | None:
    """Return the compiled step of networks of a kind; None, and a line in the log, if it cannot be compiled.

    `leaves` are the `arguments` that are trained.
    """
    steps = _STEPS.setdefault(kind, {})
    if steps is None:
        return None
    key = losses.key, *((argument.shape, argument.dtype, argument.device) for argument in arguments)
    if key not in steps:
        started = time.monotonic()
        try:
            steps[key] = _compile(losses, arguments, leaves)
        except Exception as error:  # of the compiler, or of a user's function
            _STEPS[kind] = None
            log.info("a batch of networks is not compiled: %s", str(error).partition("\n")[0] or type(error).__name__)
            return None
        log.info("compiled a batch of %d networks in %.0f s", len(leaves[0]), time.monotonic() - started)
    return steps[key]


def _plain(arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous arguments without gradients: PyTorch compiles again for other strides and `requires_grad`."""
    return [argument.detach().contiguous() for argument in arguments]


class _Unknown:
    """The number of a compiled step: what is computed from it would be the same in all steps."""

    def _refuse(self, *_: Any) -> Any:
        raise ModelError("a loss term reads the number of the step")

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __pow__ = __rpow__ = __hash__ = __str__ = _refuse


def _compile(losses: Losses, arguments: Sequence[Tensor], leaves: Sequence[Tensor]) -> CompiledStep:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))  # read by the next line
    from torch._inductor import config
    from torch.fx.experimental.proxy_tensor import make_fx

    places = [next(place for place, argument in enumerate(arguments) if argument is leaf) for leaf in leaves]
    names: list[str] = []

    def function(*arguments: Tensor) -> list[Tensor | None]:
        given = [*arguments]
        for place in places:
            given[place] = given[place].detach().requires_grad_()
        loss, values = losses(cast(int, _Unknown()), given)
        names[:] = values
        gradients = torch.autograd.grad(loss.sum(), [given[place] for place in places], allow_unused=True)
        return [loss.detach(), *gradients, *values.values()]

    tensors = _plain(arguments)
    expected = function(*tensors)
    mode = "reduce-overhead" if tensors[0].device.type == "cuda" else "default"
    with config.patch(compile_threads=1):  # others would be processes that remain
        compiled = torch.compile(make_fx(function)(*tensors), dynamic=False, mode=mode)
        with torch.no_grad():
            computed = compiled(*tensors)
    first, second = ([value for value in values if value is not None] for values in (computed, expected))
    check_equal(first, second, "compiled code computes other losses or gradients")
    return CompiledStep(compiled, names, losses.further, losses.again)
