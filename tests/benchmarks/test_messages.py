"""The time to send a large network to a worker and back."""

import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord

from fedhet.engines import children as messages
from fedhet.engines.children import Child

pytestmark = pytest.mark.benchmark

LAYERS, SIZE = 60, 750_000


def echo(connection: Connection, shared: bool) -> None:
    """Send back what comes."""
    while True:
        if shared:
            messages.send(connection, messages.receive(connection))
        else:
            connection.send(connection.recv())


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def test_arrays_in_shared_memory_against_a_pipe() -> None:
    """45 MB in sixty arrays, there and back."""
    arrays = {str(layer): Array("float32", (SIZE // 4,), "fedhet.raw", os.urandom(SIZE)) for layer in range(LAYERS)}
    memory, pipe = (Child(echo, shared, name="echo") for shared in (True, False))

    def through_memory() -> ArrayRecord:
        memory.send(ArrayRecord(arrays))
        came: ArrayRecord = memory.receive()
        return came

    def through_pipe() -> ArrayRecord:
        pipe.connection.send(ArrayRecord(arrays))
        came: ArrayRecord = pipe.connection.recv()
        return came

    assert through_memory() == through_pipe() == ArrayRecord(arrays)
    rounds = [(seconds(through_memory), seconds(through_pipe)) for _ in range(10)]
    memory.end()
    pipe.end()
    ours, plain = map(statistics.median, zip(*rounds, strict=True))
    print(f"\nshared memory {ours:.3f} s, pipe {plain:.3f} s: {ours / plain:.2f}")
    assert ours < 0.6 * plain
