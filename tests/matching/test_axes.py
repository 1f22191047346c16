import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhet.matching import class_weighted_average, gather, scatter, stack_gates, unstack_gates


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    units=st.integers(1, 6),
    more=st.integers(0, 4),
    block=st.integers(1, 3),
    groups=st.integers(1, 4),
    axis=st.sampled_from([0, 1, 2, -1, -2]),
)
def test_gather_undoes_scatter(seed, units, more, block, groups, axis):
    random = np.random.RandomState(seed)
    shape = [2, 3, 2]
    shape[axis] = groups * units * block
    array = random.randn(*shape).astype(np.float32)
    assignment = random.permutation(units + more)[:units]
    moved = scatter(array, axis, assignment, units + more, block=block, groups=groups)
    assert moved.dtype == array.dtype
    assert moved.shape[axis] == groups * (units + more) * block
    assert np.count_nonzero(moved) == np.count_nonzero(array)
    np.testing.assert_array_equal(gather(moved, axis, assignment, block=block, groups=groups), array)


def test_a_flatten_moves_blocks_of_positions():
    weight = np.array([[1, 2, 3, 4, 5, 6]])
    np.testing.assert_array_equal(scatter(weight, 1, [2, 0], 3, block=3), [[4, 5, 6, 0, 0, 0, 1, 2, 3]])


def test_gates_move_alike():
    biases = np.array([1, 2, 10, 20, 100, 200, 1000, 2000])
    np.testing.assert_array_equal(
        scatter(biases, 0, [2, 0], 3, groups=4), [2, 0, 1, 20, 0, 10, 200, 0, 100, 2000, 0, 1000]
    )


def test_gates_side_by_side():
    weight = np.arange(24).reshape(8, 3)
    rows = stack_gates(weight)
    np.testing.assert_array_equal(rows[1], np.concatenate([weight[1], weight[3], weight[5], weight[7]]))
    np.testing.assert_array_equal(unstack_gates(rows), weight)
    np.testing.assert_array_equal(stack_gates(weight[:, 0])[1], weight[[1, 3, 5, 7], 0])
    np.testing.assert_array_equal(unstack_gates(stack_gates(weight[:, 0]))[:, 0], weight[:, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scatter(np.ones(5), 0, [0, 1], 3), "5 entries, not 1 groups of 2 units of 1"),
        (lambda: scatter(np.ones(2), 0, [0, 3], 3), r"indices 0\.\.3, but there are 3"),
        (lambda: scatter(np.ones(2), 0, [1, 1], 3), "same global one"),
        (lambda: gather(np.ones(7), 0, [0], block=2), "7 entries"),
        (lambda: stack_gates(np.ones((7, 2))), "7 entries"),
        (lambda: unstack_gates(np.ones((2, 7))), "7 entries"),
    ],
)
def test_axes_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_classes_are_averaged_by_who_holds_them():
    weights = [np.full((3, 2), 1.0), np.full((3, 2), 4.0)]
    counts = [[30, 0, 0], [10, 5, 0]]
    expected = [[1.75, 1.75], [4, 4], [0, 0]]
    np.testing.assert_allclose(class_weighted_average(weights, counts), expected)
    np.testing.assert_allclose(class_weighted_average([w.T for w in weights], counts, axis=1), np.transpose(expected))
    np.testing.assert_allclose(class_weighted_average([w[:, 0] for w in weights], counts), [1.75, 4, 0])


def test_averages_that_do_not_fit():
    with pytest.raises(ValueError, match="one shape"):
        class_weighted_average([np.ones((2, 3)), np.ones((2, 4))], np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"\(2 clients, 2 classes\), got \(2, 3\)"):
        class_weighted_average([np.ones((2, 3))] * 2, np.ones((2, 3)))
    with pytest.raises(ValueError, match="negative"):
        class_weighted_average([np.ones((2, 3))] * 2, [[1, -1], [1, 1]])
