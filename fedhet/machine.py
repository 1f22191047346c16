"""The machine that a process is on."""

import contextlib
import ctypes
import hmac
import os
import secrets
from functools import cache, lru_cache
from pathlib import Path

# Of glibc's malloc.h: how much free memory it keeps, and from which size it asks the system for each block.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_GIBIBYTE = 1 << 30


def proof(text: str) -> str:
    """What only a process of this user on this machine can say of a text: by it clients know a server at home.

    The key is made when it is first needed. Empty where there can be none.
    """
    return _proof(_key(Path.home() / ".fedhet" / "key"), text)


@lru_cache(maxsize=256)  # every message carries the same text
def _proof(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest() if key else ""


@cache
def _key(path: Path) -> bytes:
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
