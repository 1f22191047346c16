"""`fedhet.recommend` with real training, on digits and on a user's own networks."""

import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

import fedhet
from fedhet.config import configuration

_spec = importlib.util.spec_from_file_location("networks_of_ones_own", Path(__file__).with_name("test_candidates.py"))
own = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(own)


VERDICTS = ("Nothing", "There are too few seeds")
"""Verdicts that no federated method wins; a slow machine completes fewer runs in its budget."""


def recommended(folder, config, budget, **options):
    """Returns the recommendation, and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    done = fedhet.recommend(config, out=folder, console=console, budget=budget, **options)
    return done, console.file.getvalue()


@pytest.mark.slow
def test_five_networks_and_a_public_dataset(tmp_path):
    settings = {"preset": "fedhenn/digits", "clients": 5, "samples-per-client": 30, "partition": "iid", "rounds": 2}
    done, printed = recommended(tmp_path, settings, 40, methods=["fedhenn", "fedmd"], seeds=[0, 1, 2])
    assert not done.beats_alone, "networks learn little in two rounds"
    controls = ("label-spreading", "nearest-neighbour", "logistic-regression")
    assert done.method in (*controls, "local")
    assert any(verdict in printed for verdict in VERDICTS)
    config = configuration.resolve(configuration.read(tmp_path / "recommended.toml"))
    assert (config.method, config.clients, config.test_split) == (done.method, 5, "drawn")
    assert (tmp_path / "comparison.html").is_file()
