"""A client's files on its own disk."""

import pytest
import torch
from safetensors.torch import save_file

from fedhet.client.state import ClientStore, LostState
from fedhet.data import PublicDataset
from fedhet.errors import FedhetError
from fedhet.files import read_tensors, write_tensors


def test_a_client_keeps_the_last_state_and_the_one_it_came_from(tmp_path):
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


def test_the_first_training_done_again_keeps_one_state(tmp_path):
    store = ClientStore(tmp_path, "", "0")
    for number in (1, 2):
        store.save(number, {"w": torch.zeros(2)}, after=-1)
    assert [path.name for path in (tmp_path / "clients" / "0").iterdir()] == ["2.safetensors"]


def test_tensors_come_back_whatever_they_are(tmp_path):
    shared = torch.arange(6.0)
    tensors = {
        "view": shared.view(2, 3).T,
        "same": shared,
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "half": torch.ones(2, dtype=torch.float16),
        "flag": torch.tensor([True]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    write_tensors(tmp_path / "a" / "b.safetensors", tensors)
    back = read_tensors(tmp_path / "a" / "b.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert all(back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.safetensors"]


def test_a_damaged_file_is_an_error_and_a_clients_damaged_state_is_a_lost_one(tmp_path):
    store = ClientStore(tmp_path, "", "0")
    store.save(1, {"w": torch.ones(3)}, after=-1)
    path = tmp_path / "clients" / "0" / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert store.load(1) is None
    with pytest.raises(FedhetError, match="1.safetensors is damaged"):
        read_tensors(path)
    assert read_tensors(tmp_path / "none.safetensors") is None


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_one_flipped_bit_is_damage_and_a_lost_state(tmp_path, kind):
    store = ClientStore(tmp_path, "", "0")
    store.save(1, {"w": torch.ones(3, 2).to(kind), "n": torch.tensor(1).to(kind)}, after=-1)
    path = tmp_path / "clients" / "0" / "1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FedhetError, match=r"1\.safetensors is damaged: its content is not what its digest says"):
        read_tensors(path)
    assert store.load(1) is None


def test_a_flipped_bit_of_a_public_dataset_has_it_removed_and_asked_for_again(tmp_path):
    public, store = PublicDataset(torch.ones(4, 2)), ClientStore(tmp_path, "", "0")
    store.keep(public)
    path = tmp_path / "public" / f"{public.digest}.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"shape":[4,2]', b'"shape":[2,4]'))
    with pytest.raises(LostState):
        store.public_dataset(public.digest)
    assert not path.exists()


def test_a_file_without_a_digest_is_damaged(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(FedhetError, match="has no digest"):
        read_tensors(tmp_path / "w.safetensors")
