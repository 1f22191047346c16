"""Changes of arrays as truncated factors."""

import numpy as np
import pytest

from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.messages import WireError
from fedhet.messages.payload import from_factors, to_factors

RNG = np.random.default_rng(0)
BEFORE = {
    "low": RNG.normal(size=(20, 30)),
    "kernel": RNG.normal(size=(16, 4, 3, 3)),
    "full": RNG.normal(size=(5, 6)),
    "bias": RNG.normal(size=7),
    "scale": np.array(2.0),
    "steps": np.array(3),
}
CHANGE = {
    "low": RNG.normal(size=(20, 2)) @ RNG.normal(size=(2, 30)),
    "kernel": (RNG.normal(size=(16, 3)) @ RNG.normal(size=(3, 36))).reshape(16, 4, 3, 3),
    "full": RNG.normal(size=(5, 6)),
    "bias": RNG.normal(size=7),
    "scale": np.array(0.5),
    "steps": np.array(4),
}
AFTER = {name: BEFORE[name] + change for name, change in CHANGE.items()}
SPEC = {name: (array.shape, array.dtype.name) for name, array in AFTER.items()}


def unpacked(packed, before=BEFORE):
    return from_factors(packed, before, SPEC, "its update")


def test_factors_restore_low_rank_changes():
    packed = to_factors(AFTER, BEFORE, 1 - 1e-12)
    shapes = {name: array.shape for name, array in packed.items()}
    assert shapes == {
        "low:left": (20, 2),
        "low:right": (2, 30),
        "kernel:left": (16, 3),
        "kernel:right": (3, 36),
        "full": (5, 6),
        "bias": (7,),
        "scale": (),
        "steps": (),
    }
    for name, array in unpacked(packed).items():
        np.testing.assert_allclose(array, AFTER[name], rtol=1e-12, atol=1e-12, err_msg=name)
        assert (array.shape, array.dtype.name) == SPEC[name]


@pytest.mark.parametrize("energy", [0.3, 0.8, 0.95])
def test_the_rank_is_the_smallest_with_the_energy(energy):
    matrix = np.logspace(0, -2, 30)[:, None] * RNG.normal(size=(30, 80))
    packed = to_factors({"a": matrix}, {}, energy)
    squares = np.linalg.svd(matrix, compute_uv=False) ** 2
    rank = packed["a:left"].shape[1]
    assert squares[:rank].sum() >= energy * squares.sum() > squares[: rank - 1].sum()
    lost = matrix - packed["a:left"] @ packed["a:right"]
    assert np.square(lost).sum() == pytest.approx(squares[rank:].sum())


@pytest.mark.parametrize("flower", [False, True])
def test_factors_have_one_order_in_memory(flower):
    """Products of other orders round differently, and then a run in Flower's loop is another one."""
    packed = to_factors(AFTER, BEFORE, 0.9)
    other = {name: np.asarray(array, order="F") for name, array in packed.items()}
    for arrays in (packed, decode_arrays(encode_arrays(other, flower=flower))):
        assert all(array.flags.c_contiguous for array in arrays.values())


def test_without_a_change_or_a_start():
    packed = to_factors({"a": np.ones((9, 9))}, {"a": np.ones((9, 9))}, 0.95)
    assert packed["a:left"].shape == (9, 1)
    assert not (packed["a:left"] @ packed["a:right"]).any()
    packed = to_factors(AFTER, {}, 1 - 1e-12)  # as if from zero
    np.testing.assert_allclose(unpacked(packed, {})["low"], AFTER["low"], rtol=1e-12, atol=1e-12)


GOOD = to_factors(AFTER, BEFORE, 0.95)
BAD = {
    "a factor too narrow": {"low:right": GOOD["low:right"][:1]},
    "factors of too high a rank": {"low:left": np.ones((20, 21)), "low:right": np.ones((21, 30))},
    "a factor without axes": {"low:left": np.array(1.0)},
    "one factor alone": {"low:right": None},
    "another dtype": {"low:left": GOOD["low:left"].astype("float32")},
    "no array": {"bias": None},
    "not a number": {"kernel:left": GOOD["kernel:left"] * np.nan},
    "a product too large": {"low:left": GOOD["low:left"] * 1e7, "low:right": GOOD["low:right"] * 1e7},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_wrong_factors_are_refused(changes):
    packed = {name: array for name, array in {**GOOD, **changes}.items() if array is not None}
    with pytest.raises(WireError, match="its update: "):
        unpacked(packed)
