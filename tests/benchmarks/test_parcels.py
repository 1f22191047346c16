"""What it takes to send a large network to a worker and back."""

import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord

from fedhet.engines import children, parcels

pytestmark = pytest.mark.benchmark

LAYERS, SIZE = 60, 750_000


def echo(connection: Connection, shared: bool) -> None:
    """Send back what comes."""
    while True:
        if shared:
            parcels.send(connection, parcels.receive(connection))
        else:
            connection.send(connection.recv())


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def test_arrays_in_shared_memory_against_a_pipe() -> None:
    """45 MB in sixty arrays, there and back."""
    arrays = {str(layer): Array("float32", (SIZE // 4,), "fedhet.raw", os.urandom(SIZE)) for layer in range(LAYERS)}
    ends = [children.start(echo, shared, name="echo", duplex=True) for shared in (True, False)]
    (_, memory), (_, pipe) = ends

    def through_memory() -> ArrayRecord:
        parcels.send(memory, ArrayRecord(arrays))
        came: ArrayRecord = parcels.receive(memory)
        return came

    def through_pipe() -> ArrayRecord:
        pipe.send(ArrayRecord(arrays))
        came: ArrayRecord = pipe.recv()
        return came

    assert through_memory() == through_pipe() == ArrayRecord(arrays)
    rounds = [(seconds(through_memory), seconds(through_pipe)) for _ in range(10)]
    for process, connection in ends:
        process.kill()
        process.join()
        connection.close()
    ours, plain = map(statistics.median, zip(*rounds, strict=True))
    print(f"\nshared memory {ours:.3f} s, pipe {plain:.3f} s: {ours / plain:.2f}")
    assert ours < 0.6 * plain
