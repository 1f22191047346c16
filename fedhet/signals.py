"""An orderly end: what asks a process to stop ends it as Ctrl-C does."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

QUIET = 10.0
"""Seconds behind a signal in which no further one disturbs what is being ended."""

_WANTED = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(KeyboardInterrupt):
    """A signal that asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def exit_code(stopped: KeyboardInterrupt) -> int:
    """The exit code that tells which signal it was."""
    return 128 + (stopped.number if isinstance(stopped, Stopped) else signal.SIGINT)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise `Stopped`, as Ctrl-C raises its base class; in the main thread, and once.

    Where nobody inside has caught `Stopped`, it is a SystemExit with the signal's exit code.
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
