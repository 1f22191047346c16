"""End a process on SIGTERM and SIGHUP with the same cleanup as on Ctrl-C."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

QUIET = 10.0
"""Seconds after a signal in which further signals are ignored, while the process is ending."""

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
    """Context in which SIGTERM and SIGHUP raise `Stopped`, as Ctrl-C raises KeyboardInterrupt; main thread only.

    Further signals are ignored while the process ends.

    An uncaught `Stopped` becomes a SystemExit with the signal's exit code.
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
