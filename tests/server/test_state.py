"""A strategy's state: typed values, arrays, and arrays by client, saved and loaded whole."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fedhet.errors import FedhetError
from fedhet.messages import Arrays
from fedhet.server import ArraysBy, ClientRecord, State
from fedhet.utils.files import write_tensors


@dataclass
class Own(State):
    """A state with fields of all three kinds."""

    pass_: int = 0
    eta: float = 0.0
    peers: list[str] = field(default_factory=list)
    seen_by: dict[str, Any] = field(default_factory=dict)
    target: Arrays = field(default_factory=dict)
    before: ArraysBy = field(default_factory=dict)


def state_of(round=3):
    return Own(
        round=round,
        clients={"2": ClientRecord(10, "mlp", 3, partition=(2, 11)), "10": ClientRecord(7)},
        run="abc",
        public="0f",
        public_size=64,
        model={"0.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(4)},
        pass_=2,
        eta=0.1,
        peers=["2"],
        seen_by={"2": 64},
        target={"values": np.ones((0, 5), np.float16), "flags": np.array([True, False])},
        before={"10": {"features/of": np.full((2, 2), 0.1)}, "a-b": {"features": np.zeros(1)}},
    )


def plain(value):
    """Return what a state holds, in order, with the dtype, shape and bytes of its arrays."""
    if isinstance(value, dict):
        return [(key, plain(each)) for key, each in value.items()]
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def assert_equal(one, other):
    assert (type(one), plain(vars(one))) == (type(other), plain(vars(other)))


def test_save_and_load(tmp_path):
    state = state_of()
    state.save(tmp_path / "checkpoint" / "state")
    assert_equal(Own.load(tmp_path / "checkpoint" / "state"), state)


def test_crash_while_saving(tmp_path, monkeypatch):
    state_of(3).save(tmp_path / "state")

    def die(*args, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        state_of(4).save(tmp_path / "state")
    assert Own.load(tmp_path / "state").round == 3


def test_damaged_checkpoint(tmp_path):
    path = tmp_path / "state"
    with pytest.raises(FedhetError, match="state cannot be read as a checkpoint"):
        Own.load(path)
    state_of().save(path)
    content = path.read_bytes()
    for damage in (b"", content[: len(content) // 2], content.replace(b"clients", b"cliente")):
        path.write_bytes(damage)
        with pytest.raises(FedhetError, match="state cannot be read as a checkpoint"):
            Own.load(path)
    write_tensors(path, {"model/w": torch.ones(2)})
    with pytest.raises(FedhetError, match="state cannot be read as a checkpoint"):
        Own.load(path)


def test_state_of_another_method(tmp_path):
    state_of().save(tmp_path / "state")
    with pytest.raises(FedhetError, match="arrays '(target|before)' are of another method"):
        State.load(tmp_path / "state")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_flipped_bits_are_noticed(saved, place, bit):
    """In a value, a name, a shape, the text or the digest; or it is in what nobody reads."""
    path, content = saved
    place = int(place * len(content))
    flipped = bytes([*content[:place], content[place] ^ 1 << bit, *content[place + 1 :]])
    path.write_bytes(flipped)
    try:
        found = Own.load(path)
    except FedhetError:
        return
    assert_equal(found, state_of())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "state"
    state_of().save(path)
    return path, path.read_bytes()


def test_checkpoint_without_digest(tmp_path):
    text = json.dumps({"round": 3, "values": {}, "clients": {}})
    save_file({"model/w": np.ones(2)}, tmp_path / "state", metadata={"state": text})
    with pytest.raises(FedhetError, match="has no digest"):
        Own.load(tmp_path / "state")


@pytest.mark.parametrize(
    "values",
    [{"clients": {"../0": ClientRecord(3)}}, *({"run": name} for name in ("../../elsewhere", "/", "a/b"))],
)
def test_names_that_are_paths_are_refused(tmp_path, values):
    State(**values).save(tmp_path / "state")
    with pytest.raises(FedhetError, match="cannot be read as a checkpoint"):
        State.load(tmp_path / "state")


class Undecorated(State):
    eta: float = 0.0


class TestWhatACheckpointWouldLose:
    @pytest.mark.parametrize("kind", [State, Undecorated])
    def test_other_attributes_than_fields_are_refused(self, kind):
        with pytest.raises(AttributeError, match=f"{kind.__name__} has no field 'eta', which is lost .* @dataclass"):
            kind().eta = 0.5

    @pytest.mark.parametrize(
        "value", [{1: 2}, {"a": {2: "b"}}, {3}, np.float32(1), [torch.ones(1)], {"a": np.ones(1)}], ids=repr
    )
    def test_values_that_change_are_refused(self, tmp_path, value):
        with pytest.raises(FedhetError, match=r"Own\.seen_by cannot be saved and read again unchanged"):
            Own(seen_by=value).save(tmp_path / "state")
