"""Queries and settings of the machine and the process: cores, memory, devices, random generators, signals."""

import contextlib
import ctypes
import errno
import hmac
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from fedhet.errors import ConfigError
from fedhet.utils.files import expanded, locked
from fedhet.utils.text import counted

if TYPE_CHECKING:
    import torch

_KEY = "FEDHET_KEY"  # environment variable with a key that no file has
_CUDA_CONTEXT = 600 << 20  # bytes of a GPU that a process uses without any tensor, rounded up
_RUN_ON_GPU = 4 << 30  # bytes of a GPU for a process whose needs are unknown


def proof(text: str) -> str:
    """Return a hexadecimal HMAC of a text with the user's secret key, equal for a user's processes on one machine.

    The key is in `~/.fedhet/key`. If that file cannot be read or created, only this process's children have the key.
    """
    return hmac.new(_key(os.environ.get("HOME", "")), text.encode(), "sha256").hexdigest()


@cache
def _key(home: str) -> bytes:
    try:
        path = expanded("~/.fedhet/key")
        with locked(path.parent, wait=True):
            path.touch(mode=0o600)
            if not path.stat().st_size:
                path.write_bytes(secrets.token_bytes(32))
            return path.read_bytes()
    except (OSError, ConfigError):
        return os.environ.setdefault(_KEY, secrets.token_hex(32)).encode()


def open_streams() -> None:
    """Open the null device in place of a closed standard input, output or error, whose number a file would get."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def drop_output() -> None:
    """Drop what a full disk behind the standard output has not taken; Python would write it again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def memory() -> int:
    """Return the size of this machine's memory in bytes."""
    return psutil.virtual_memory().total


def spent() -> tuple[float, int]:
    """Return CPU seconds and peak memory in bytes of this process and its children, each summed over the processes.

    Children that ended before are not counted, and memory that processes share counts for each of them.
    """
    seconds, peak = 0.0, 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            times = process.cpu_times()
            seconds += times.user + times.system
            status = Path(f"/proc/{process.pid}/status")
            if status.exists():
                kilobytes = re.search(r"VmHWM:\s*(\d+)", status.read_text())  # none of a process that has ended
                peak += 1024 * int(kilobytes[1]) if kilobytes else 0
            else:  # macOS has no peak of another process
                memory = process.memory_info()
                peak += getattr(memory, "peak_wset", memory.rss)
    return seconds, peak


def revision(folder: Path) -> str:
    """Return the commit of the git checkout that contains `folder`, and its changed files; empty without a checkout."""
    if not any((place / ".git").exists() for place in (folder, *folder.parents)):
        return ""
    # A repository can configure a program as its file system monitor, which git would start.
    git = partial(subprocess.check_output, cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10)
    try:
        commit = git(["git", "rev-parse", "HEAD"]).strip()
        names = git(["git", "-c", "core.fsmonitor=false", "diff", "HEAD", "--name-only"]).splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):  # no git, or another user's repository
        return ""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return commit + (f", changed: {', '.join(names[:10])}{more}" if names else "")


NO_MEMORY = (
    "can't allocate memory",
    "could not create a primitive",  # oneDNN's
    "Resource temporarily unavailable",  # a new thread's stack
    "can't start new thread",
    "bad_alloc",
)
"""Texts of RuntimeErrors that PyTorch and its libraries raise in place of a MemoryError."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error or its cause means that the process ran out of memory."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY):
        return True
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.ENOMEM, errno.EAGAIN):
        return True
    return error.__cause__ is not None and out_of_memory(error.__cause__)


def check_device_name(name: str) -> None:
    """Check that a device's name is valid, whether or not the device exists; raise a ConfigError otherwise."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise ConfigError(f"device = {name!r} is not a device: use auto, cpu, cuda, cuda:N (N from 0) or mps")


@lru_cache(maxsize=8)
def device_of(name: str) -> "torch.device":
    """Return a device by name (`auto`: the first GPU or else the CPU); raises a ConfigError if it does not exist."""
    import torch

    check_device_name(name)
    kind, _, number = name.partition(":")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= gpus:
        seen = f"torch sees {counted(gpus, 'GPU') if gpus else 'no GPU'} here"
        raise ConfigError(f"device = {name!r} does not exist ({seen}): use device = 'auto' or 'cpu'")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device = 'mps', but torch sees no Apple GPU here: use device = 'auto' or 'cpu'")
    if kind == "auto":
        return torch.device("cuda:0" if gpus else "cpu")
    return torch.device("cuda:0" if name == "cuda" else name)


def brought(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """Return a copy of a small tensor on a device, without waiting for the device."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def room_on(device: "torch.device") -> int:
    """Return how many more processes like this one fit into a GPU's memory; unused cached memory is freed first."""
    import torch

    needed = (torch.cuda.max_memory_reserved(device) or _RUN_ON_GPU) + _CUDA_CONTEXT
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free // needed)


def runs_at_once(device: "torch.device") -> int:
    """Return how many runs to execute at once: one per core and, on a GPU, at most one per 4 GiB of its memory."""
    import torch

    if device.type != "cuda":
        return cores()
    return max(1, min(cores(), torch.cuda.get_device_properties(device).total_memory // _RUN_ON_GPU))


def describe(device: "torch.device") -> str:
    """Return a text with a device and its hardware, such as `cuda:0 (NVIDIA H100)`."""
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({platform.machine()}, {cores()} cores)"


@cache
def keep_freed_memory() -> None:
    """Make glibc keep freed memory, since allocating it again can take half of the time of a training step."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD of glibc's malloc.h
        library.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


QUIET = 10.0  # seconds after a signal in which further signals are ignored, while the process is ending
_WANTED = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(KeyboardInterrupt):
    """Exception for a signal that asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def exit_code(stopped: KeyboardInterrupt) -> int:
    """Return the exit code of a process that was stopped by Ctrl-C or another signal (128 + number of the signal)."""
    return 128 + (stopped.number if isinstance(stopped, Stopped) else signal.SIGINT)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Context manager that makes SIGTERM and SIGHUP raise `Stopped`, if it is used in the main thread.

    Further signals are ignored for `QUIET` seconds. An uncaught `Stopped` becomes a SystemExit (see `exit_code`).
    """
    before = {each: handler for each in _WANTED if (handler := signal.getsignal(each)) != signal.SIG_IGN}
    ours = any(getattr(handler, "__module__", "") == __name__ for handler in before.values())
    if ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    quiet = float("-inf")

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal quiet
        if time.monotonic() >= quiet:
            quiet = time.monotonic() + QUIET
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    try:
        for each in before:
            signal.signal(each, stop)
        yield
    except Stopped as stopped:
        raise SystemExit(exit_code(stopped)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def in_ray() -> bool:
    """Return whether this process is a Ray worker."""
    ray: Any = sys.modules.get("ray")  # the user's program can have a module of this name
    return hasattr(ray, "is_initialized") and ray.is_initialized() and bool(ray.get_runtime_context().get_actor_id())


def cluster_machine() -> str:
    """Return this machine's name if it simulates clients in a Ray cluster of several machines, else an empty string."""
    if not in_ray():
        return ""
    return platform.node() if sum(node["Alive"] for node in sys.modules["ray"].nodes()) > 1 else ""
