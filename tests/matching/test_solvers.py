import sys

import numpy as np
import pytest

from fedhet.matching import SOLVERS, get_solver, match_layer


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_agree(name):
    pytest.importorskip({"scipy": "scipy", "lapsolver": "lapsolver", "lapx": "lap"}[name])
    random = np.random.RandomState(0)
    cost = random.rand(20, 35).astype(np.float32)
    np.testing.assert_array_equal(get_solver(name)(cost), get_solver("scipy")(cost))
    layers = [random.randn(12, 8) for _ in range(4)]
    for one, other in zip(match_layer(layers, solver=name).assignments, match_layer(layers).assignments, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [("lapsolver", "lapsolver", "does not build on Python 3.11"), ("lapx", "lap", r"pip install 'fedhet\[lapx\]'")],
)
def test_a_missing_solver_says_how_to_get_it(monkeypatch, name, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message):
        match_layer([np.eye(2), np.eye(2)], solver=name)
