"""Objects between processes."""

import os
import threading
from multiprocessing import Pipe

import numpy as np
import pytest
import torch
from flwr.app import Array

from fedhet.engines import children


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_what_is_sent_arrives(system, monkeypatch):
    monkeypatch.setattr(children.sys, "platform", system)
    large = torch.arange(1 << 18)
    sent = {
        "int64": large,
        "again": large,
        "bfloat16": large.to(torch.bfloat16).view(16, -1),
        "strided": large.view(2, -1).T,
        "learns": torch.rand(1 << 18, requires_grad=True),
        "numpy": np.arange(float(1 << 18)).reshape(4, -1),
        "flower": Array("uint8", (1 << 18,), "fedhet.raw", os.urandom(1 << 18)),
        "bytes": os.urandom(1 << 18),
    }
    here, there = Pipe(duplex=True)
    with here, there:
        sending = threading.Thread(target=children.send, args=(here, {**sent, "function": lambda value: value + 1}))
        sending.start()
        came = children.receive(there)
        sending.join()
    assert came.pop("function")(1) == 2
    assert came["again"].data_ptr() == came["int64"].data_ptr()
    assert came["learns"].requires_grad
    assert came.keys() == sent.keys()
    for name, value in sent.items():
        assert type(came[name]) is type(value)
        same = torch.equal if isinstance(value, torch.Tensor) else lambda one, other: np.array_equal(one, other)
        assert came[name] == value if isinstance(value, Array) else same(came[name], value)


def test_tensors_in_a_file_are_shared_until_written(tmp_path):
    tensor = torch.arange(1 << 18)
    torch.save([tensor, lambda: 3], tmp_path / "recipe", pickle_module=children, pickle_protocol=5)
    one, other = (torch.load(tmp_path / "recipe", mmap=True, weights_only=False) for _ in range(2))
    one[0][3] = -1
    assert torch.equal(other[0], tensor)
    assert other[1]() == 3
