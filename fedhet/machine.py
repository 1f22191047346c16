"""The machine that a process is on."""

import ctypes
import os
from functools import cache

# Of glibc's malloc.h: how much free memory it keeps, and from which size it asks the system for each block.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_GIBIBYTE = 1 << 30


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def keep_freed_memory() -> None:
    """Have this process use freed memory again instead of returning it to the system after every step of training.

    A convolution's activations of some megabytes are else mapped anew, page by page, in each step: half of the time of
    a step with 128 images of 28 x 28. A process then keeps the most memory that it ever had. Where the C library is
    not glibc, nothing happens.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _GIBIBYTE)
        library.mallopt(_TRIM_THRESHOLD, _GIBIBYTE)
    except (AttributeError, OSError, TypeError):
        pass
