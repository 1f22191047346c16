"""A client's files on its own disk."""

import errno

import pytest
import torch

from fedhet.client.state import ClientStore
from fedhet.errors import FedhetError
from fedhet.utils.files import read_tensors


def test_kept_states(tmp_path):
    store = ClientStore(tmp_path, "", "0")
    store.save(1, {"w": torch.tensor(1.0)}, after=-1)
    store.save(2, {"w": torch.tensor(2.0)}, after=1)
    # The answers of rounds 2 and 3 were lost: the server still names round 1.
    store.save(3, {"w": torch.tensor(3.0)}, after=1)
    store.save(4, {"w": torch.tensor(4.0)}, after=1)
    assert sorted(path.name for path in (tmp_path / "clients" / "0").iterdir()) == ["1.safetensors", "4.safetensors"]
    assert store.load(1)["w"] == 1
    store.save(7, {"w": torch.tensor(7.0)}, after=4)
    assert store.load(1) is None
    assert store.load(4)["w"] == 4


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_flipped_bit(tmp_path, kind):
    store = ClientStore(tmp_path, "", "0")
    store.save(1, {"w": torch.ones(3, 2).to(kind), "n": torch.tensor(1).to(kind)}, after=-1)
    path = tmp_path / "clients" / "0" / "1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FedhetError, match=r"1\.safetensors is damaged, since its digest does not match its content"):
        read_tensors(path)
    assert store.load(1) is None


def test_full_disk_names_resume(tmp_path, monkeypatch):
    def full(path, tensors):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("fedhet.client.state.write_tensors", full)
    with pytest.raises(FedhetError, match="No space left on device; free disk space and resume the run"):
        ClientStore(tmp_path, "", "0").save(1, {"w": torch.ones(2)}, after=-1)
