"""Time of matching VGG-9's rows (filters or neurons, by inputs and a bias) against the assignments alone."""

import time

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits

from fedhet.algorithms.matching import bbp_map, match_layer

VGG9 = [(32, 28), (64, 289), (128, 577), (128, 1153), (256, 1153), (256, 2305), (512, 4097), (512, 513)]


def initial_layers(clients: int, rows: int, columns: int) -> list[np.ndarray]:
    """Layers as PyTorch initialises them: uniform within 1 / sqrt(inputs)."""
    random, bound = np.random.default_rng(0), (columns - 1) ** -0.5
    return [random.uniform(-bound, bound, (rows, columns)).astype(np.float32) for _ in range(clients)]


@pytest.mark.benchmark
def test_vgg9_takes_little_more_than_its_assignments(monkeypatch, capsys):
    """Sixteen clients, five sweeps; the assignments alone are offered as many new rows as a client has."""
    alone, matches = 0.0, []

    def all_offered(costs, size):
        nonlocal alone
        start = time.process_time()
        columns = linear_sum_assignment(costs)[1]
        alone += time.process_time() - start
        return columns

    layers = [initial_layers(16, *shape) for shape in VGG9]
    with threadpool_limits(1):  # the solver has no more than one thread
        match_layer(layers[0])  # which imports SciPy
        start = time.process_time()
        matches.append([match_layer(each) for each in layers])
        seconds = time.process_time() - start
        monkeypatch.setattr(bbp_map, "_assigned", all_offered)
        matches.append([match_layer(each) for each in layers])
    for one, other in zip(*matches, strict=True):
        assert all(map(np.array_equal, one.assignments, other.assignments))
    with capsys.disabled():
        print(f"\nin all {seconds:.2f} s, {seconds / alone:.2f} times the assignments alone")
    assert seconds <= 3 * alone
