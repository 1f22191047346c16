"""The machine that a process is on."""

import contextlib
import ctypes
import errno
import hmac
import os
import platform
import random
import re
import secrets
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fedhet.errors import ConfigError

if TYPE_CHECKING:
    import torch

# Of glibc's malloc.h: how much free memory it keeps, and from which size it asks the system for each block.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # that glibc chooses itself, as blocks are freed
_GIBIBYTE = 1 << 30
_CUDA_CONTEXT = 600 << 20  # bytes of a GPU that a process takes before it holds a tensor, somewhat more
_RUN_ON_GPU = 4 << 30  # bytes of a GPU for a process of which nothing is known


def proof(text: str) -> str:
    """Return a keyed digest by which clients know a server of this user on this machine; empty without a key."""
    return _proof(_key(os.path.expanduser("~/.fedhet/key")), text)


@lru_cache(maxsize=256)  # every message carries the same text
def _proof(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest() if key else ""


@cache
def _key(place: str) -> bytes:
    path = Path(place)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".key.{os.getpid()}")
        temporary.touch(mode=0o600)
        temporary.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # of several processes the first one's stays
        temporary.unlink()
        return path.read_bytes()
    except OSError:
        return b""


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def memory() -> int:
    """Bytes of memory that this machine has."""
    return psutil.virtual_memory().total


def data_in_use() -> int:
    """Return the bytes of this process's data, without freed memory if glibc can return it; on Linux."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(getattr(psutil.Process().memory_info(), "data", 0))


NO_MEMORY = (
    "can't allocate memory",
    "could not create a primitive",  # oneDNN's
    "Resource temporarily unavailable",  # a new thread's stack
    "can't start new thread",
    "bad_alloc",
)
"""Texts of the RuntimeErrors of PyTorch and its libraries where no memory is left, which raise no MemoryError."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, says that no memory is left.

    Under a limit, the system's and threads' errors do, too.
    """
    if isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY):
        return True
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.ENOMEM, errno.EAGAIN):
        return True
    return error.__cause__ is not None and out_of_memory(error.__cause__)


def peak_memory(function: Callable[[], None]) -> int:
    """Call a function, and return the most bytes that PyTorch's allocators gave out meanwhile, less those freed."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to the terminal at every start and stop
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        function()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in changes), default=0)


def check_device_name(name: str) -> None:
    """Raise `ConfigError` where a device cannot be meant; whether it is there, `device_of` finds out."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise ConfigError(f"device = {name!r}: must be auto, cpu, cuda, cuda:N (N from 0) or mps")


@lru_cache(maxsize=8)
def device_of(name: str) -> "torch.device":
    """The device of that name, `auto` being the first GPU or else the CPU; raises `ConfigError` if it is not here."""
    import torch

    check_device_name(name)
    kind, _, number = name.partition(":")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= gpus:
        seen = f"torch sees {gpus or 'no'} GPU{'s' * (gpus > 1)} here"
        raise ConfigError(f"device = {name!r}, but {seen}: use device = 'auto' or 'cpu'")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device = 'mps', but torch sees no Apple GPU here: use device = 'auto' or 'cpu'")
    if kind == "auto":
        return torch.device("cuda:0" if gpus else "cpu")
    return torch.device("cuda:0" if name == "cuda" else name)


def brought(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """Copy a small tensor to a device, without waiting for the device."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def room_on(device: "torch.device") -> int:
    """The number of processes like this one that have room beside it on a GPU; frees what this one does not need."""
    import torch

    each = (torch.cuda.max_memory_reserved(device) or _RUN_ON_GPU) + _CUDA_CONTEXT
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free // each)


def runs_at_once(device: "torch.device") -> int:
    """The number of runs at a time: as many as cores, and on a GPU one for each 4 GiB of its memory."""
    import torch

    if device.type != "cuda":
        return cores()
    return max(1, min(cores(), torch.cuda.get_device_properties(device).total_memory // _RUN_ON_GPU))


def host() -> str:
    """This kind of machine in words, without its name."""
    return f"{platform.system()} {platform.machine()}, {cores()} cores"


def describe(device: "torch.device") -> str:
    """A device in words that name the hardware."""
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({platform.machine()}, {cores()} cores)"


@cache
def keep_freed_memory() -> None:
    """Have this process keep freed memory, with glibc, instead of returning it to the system after every step.

    Else a convolution's activations are mapped anew in each step, which is half of its time for 128 images of 28 x 28.
    """
    _set_malloc(_GIBIBYTE, _GIBIBYTE)


def _set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, mmap_threshold)
        library.mallopt(_TRIM_THRESHOLD, trim_threshold)
        library.malloc_trim(0)


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """Within it clients may be trained in this process.

    Behind it torch's number of threads and the global generators of torch, NumPy and Python are as before, and freed
    memory goes back to the system again, from the sizes on that glibc itself arrives at for large blocks.
    """
    import numpy as np
    import torch

    threads, python, numpy = torch.get_num_threads(), random.getstate(), np.random.get_state()
    kept_before = keep_freed_memory.cache_info().currsize
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads(threads)
        if keep_freed_memory.cache_info().currsize > kept_before:
            keep_freed_memory.cache_clear()
            _set_malloc(_LARGEST_MMAP_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Products of matrices that round the same however many threads a process has."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
