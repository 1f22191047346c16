"""The contract test: a class of tests, which pytest collects from a subclass."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from fedhet.method import Method
from fedhet.options import Value
from fedhet.testing.ordinary import Ordinary
from fedhet.testing.privacy import Privacy
from fedhet.testing.runs import Case, Kept
from fedhet.testing.trouble import Trouble


class MethodContract(Ordinary, Trouble, Privacy):
    """The properties that every method must have, whatever it computes.

    Attributes:
        method: a registered name, `"package.module:name"`, or a Method.
        settings: what it needs beside what all are run with (`fedhet.testing.runs.COMMON`).
        architectures: the clients' architectures; empty: mixed ones, where the method's networks may differ.
    """

    method: ClassVar[str | Method]
    settings: ClassVar[Mapping[str, Value]] = {}
    architectures: ClassVar[str] = ""

    @pytest.fixture
    def case(self) -> Case:
        """The method, and the settings of its runs."""
        return Case.of(self.method, self.settings, self.architectures)

    @pytest.fixture
    def kept(self, case: Case, tmp_path_factory: pytest.TempPathFactory) -> Kept:
        """Runs that several tests look at."""
        return Kept(case, tmp_path_factory)

    @pytest.fixture(autouse=True)
    def _no_report(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The report takes longer than the run that it is on, and has tests of its own."""

        def nothing(folder: Path) -> None: ...

        monkeypatch.setattr("fedhet.results.recorder.write_report", nothing)
