"""Settings and random generators of the process, which a run shares with the program that calls it."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from fedhet.errors import ConfigError
from fedhet.utils.text import log

STANDARD = {
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "threads": 1,
    "deterministic": 0,
    "precision": "highest",
    "autocast on cpu": False,
    "autocast on cuda": False,
    "numpy": {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
}
"""Settings in runs, whatever the program's are."""

WAITING = 10.0  # seconds after which a warning is logged if a thread waits for another thread's run

_lock: Any = threading.RLock()
if hasattr(os, "register_at_fork"):  # a forked process has no thread that would release it
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def alone() -> Iterator[None]:
    """Context manager of a run, which waits for other threads' runs; raises a ConfigError within another run."""
    if _lock._is_owned():
        raise ConfigError(
            "a run or comparison was started by a function of another run, such as its data function or an observer: "
            "start it before or after that run"
        )
    if (dtype := torch.get_default_dtype()) != STANDARD["dtype"]:
        log.warning(
            "until the run ends, the default dtype is %s in all threads, not %s: to train in it, return model.to(%s)",
            *(STANDARD["dtype"], dtype, dtype),
        )
    with one_at_a_time(), standard_settings():
        yield


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Context manager of computations with the process's generators and settings; those of other threads wait."""
    if not _lock.acquire(timeout=WAITING):
        log.warning("waiting for another run of this process, since runs in threads are executed one after the other")
        _lock.acquire()
    try:
        yield
    finally:
        _lock.release()


@contextmanager
def standard_settings() -> Iterator[None]:
    """Context manager in which PyTorch has the `STANDARD` settings, computes gradients, and no warning is an error."""
    filters = [entry for entry in warnings.filters if entry[0] != "error"]
    with torch.inference_mode(False), settings_restored({**STANDARD, "warnings": filters}):
        yield


@contextmanager
def settings_restored(changes: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Context manager that changes settings by name, and then restores these or, without `changes`, all settings."""
    before = {name: _SETTINGS[name][0]() for name in changes or _SETTINGS}
    _write(changes or {})
    try:
        yield
    finally:
        _write(before)


def _write(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        read, write = _SETTINGS[name]
        if read() != value:
            write(value)


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None)
    if torch.get_default_device() != device:  # within a context manager of another device
        torch.set_default_device(device)


def _set_filters(filters: list[Any]) -> None:
    with warnings.catch_warnings():  # makes Python read the filters again
        pass
    setattr(warnings, "filters", filters)  # noqa: B010 - mypy knows them as a sequence that cannot be changed


def _folder() -> str:
    with suppress(OSError):  # it was removed
        return os.getcwd()
    return ""


def _set_folder(folder: str) -> None:
    if folder:
        os.chdir(folder)


def _set_handlers(handlers: list[Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # others cannot have changed them
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)


# Functions that read and write each setting.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "device": (torch.get_default_device, _set_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "autocast on cpu": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "autocast on cuda": (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    "numpy": (np.geterr, lambda kinds: np.seterr(**kinds)),
    "warnings": (lambda: [*warnings.filters], _set_filters),
    "folder": (_folder, _set_folder),
    "signals": (lambda: [signal.getsignal(number) for number in _SIGNALS], _set_handlers),
}
