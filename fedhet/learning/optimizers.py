"""Torch's optimisers without torch's compiler and profiler."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


@cache
def eager(kind: type[Kind]) -> type[Kind]:
    """One of torch's optimisers as a class that does the same, and never imports torch's compiler, which takes seconds.

    Torch wraps the methods that fill and step an optimiser in what compiled functions need of them, and that imports
    the compiler in programs that compile nothing, too. This class has what is wrapped; torch's own is left alone. Its
    steps are not profiled either, and call no hooks, which takes a third of a small network's step.
    """
    step = torch.no_grad()(_bare(kind.step))
    vars(step)["hooked"] = True  # torch takes its hooks to be there
    return type(kind.__name__, (kind,), {"add_param_group": _bare(kind.add_param_group), "step": step})


def _bare(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without what torch wraps it in; somebody else's wrapper stays, and what is in it."""
    return inspect.unwrap(method, stop=lambda each: not _module(each).startswith("torch."))


def _module(function: Callable[..., Any]) -> str:
    """Where it is defined, which a wrapper does not tell by its `__module__`."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))
