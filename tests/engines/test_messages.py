"""Objects between processes, with large arrays in memory that both have."""

import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array

from fedhet.engines import children as messages
from fedhet.engines.children import LARGE, SharedMessage

in_memory = pytest.mark.skipif(not messages.SHARES, reason="this system has no files without names")


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    here, there = Pipe(duplex=True)
    with here, there:
        yield here, there


def through(ends: tuple[Connection, Connection], content: object) -> Any:
    here, there = ends
    sending = threading.Thread(target=messages.send, args=(here, content))
    sending.start()
    came = messages.receive(there)
    sending.join()
    return came


def contents() -> dict[str, Any]:
    tensor = torch.arange(LARGE)
    return {
        "int64": tensor,
        "again": tensor,
        "bfloat16": tensor.to(torch.bfloat16).view(16, -1),
        "strided": tensor.view(2, -1).T,
        "learns": torch.rand(LARGE, requires_grad=True),
        "small": torch.arange(7),
        "numpy": np.arange(float(LARGE)).reshape(4, -1),
        "flower": Array("uint8", (2 * LARGE,), "fedhet.raw", os.urandom(2 * LARGE)),
        "bytes": os.urandom(2 * LARGE),
    }


def none_allowed(name: str) -> int:
    raise OSError(24, "too many open files")


@pytest.mark.parametrize("how", [pytest.param("shared", marks=in_memory), "not shared here", "no more files"])
def test_what_is_sent_arrives(how: str, ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "not shared here":
        monkeypatch.setattr(messages, "SHARES", False)
    if how == "no more files":
        monkeypatch.setattr(os, "memfd_create", none_allowed, raising=False)
    sent = contents()
    came = through(ends, {**sent, "function": lambda value: value + 1})
    assert came.pop("function")(1) == 2
    assert came["again"] is came["int64"]
    assert came["learns"].requires_grad
    assert came.keys() == sent.keys()
    for name, value in sent.items():
        assert type(came[name]) is type(value)
        if isinstance(value, torch.Tensor):
            assert came[name].dtype == value.dtype
            assert torch.equal(came[name], value)
        else:
            np.testing.assert_equal(came[name], value)


@in_memory
def test_large_arrays_are_shared_until_written(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    tensor, array = torch.arange(LARGE), np.arange(LARGE)
    message = SharedMessage([tensor, array])
    received = []
    for _ in range(2):  # to two workers
        message.send(here)
        pickled, places = there.recv()
        assert len(pickled) < 1000
        assert places[-1][1] == 16 * LARGE
        with messages._socket(there) as end:
            os.close(*socket.recv_fds(end, 1, 1)[1])
        message.send(here)
        received.append(messages.receive(there))
    received[0][0][3], received[0][1][4] = -1, -1
    assert torch.equal(received[1][0], tensor)
    np.testing.assert_equal(received[1][1], array)
    message.close()
    assert received[0][0][3] == -1
    assert int(received[1][0].sum()) == int(tensor.sum())


@in_memory
def test_nothing_is_left_open(ends: tuple[Connection, Connection]) -> None:
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    came = through(ends, [torch.full((LARGE + number,), number % 100, dtype=torch.int8) for number in range(300)])
    assert [(len(tensor) - LARGE, int(tensor[-1])) for tensor in came] == [(n, n % 100) for n in range(300)]
    assert len(list(open_files.iterdir())) <= before + 1
    del came
    with pytest.raises(TypeError):
        SharedMessage([torch.arange(LARGE), threading.Lock()])
    assert len(list(open_files.iterdir())) == before
