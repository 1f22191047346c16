"""Each method trains for a task, or refuses it before any client has trained."""

import dataclasses
from pathlib import Path

import pytest

from fedhet.methods import registry
from fedhet.results.history import read_history
from tests.relations.outcomes import run
from tests.relations.programs import FOLDERS, NETWORK_OF, Program

pytestmark = [pytest.mark.usefixtures("no_report", "home"), pytest.mark.slow]
PROGRAM = Program(clients=2, double=False)
TASKS = [
    "multi-label",
    "regression",
    *(pytest.param(task, marks=pytest.mark.long) for task in ("classification", "binary")),
]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", registry.own_methods())
def test_a_method_trains_for_a_task_or_refuses_it_before_training(method: str, task: str, tmp_path: Path) -> None:
    FOLDERS.append(tmp_path)
    network = NETWORK_OF.get(method, PROGRAM.network)
    outcome = run(dataclasses.replace(PROGRAM, method=method, task=task, network=network), tmp_path)
    assert not outcome.failures
    if outcome.refused:
        assert task != "classification"
        assert "no client can take part" in outcome.refused, outcome.refused
        assert read_history(outcome.folder) == []
