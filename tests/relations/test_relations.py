"""Programs that hypothesis draws satisfy all relations.

The quick suite draws a few programs for each relation. `pytest -m relations` draws for `RELATIONS_MINUTES` (default 10)
in all, from the seed given by `--hypothesis-seed`.
"""

import itertools
import os
import time
import traceback
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from tests.relations import own_terms, reports  # noqa: F401 - they register relations
from tests.relations.programs import FOLDERS, programs
from tests.relations.relations import RELATIONS

MINUTES = float(os.environ.get("RELATIONS_MINUTES", "10"))
ALL = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}

pytestmark = [pytest.mark.usefixtures("no_report"), pytest.mark.filterwarnings("error::RuntimeWarning")]


@pytest.fixture
def folder(tmp_path: Path, home: Path) -> Path:
    FOLDERS.append(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [name for name, relation in RELATIONS.items() if not relation.slow])
@given(data=st.data())
@settings(max_examples=2, derandomize=True, phases=[Phase.generate], **ALL)
def test_a_few_programs(name: str, folder: Path, data: st.DataObject) -> None:
    check(name, folder, data)


@pytest.mark.relations
@pytest.mark.parametrize("name", RELATIONS)
def test_many_programs(name: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """Draw ten programs from a new seed until the time is over; each failure is shown."""
    end = time.monotonic() + 60 * MINUTES / len(RELATIONS)
    failures: list[str] = []
    numbers = itertools.count(1000 * int(request.config.getoption("--hypothesis-seed") or 0))
    while time.monotonic() < end:

        @seed(next(numbers))
        @given(data=st.data())
        @settings(max_examples=10, phases=[Phase.generate], **ALL)
        def drawn(data: st.DataObject) -> None:
            check(name, folder, data)

        try:
            drawn()
        except Unsatisfiable:
            pass
        except Exception as error:
            failures.append(described(error))
    assert not failures, "\n\n".join(failures)


def described(error: Exception) -> str:
    """Return the program, the draws that follow it, and the failed line of a relation's check."""
    notes = [line for note in error.__notes__ for line in note.splitlines()]
    shown = [line for line in notes if " clients, {" in line or ("Draw" in line and "Program(" not in line)]
    if isinstance(error, ExceptionGroup):  # a failure that did not happen again
        error = error.exceptions[0]
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "\n".join([*shown, f"line {last.lineno} of {last.name}: {type(error).__name__}: {str(error).strip()}"])


def check(name: str, folder: Path, data: st.DataObject) -> None:
    relation = RELATIONS[name]
    program = data.draw(programs(**relation.programs))
    note(f"{name}: {program}")
    relation.check(data.draw, program, folder)
