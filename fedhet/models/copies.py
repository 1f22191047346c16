"""Copies of networks without shared memory or wrappers, and properties of their arrays."""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from gc import get_referents, is_tracked
from inspect import getclosurevars, unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from fedhet.errors import ModelError

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)

_used: WeakSet[nn.Module] = WeakSet()
# Modules that are used without a copy, because they cannot be copied.


class _ComputedTensors(TorchFunctionMode):
    """Context manager under which `copy.deepcopy` also copies non-leaf tensors, such as weights of `weight_norm`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[1].setdefault(id(args[0]), args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the network inside a wrapper, or None if `module` is no wrapper."""
    return module.module if isinstance(module, _WRAPPERS) else module._modules.get("_orig_mod")


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a network without wrappers, such as `torch.compile`, which add prefixes to array names.

    Tensors that share memory in the network share memory in the copy, and parameters keep their attributes.
    """
    memo: dict[int, Any] = {}
    with _ComputedTensors():
        for module in reversed([*model.modules()]):  # inner wrappers first
            if (inner := _wrapped(module)) is not None:
                memo[id(module)] = copy.deepcopy(inner, memo)
        result: nn.Module = copy.deepcopy(model, memo)
        # In this list, deepcopy keeps all objects that it copied.
        originals = [value for value in memo.get(id(memo), ()) if isinstance(value, Tensor)]
        for original in originals:
            vars(memo[id(original)]).update(copy.deepcopy(vars(original), memo))
    sharing: dict[int, list[Tensor]] = {}
    for original in originals:
        sharing.setdefault(_identity(original), []).append(original)
    for tensors in sharing.values():
        if len(tensors) == 1:
            continue
        memory = tensors[0].untyped_storage().clone()
        for tensor in tensors:
            view = tensor.detach().new_empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
            memo[id(tensor)].data = view
    return result


def separated(model: nn.Module) -> nn.Module:
    """Return a copy of a network that shares no memory with others, or `model` itself if it cannot be copied.

    Raises a ModelError if it cannot be copied and another client uses one of the modules, or a function of it reads its
    arrays. Nested tensors are disabled in PyTorch's transformers, since hooks and `torch.func` do not support them.
    """
    fixed = False
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    try:
        reason, fixed = _bound(model)
        if not reason:
            return copied(model)
    except Exception as error:  # a user's module may hold any object
        reason = f"{type(error).__name__}: {error}"
    if fixed or any(module in _used for module in model.modules()):
        raise ModelError(
            f"other networks need copies of its modules, but it cannot be copied ({reason}): create all its modules in "
            "the model function, and use modules and arrays in its methods only as attributes of self"
        )
    in_use(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def in_use(model: nn.Module) -> None:
    """Record that a network's modules are in use, so that `separated` does not return them for another client."""
    _used.update(model.modules())


def _bound(model: nn.Module) -> tuple[str, bool]:
    # Why a copy would still use modules or arrays of the model ("" if not), and whether the model itself cannot be
    # used either: a global variable may be another client's later, and clients in a batch have arrays of their own.
    own = {_identity(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        # A copy has no wrappers, and compiles nothing.
        if _wrapped(module) is not None:
            continue
        held = [value for key, value in vars(module).items() if key != "_compiled_call_impl"]
        for function in [value for value in _within(held) if isinstance(value, FunctionType)]:
            variables = [getattr(value, "__self__", value) for variable, value in _outside(function, set()) if variable]
            of_globals = any(_identity(value) in own for value in variables)
            parts = [value for value in _within([function]) if _identity(value) in own]
            if of_globals or parts:
                fixed = of_globals or any(isinstance(part, Tensor) for part in parts)
                return f"{function.__qualname__} of module {name!r} refers to the original", fixed
    return "", False


def holds_arrays(model: nn.Module) -> bool:
    """Return whether attributes of a network hold its parameters or buffers, or views of them, a second time.

    Those of PyTorch's recurrent layers do not count.
    """
    own = {_identity(array) for array in (*model.parameters(), *model.buffers())}
    registers = ("_parameters", "_buffers", "_modules")
    modules = [module for module in model.modules() if not isinstance(module, nn.RNNBase)]
    held = [value for module in modules for name, value in vars(module).items() if name not in registers]
    return any(_identity(value) in own for value in _within(held))


def _identity(value: Any) -> int:
    """Return a number that identifies an object, or the memory of a dense tensor."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if dense else id(value)


def _within(values: list[Any]) -> Iterator[Any]:
    """Yield all objects to which `values` refer, except texts and numbers.

    References of modules, arrays, optimisers, classes and global variables do not count. A copy has the original
    functions, and weak references, of the network that is copied.
    """
    seen = set[int]()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, ReferenceType):
            values.append(value())
        elif not isinstance(value, nn.Module | Tensor | Optimizer | type | ModuleType | CodeType):
            outside = value.__globals__ if isinstance(value, FunctionType) else None
            # Objects that the garbage collector does not track refer to none that it tracks.
            values.extend(part for part in get_referents(value) if is_tracked(part) and part is not outside)


def entries(held: Any) -> Iterable[Any]:
    """Return the values in a mapping, list or tuple, or any other object itself in a tuple."""
    return held.values() if isinstance(held, Mapping) else held if isinstance(held, list | tuple) else (held,)


def _outside(function: Any, seen: set[Any]) -> Iterator[tuple[bool, Any]]:
    # (is_global, value) for each global or nonlocal variable that a function reads, unless it is in `seen`.
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    variables = getclosurevars(function)
    for variable, values in ((False, variables.nonlocals.values()), (True, variables.globals.values())):
        for value in (each for held in values for each in entries(held)):
            yield variable, value
            if getattr(value, "__globals__", None) is function.__globals__:
                yield from _outside(value, seen)


def held_by(function: Any) -> Iterator[Any]:
    """Yield values that a function can read: outer variables, defaults, bound arguments, attributes of `__self__`."""
    function = unwrap(function)
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    yield from getattr(getattr(function, "__self__", function), "__dict__", {}).values()
    function = getattr(function, "__func__", function)
    function = function if isinstance(function, FunctionType) else vars(type(function)).get("__call__")
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    yield from (value for _, value in _outside(function, set()))


def unusable(model: Any) -> str:
    """Return why a model cannot be used, as a phrase to put after its class name; empty if it can be used."""
    if not isinstance(model, nn.Module):
        return ", not an nn.Module"
    if isinstance(model, torch.jit.ScriptModule):
        return ", whose modules TorchScript hides: return the nn.Module from which it was compiled"
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if absent := next((name for name, tensor in tensors if is_lazy(tensor) or tensor.is_meta), None):
        return f" whose {absent} has no values yet: create it on the CPU, and run lazy modules on an example first"
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if hooked := next((name for name, tensor in tensors if any(getattr(tensor, hook) for hook in hooks)), None):
        return (
            f" whose {hooked} has a hook on its gradient, which copies of the network lose: change gradients in "
            "forward, for example by multiplying or detaching the parameter"
        )
    modules = model.named_modules()
    if sparse := next((name for name, module in modules if getattr(module, "sparse", False) is True), None):
        return f" whose {sparse} has sparse gradients, which optimisers and averages do not take: set sparse=False"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return " without a parameter that requires gradients: leave at least the head to train"
    state = model.state_dict()
    for each, value in state.items():
        if not isinstance(value, Tensor) or value.is_complex() or not value.numel():
            return f" whose {each} cannot be sent, as it is empty, complex or no tensor (get_extra_state): remove it"
        if value.layout is not torch.strided:
            return f" whose {each} cannot be sent, as it is sparse: register it with persistent=False"
    saved = {_identity(value) for value in state.values()}
    trained = [(name, array) for name, array in model.named_parameters() if array.requires_grad]
    if lost := next((name for name, array in trained if _identity(array) not in saved), None):
        return f" whose state_dict() lacks {lost}, or changes it: return every parameter that requires gradients"
    return ""


class _NumbersOnCpu(TorchFunctionMode):
    """Context manager under which sequences of numbers, from which libraries compute sizes of layers, have values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.arange, torch.linspace, torch.tensor):
            kwargs = {"device": "cpu"} | (kwargs or {})
        return func(*args, **(kwargs or {}))


def without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the network that `build` returns on the meta device, or on its own if it computes while it is built.

    So the shapes of a large network, which a false claim can name, cost no memory.
    """
    for numbers in (nullcontext(), _NumbersOnCpu()):
        # A network may compute with values, which the meta device does not have.
        with suppress(NotImplementedError, RuntimeError), torch.device("meta"), numbers:
            return build()
    return build()


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that sets a network to evaluation mode and restores the mode of each module at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


Kind = Literal["trained", "frozen", "statistic", "buffer"]

RUNNING = ("running_", "moving_", "num_batches_tracked")  # prefixes of names of running statistics (buffers)


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of each array of a network's state dict, by name.

    Parameters are `trained` if they require gradients, else `frozen`. Buffers of BatchNorm or InstanceNorm, or named
    `running_*`, `moving_*` or `num_batches_tracked`, are `statistic` if `train()` affects the module, else `buffer`.
    """
    with in_evaluation_mode(model):
        model.train()
        updated = {name: module for name, module in model.named_modules(remove_duplicate=False) if module.training}
    kinds: dict[str, Kind] = {}
    for name, array in model.state_dict(keep_vars=True).items():
        prefix, _, key = name.rpartition(".")
        if isinstance(array, nn.Parameter):
            kinds[name] = "trained" if array.requires_grad else "frozen"
        elif prefix in updated and (isinstance(updated[prefix], _NormBase) or key.startswith(RUNNING)):
            kinds[name] = "statistic"
        else:
            kinds[name] = "buffer"
    return kinds


DEEP = 8  # number of layers above which networks without normalisation count as deep (see `multiplies`)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def multiplies(model: nn.Module) -> bool:
    """Return whether a network has more than `DEEP` linear and convolutional layers, and no normalisation."""
    deep = sum(isinstance(module, nn.Linear | _ConvNd) for module in model.modules()) > DEEP
    return deep and not any(isinstance(module, _NORMS) for module in model.modules())


class Start(NamedTuple):
    """Mean and standard deviation of the entries of an array in a newly built network.

    `exact` says that generated weights must have this deviation, also if it is close to Kaiming's.
    """

    mean: float
    std: float
    exact: bool = False


def starts_of(model: nn.Module) -> dict[str, Start]:
    """Return mean and standard deviation of the entries of each trainable parameter of a newly built network, by name.

    Biases of normalisation layers, and parameters with one entry in linear layers and convolutions, are left out.
    """
    arrays = {name: value.detach().double() for name, value in model.named_parameters() if value.requires_grad}
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | _ConvNd)}
    norms = {name for name, module in model.named_modules() if isinstance(module, _NORMS)}
    return {
        name: Start(float(value.mean()), float(value.std(correction=0)) if value.min() < value.max() else 0.0)
        for name, value in arrays.items()
        if value.numel() > (name.rpartition(".")[0] in layers)  # one entry may be drawn at random
        and not (name.endswith("bias") and name.rpartition(".")[0] in norms)
    }


def load_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a state dict that has no version numbers of PyTorch's modules; the current versions are assumed."""
    state = OrderedDict(tensors)
    state._metadata = getattr(model.state_dict(), "_metadata", {})  # type: ignore[attr-defined]
    model.load_state_dict(state)


def storage_place(value: Tensor) -> Hashable:
    """Return a key that identifies a tensor's memory, shape and strides; tied parameters have equal keys."""
    return value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape), value.stride()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a parameter that modules share to the parameter's first name in the state dict."""
    first: dict[Hashable, str] = {}
    named = {name: storage_place(value) for name, value in model.state_dict(keep_vars=True).items()}
    return {name: earlier for name, place in named.items() if (earlier := first.setdefault(place, name)) != name}


def described(model: nn.Module) -> str:
    """Return a text that changes with a network's modules, their options, and the names that their functions use.

    Networks with arrays of equal names and shapes, but with other activations, have different texts.
    """
    functions = {type(module).forward for module in model.modules()}
    own = [function for function in functions if not str(getattr(function, "__module__", "")).startswith("torch.")]
    codes = [function.__code__ for function in own if hasattr(function, "__code__")]
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # addresses of functions differ between processes
    return f"{layers} {sorted((code.co_qualname, code.co_names) for code in codes)}"
